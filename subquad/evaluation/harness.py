"""Run tasks of lm-evaluation-harness, built-in or from a folder, on a causal language model. Needs the extra `eval`."""

from __future__ import annotations

import contextlib
import difflib
import importlib.metadata
import json
import logging
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from subquad.config import check_at_least
from subquad.data.special_tokens import separator_id
from subquad.data.tokenizers import check_vocabulary
from subquad.extras import needed
from subquad.hf import SubquadForCausalLM
from subquad.models import Decoder
from subquad.version import __version__

with needed("evaluating tasks"):
    from lm_eval.evaluator import evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import make_table

logger = logging.getLogger(__name__)

LIMITS = ("max_position_embeddings", "n_positions", "n_ctx")
"""Configuration fields in which transformers models store their number of positions."""
SEEDS = {"python": 0, "numpy": 1234, "torch": 1234, "fewshot": 1234}
"""The harness's defaults, so that few-shot examples match other published results."""
PACKAGES = ("lm_eval", "torch", "transformers")
"""Packages whose versions are recorded in the result."""
BOOTSTRAP = 1000
"""Bootstrap samples for standard errors of metrics without a closed form."""


@dataclass(frozen=True)
class TaskEvaluation:
    """The result of `evaluate_tasks`."""

    results: dict[str, dict[str, Any]]
    """By task, and by group if there are any: each metric as `metric,filter`, and `metric_stderr,filter`."""
    groups: dict[str, dict[str, Any]]
    samples: dict[str, dict[str, int]]
    """By task: number of examples in it (`original`) and measured (`effective`)."""
    num_fewshot: dict[str, int]
    task_versions: dict[str, Any]
    higher_is_better: dict[str, dict[str, bool | None]]
    config: dict[str, Any]
    """Settings that decide the results: model, window, prefix, batch size, limit, seeds."""
    requests: int
    """Answers scored, texts measured and prompts continued."""
    cut: int
    """Requests whose context was cut on the left to fit the window."""
    versions: dict[str, str]
    seconds: float
    table: str
    """The harness's table, in Markdown."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        values = asdict(self)
        del values["table"]
        return json.loads(json.dumps(values, default=str))


def evaluate_tasks(
    model: Decoder | PreTrainedModel,
    tokenizer: Tokenizer | PreTrainedTokenizerBase,
    tasks: Sequence[str],
    /,
    **options: Any,
) -> TaskEvaluation:
    """Measure a model on tasks and restore its mode; see `prepare_tasks` for options and errors."""
    training = model.training
    try:
        return prepare_tasks(model, tokenizer, tasks, **options).measure()
    finally:
        model.train(training)


@dataclass(frozen=True)
class PreparedTasks:
    """A model and loaded tasks, checked and ready to measure."""

    asked: HarnessModel
    loaded: dict[str, Any]
    names: list[str]
    limit: int | None

    def measure(self) -> TaskEvaluation:
        """Run the tasks with random generators seeded by `SEEDS`."""
        begin, asked = time.perf_counter(), self.asked
        with _seeded(), quiet(), _one_process():
            found: Any = evaluate(asked, self.loaded, limit=self.limit, bootstrap_iters=BOOTSTRAP, log_samples=False)
        seconds = time.perf_counter() - begin
        if asked.cut:
            logger.warning(
                "%d of %d requests were longer than the window of %d tokens and lost their start; raise the length",
                asked.cut, asked.asked, asked.max_length,
            )  # fmt: skip
        return TaskEvaluation(
            results=found["results"],
            groups=found.get("groups", {}),
            samples=found["n-samples"],
            num_fewshot=found["n-shot"],
            task_versions=found["versions"],
            higher_is_better=found["higher_is_better"],
            config=_settings(asked, self.names, self.limit),
            requests=asked.asked,
            cut=asked.cut,
            versions={"subquad": __version__, **{name: importlib.metadata.version(name) for name in PACKAGES}},
            seconds=seconds,
            table="\n".join(make_table(found, column) for column in ("results", "groups") if found.get(column)),
        )


def prepare_tasks(
    model: Decoder | PreTrainedModel,
    tokenizer: Tokenizer | PreTrainedTokenizerBase,
    tasks: Sequence[str],
    /,
    *,
    task_path: str | Path | None = None,
    length: int | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
    batch_size: int = 8,
    prefix_token: int | None = None,
) -> PreparedTasks:
    """Load tasks of lm-evaluation-harness for a `Decoder` or any causal transformers model.

    `tasks` names tasks, groups and tags. Tasks in the YAML files of `task_path` take precedence and find their data
    files relative to that folder; the harness's own need their data on this machine or a network.

    `length` is the window in tokens; longer contexts are cut on the left. A `Decoder` needs it, since most mechanisms
    have no limit; for a transformers model None means the model's own limit. A `Tokenizer` is used as in training: no
    special tokens are added, and special tokens spelled out in a text are read as text. `prefix_token` is the token
    before the first one of a text: by default the tokenizer's document separator, else its line break; for a
    transformers tokenizer BOS, else EOS.

    The log-likelihood of a text is a sum over windows of `length` tokens without overlap, the first of which begins
    with `prefix_token`; the last one predicts the remaining tokens, with more context if `length` leaves room.

    `num_fewshot` replaces the number of a task, except a task that sets 0. `limit` takes the first examples of each
    task. Random generators are seeded by `SEEDS` and restored. Raises `ImportError` without lm_eval, `ValueError` for
    an unknown task or a number out of range, and `ConnectionError` if a task's data can't be found or fetched.
    """
    _check(tasks, task_path, length=length, num_fewshot=num_fewshot, limit=limit, batch_size=batch_size)
    with quiet():
        asked = HarnessModel(model, tokenizer, length, batch_size, prefix_token)
    with _seeded():
        loaded = _load(list(tasks), task_path)
        _set_fewshot(loaded["tasks"], num_fewshot)
    return PreparedTasks(asked, loaded, list(tasks), limit)


def _check(tasks: Sequence[str], task_path: str | Path | None, **numbers: int | None) -> None:
    if isinstance(tasks, str) or not tasks:
        raise ValueError(f"tasks must be a list of at least one name, got {tasks!r}")
    if task_path is not None and not Path(task_path).is_dir():
        raise ValueError(f"task_path must be a folder with YAML files of tasks, got {str(task_path)!r}")
    for name, value in numbers.items():
        check_at_least(0 if name == "num_fewshot" else 1, **{name: value})


def _load(names: list[str], task_path: str | Path | None) -> Any:
    """Load the tasks with their data; tasks in `task_path` take precedence."""
    folder = None if task_path is None else Path(task_path).resolve()
    manager = None if folder is None else TaskManager(include_path=folder, include_defaults=False)
    if manager is None or not set(names) <= set(manager.all_tasks):
        manager = TaskManager(include_path=folder)  # slow: indexes the harness's own tasks too (10 s)
    for name in names:
        if name not in manager.task_index:
            own = [] if folder is None else TaskManager(include_path=folder, include_defaults=False).all_tasks
            near = difflib.get_close_matches(name, manager.all_tasks, n=3)
            raise ValueError(
                f"unknown task {name!r}; "
                + (f"did you mean {' or '.join(map(repr, near))}? " if near else "")
                + (f"{task_path} has {', '.join(own) or 'none'}; " if folder else "")
                + "`lm-eval ls tasks` lists the harness's own"
            )
    try:
        with contextlib.chdir(folder or Path.cwd()):
            return manager.load(names)
    except ConnectionError as error:
        raise ConnectionError(
            f"the data of {', '.join(names)} is not on this machine and couldn't be downloaded: {error}"
        ) from error


def _set_fewshot(tasks: dict[str, Any], num_fewshot: int | None) -> None:
    """Set the number of few-shot examples by the harness's rule: a task that sets 0 keeps it."""
    for name, task in tasks.items():
        own = task.get_config("num_fewshot")
        if own is None:
            task.set_config(key="num_fewshot", value=num_fewshot or 0)
        elif num_fewshot is not None and own != 0:
            task.set_config(key="num_fewshot", value=num_fewshot)
        elif num_fewshot:
            logger.warning("%s fixes num_fewshot at 0 and ignores num_fewshot=%d", name, num_fewshot)
        task.set_fewshot_seed(seed=SEEDS["fewshot"])


def _settings(asked: Any, tasks: Sequence[str], limit: int | None) -> dict[str, Any]:
    model = asked.model
    return {
        "model": type(model).__name__,
        "attention": getattr(model.config, "attention", None),
        "parameters": sum(p.numel() for p in model.parameters()),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "tasks": list(tasks),
        "length": asked.max_length,
        "prefix_token": asked.prefix_token_id,
        "batch_size": asked.batch_size,
        "limit": limit,
        "bootstrap": BOOTSTRAP,
        "seeds": SEEDS,
    }


@contextmanager
def _seeded() -> Iterator[None]:
    """Seed the random generators with `SEEDS` within the block, and restore them afterwards."""
    python, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        random.seed(SEEDS["python"])
        np.random.seed(SEEDS["numpy"])
        torch.manual_seed(SEEDS["torch"])
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy_state)


@contextmanager
def _one_process() -> Iterator[None]:
    """Keep the harness from forking within the block, and redirect what it prints to standard error."""
    name = "DISABLE_MULTIPROC"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


class HarnessModel(HFLM):
    """`HFLM` over a model in memory that counts truncated requests and refuses impossible ones.

    `asked` counts the requests and `cut` those whose context was cut on the left. Raises `ValueError` for a tokenizer,
    prefix or length that doesn't fit the model, and for an answer that is empty or longer than the window.
    """

    def __init__(
        self,
        model: Decoder | PreTrainedModel,
        tokenizer: Tokenizer | PreTrainedTokenizerBase,
        length: int | None,
        batch_size: int,
        prefix_token: int | None,
    ) -> None:
        self.asked = self.cut = 0
        vocabulary = model.config.vocab_size
        fast: Any = tokenizer
        end, adds_bos = None, None
        if isinstance(tokenizer, Tokenizer):
            check_vocabulary(tokenizer, vocabulary)
            end = separator_id(tokenizer)
            fast = PreTrainedTokenizerFast(
                tokenizer_object=Tokenizer.from_str(tokenizer.to_str()),
                eos_token=None if end is None else tokenizer.id_to_token(end),
                split_special_tokens=True,  # special tokens spelled out in a text are read as text, as in training
                clean_up_tokenization_spaces=False,
            )
            adds_bos = False
        prefix = _prefix(tokenizer) if prefix_token is None else prefix_token
        if not 0 <= prefix < vocabulary:
            raise ValueError(
                f"prefix_token must be between 0 and {vocabulary - 1}, the model's vocabulary, got {prefix}"
            )
        if fast.pad_token_id is None:
            # Any token will do since padding is masked; a new pad token would be outside the embedding.
            fast.pad_token_id = prefix
        super().__init__(
            pretrained=_as_transformers(model, length, end),
            tokenizer=fast,
            prefix_token_id=prefix,
            max_length=length,
            batch_size=batch_size,
            add_bos_token=adds_bos,
        )

    def tok_decode(self, tokens: Any, skip_special_tokens: bool = True) -> Any:
        """Return the text of tokens; None stays None: the harness asks for EOS, and a tokenizer may have none."""
        return None if tokens is None else super().tok_decode(tokens, skip_special_tokens=skip_special_tokens)

    def _loglikelihood_tokens(
        self, requests: Sequence[Any], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> Any:
        rolling = override_bs is not None  # windows of a text, which the harness has cut to fit already
        for texts, context, answer in requests:
            if not answer:
                raise ValueError(f"a task's answer {texts[1]!r} adds no token after {texts[0][-40:]!r}")
            if len(answer) > self.max_length:
                raise ValueError(
                    f"a task's answer has {len(answer)} tokens, more than the window of {self.max_length}; "
                    "raise --length"
                )
            self.asked += not rolling
            self.cut += len(context) + len(answer) > self.max_length + 1
        return super()._loglikelihood_tokens(requests, disable_tqdm=disable_tqdm or rolling, override_bs=override_bs)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> Any:
        """Return log p of whole texts, in windows without overlap; the last has as much context as fits."""
        self.asked += len(requests)
        return super().loglikelihood_rolling(requests, disable_tqdm=disable_tqdm)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> Any:
        """Continue prompts up to a stop string; a prompt is cut so that its continuation fits the window."""
        for request in requests:
            prompt, options = request.args
            new = normalize_gen_kwargs(options, self.max_gen_toks)["max_gen_toks"]
            if new >= self.max_length:
                raise ValueError(
                    f"a task generates up to {new} tokens, which leaves no room for a prompt in a window of "
                    f"{self.max_length}; raise --length"
                )
            self.asked += 1
            self.cut += len(self.tok_encode(prompt)) > self.max_length - new
        return super().generate_until(requests, disable_tqdm=disable_tqdm)


def _as_transformers(model: Decoder | PreTrainedModel, length: int | None, end_token: int | None) -> PreTrainedModel:
    """Return the model, not a copy, as a transformers model; a decoder's `generate` then ends at `end_token`.

    Raises `ValueError` for a length beyond the model's positions, for a decoder without `length`, and for a model that,
    like `PerceiverAR`, doesn't predict every token that a task scores.
    """
    decoder = model.decoder if isinstance(model, SubquadForCausalLM) else model
    if isinstance(decoder, Decoder):
        if decoder.predicts_last is not None:
            raise ValueError(
                f"tasks score answers of any length, but {decoder.config.attention} predicts only the last "
                f"{decoder.predicts_last} tokens; `subquad eval` without --tasks measures it on a text"
            )
        if length is None:
            raise ValueError("a decoder has no length limit: give one, such as length=1024")
        most = decoder.most_tokens
        model = SubquadForCausalLM.around(decoder, eos_token_id=end_token)
    else:
        most = next((n for key in LIMITS if (n := getattr(model.config, key, None)) is not None), None)
    if length is not None and most is not None and length > most:
        raise ValueError(f"length must be at most {most}, the model's number of positions, got {length}")
    found: Any = model
    return found


@contextmanager
def quiet() -> Iterator[None]:
    """Silence `HFLM`'s warnings about a model in memory (intended) and about each truncated text (`cut` counts)."""
    harness = logging.getLogger("lm_eval.models.huggingface")
    before = harness.level
    harness.setLevel(logging.ERROR)
    try:
        yield
    finally:
        harness.setLevel(before)


def _prefix(tokenizer: Tokenizer | PreTrainedTokenizerBase) -> int:
    """Return the default `prefix_token`."""
    if not isinstance(tokenizer, Tokenizer):
        special = (tokenizer.bos_token_id, tokenizer.eos_token_id)
        token = next((token for token in special if token is not None), None)
    elif (token := separator_id(tokenizer)) is None:
        line_break = tokenizer.encode("\n", add_special_tokens=False).ids
        token = line_break[0] if len(line_break) == 1 else None
    if token is None:
        raise ValueError(
            "the tokenizer has no token that can precede a text (document separator, line break, BOS or EOS); "
            "choose one with prefix_token"
        )
    return int(token)
