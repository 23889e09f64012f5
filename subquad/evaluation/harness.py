"""Tasks of lm-evaluation-harness, its own or those of a folder, on a causal language model. Needs the extra `eval`."""

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
from subquad.data.tokenizers import check_vocabulary, separator_id
from subquad.hf import SubquadConfig, SubquadForCausalLM
from subquad.models import Decoder
from subquad.version import __version__

try:
    from lm_eval.evaluator import evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import make_table
except ImportError as error:
    raise ImportError(
        "tasks are those of lm-evaluation-harness, which is not installed: pip install subquad[eval]"
    ) from error

logger = logging.getLogger(__name__)

LIMITS = ("max_position_embeddings", "n_positions", "n_ctx")
"""Where models of transformers keep the number of their positions."""
SEEDS = {"python": 0, "numpy": 1234, "torch": 1234, "fewshot": 1234}
"""The harness's own defaults, so that the examples in a prompt are those of other reports."""
PACKAGES = ("lm_eval", "torch", "transformers")
"""Those whose versions a result names."""
BOOTSTRAP = 1000
"""Resamplings for the standard error of a metric that has no formula for it."""


@dataclass(frozen=True)
class TaskEvaluation:
    """The result of `evaluate_tasks`."""

    results: dict[str, dict[str, Any]]
    """By task, and by group where there are any: each metric as `metric,filter`, and `metric_stderr,filter`."""
    groups: dict[str, dict[str, Any]]
    samples: dict[str, dict[str, int]]
    """By task: the examples that it has (`original`) and those that were asked (`effective`)."""
    num_fewshot: dict[str, int]
    task_versions: dict[str, Any]
    higher_is_better: dict[str, dict[str, bool | None]]
    config: dict[str, Any]
    """What decides the numbers: model, window, prefix, batch, limit, seeds."""
    requests: int
    """Answers scored, texts measured and prompts continued."""
    cut: int
    """Requests that were too long for the window and lost the start of what came before the answer."""
    versions: dict[str, str]
    seconds: float
    table: str
    """The harness's own table, in Markdown."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        values = asdict(self)
        del values["table"]
        plain: dict[str, Any] = json.loads(json.dumps(values, default=str))
        return plain


def evaluate_tasks(
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
) -> TaskEvaluation:
    """Measure a model on tasks and restore its mode; options and errors are those of `prepare_tasks`."""
    training = model.training
    try:
        return prepare_tasks(
            model,
            tokenizer,
            tasks,
            task_path=task_path,
            length=length,
            num_fewshot=num_fewshot,
            limit=limit,
            batch_size=batch_size,
            prefix_token=prefix_token,
        ).measure()
    finally:
        model.train(training)


@dataclass(frozen=True)
class PreparedTasks:
    """Tasks with their data and the model that they will ask: all that arguments can get wrong is checked."""

    asked: HarnessModel
    loaded: dict[str, Any]
    names: list[str]
    limit: int | None

    def measure(self) -> TaskEvaluation:
        """Ask the model, with the generators at `SEEDS`."""
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
    """Load tasks of lm-evaluation-harness, to measure a decoder or any causal model of transformers on them.

    `tasks` names tasks, groups and tags. Those of the YAML files in `task_path` come first, with their data files
    looked for from that folder; the harness's own need their data on this machine or a network.

    `length` is the most tokens that the model reads at once. A decoder of ours needs it, since most mechanisms have no
    limit of their own; None takes what a model of transformers says of itself. What comes before an answer is cut from
    the left to fit. A `Tokenizer` is used as in training: no special tokens are added, and those that a text spells out
    are text. `prefix_token` is what a text begins after: by default the tokenizer's separator of documents, or else its
    line break; of a tokenizer of transformers BOS, or else EOS.

    The log-likelihood of a text is a sum over windows of `length` tokens that do not overlap, the first of which begins
    with `prefix_token`; the last one predicts the rest of the tokens, with more context where `length` leaves room.

    `num_fewshot` replaces the number of a task that does not set 0 itself. `limit` takes the first examples of each
    task. Seeds are `SEEDS`; the generators' own states are left as they were. Raises `ImportError` where lm_eval is not
    installed, `ValueError` for an unknown task or a number out of range, and `ConnectionError` where a task's data is
    neither here nor to be had.
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
        raise ValueError(f"task_path must be a folder with the YAML files of tasks, got {str(task_path)!r}")
    for name, value in numbers.items():
        check_at_least(0 if name == "num_fewshot" else 1, **{name: value})


def _load(names: list[str], task_path: str | Path | None) -> Any:
    """Load the tasks with their data, those of `task_path` first."""
    folder = None if task_path is None else Path(task_path).resolve()
    manager = None if folder is None else TaskManager(include_path=folder, include_defaults=False)
    if manager is None or not set(names) <= set(manager.all_tasks):
        manager = TaskManager(include_path=folder)  # reads the harness's own too, which takes ten seconds
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
            f"the data of {', '.join(names)} is not on this machine and cannot be fetched without a network: {error}"
        ) from error


def _set_fewshot(tasks: dict[str, Any], num_fewshot: int | None) -> None:
    """Set the number of examples by the harness's rule: a task that sets 0 itself keeps it."""
    for name, task in tasks.items():
        own = task.get_config("num_fewshot")
        if own is None:
            task.set_config(key="num_fewshot", value=num_fewshot or 0)
        elif num_fewshot is not None and own != 0:
            task.set_config(key="num_fewshot", value=num_fewshot)
        elif num_fewshot:
            logger.warning("%s sets num_fewshot to 0 itself, which num_fewshot=%d does not change", name, num_fewshot)
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
    """Within the block the generators stand at `SEEDS`; after it where they were."""
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
    """Within the block nothing is forked, and what is printed goes to standard error."""
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
    """`HFLM` over a model in memory, which says what it cannot do and counts what it cut.

    `asked` counts the requests and `cut` those whose text before the answer was too long, so that its start was left
    out. Raises `ValueError` for what does not fit together, and for an answer that is longer than the window or has no
    token.
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
                split_special_tokens=True,  # those that a text spells out stay text, as in training
                clean_up_tokenization_spaces=False,
            )
            adds_bos = False
        prefix = _prefix(tokenizer) if prefix_token is None else prefix_token
        if not 0 <= prefix < vocabulary:
            raise ValueError(
                f"prefix_token must be between 0 and {vocabulary - 1}, the model's vocabulary, got {prefix}"
            )
        if fast.pad_token_id is None:
            # Any token does, for a mask covers it; a token of its own would lie outside of the embedding.
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
        """Return the text of tokens; None for no token, which is the end of text of a tokenizer that has none."""
        return None if tokens is None else super().tok_decode(tokens, skip_special_tokens=skip_special_tokens)

    def _loglikelihood_tokens(
        self, requests: Sequence[Any], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> Any:
        rolling = override_bs is not None  # windows of a text, which the harness cuts to fit
        for texts, context, answer in requests:
            if not answer:
                raise ValueError(f"the answer {texts[1]!r} of a task has no token of its own after {texts[0][-40:]!r}")
            if len(answer) > self.max_length:
                raise ValueError(
                    f"an answer of a task has {len(answer)} tokens, more than the window of {self.max_length}; "
                    "raise --length"
                )
            self.asked += not rolling
            self.cut += len(context) + len(answer) > self.max_length + 1
        return super()._loglikelihood_tokens(requests, disable_tqdm=disable_tqdm or rolling, override_bs=override_bs)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> Any:
        """Return log p of whole texts, in windows that do not overlap; the last has as many tokens before as fit."""
        self.asked += len(requests)
        return super().loglikelihood_rolling(requests, disable_tqdm=disable_tqdm)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> Any:
        """Continue prompts up to a stop string; a prompt and its continuation fit the window together."""
        for request in requests:
            prompt, options = request.args
            new = normalize_gen_kwargs(options, self.max_gen_toks)["max_gen_toks"]
            if new >= self.max_length:
                raise ValueError(
                    f"a task generates up to {new} tokens, which leaves no prompt in a window of {self.max_length}: "
                    "raise --length"
                )
            self.asked += 1
            self.cut += len(self.tok_encode(prompt)) > self.max_length - new
        return super().generate_until(requests, disable_tqdm=disable_tqdm)


def _as_transformers(model: Decoder | PreTrainedModel, length: int | None, end_token: int | None) -> PreTrainedModel:
    """Return the model itself, not a copy, as one of transformers; the `generate` of a decoder ends at `end_token`.

    Raises `ValueError` for a length that the model lacks, and for a model that (as `PerceiverAR`) does not predict all
    the tokens that a task scores.
    """
    decoder = model.model if isinstance(model, SubquadForCausalLM) else model
    if isinstance(decoder, Decoder):
        if decoder.predicts_last is not None:
            raise ValueError(
                f"tasks score answers of any length, and {decoder.config.attention} predicts its last "
                f"{decoder.predicts_last} tokens alone; `subquad eval` without --tasks measures it on a text"
            )
        if length is None:
            raise ValueError("a decoder has no length of its own: give one, as length=1024")
        most = decoder.most_tokens
        with torch.device("meta"):  # its own weights are replaced at once
            model = SubquadForCausalLM(SubquadConfig.from_decoder(decoder.config, eos_token_id=end_token))
        model.model = decoder
    else:
        most = next((n for key in LIMITS if (n := getattr(model.config, key, None)) is not None), None)
    if length is not None and most is not None and length > most:
        raise ValueError(f"length must be at most {most}, the positions that the model has, got {length}")
    found: Any = model
    return found


@contextmanager
def quiet() -> Iterator[None]:
    """Keep back what `HFLM` warns of: a model in memory (meant), and each text that is cut (`cut` counts them)."""
    harness = logging.getLogger("lm_eval.models.huggingface")
    before = harness.level
    harness.setLevel(logging.ERROR)
    try:
        yield
    finally:
        harness.setLevel(before)


def _prefix(tokenizer: Tokenizer | PreTrainedTokenizerBase) -> int:
    """Return the token that a text begins after."""
    if not isinstance(tokenizer, Tokenizer):
        special = (tokenizer.bos_token_id, tokenizer.eos_token_id)
        token = next((token for token in special if token is not None), None)
    elif (token := separator_id(tokenizer)) is None:
        line_break = tokenizer.encode("\n", add_special_tokens=False).ids
        token = line_break[0] if len(line_break) == 1 else None
    if token is None:
        raise ValueError(
            "the tokenizer has no token that a text could begin after (a separator of documents, a line break, BOS or "
            "EOS): name one by prefix_token"
        )
    return int(token)
