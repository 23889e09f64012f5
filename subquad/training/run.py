"""One training run from its configuration to the folder that keeps it."""

from __future__ import annotations

import json
import logging
import os
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Subset

from subquad.config import digest
from subquad.data import Corpus, Windows, prepare
from subquad.data.tokenizers import separator_id
from subquad.models.config import DecoderConfig
from subquad.training import checkpoint
from subquad.training.config import TrainConfig
from subquad.training.curves import draw_curves
from subquad.training.errors import CheckpointError

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import TrainingArguments

    from subquad.hf import SubquadForCausalLM
    from subquad.training.trainer import SubquadTrainer

logger = logging.getLogger(__name__)

CONFIG, CHECKPOINTS, CURVES = "config.yaml", "checkpoints", "curves.png"


@dataclass(frozen=True)
class RunResult:
    """What a training run ended with."""

    folder: Path
    config: TrainConfig
    """The configuration with the tokenizer's vocabulary size filled in, as `config.yaml` has it."""
    model: SubquadForCausalLM
    """The model after the last step."""
    corpus: Corpus
    steps: int
    """Optimizer steps in all, those before a resume included."""
    tokens: int
    """Tokens in those steps."""
    parameters: int
    """Parameters of the model, shared ones counted once."""
    seconds: float
    """Seconds of training steps in this process, evaluations and saves left out."""
    tokens_per_second: float
    """Trained tokens a second in this process."""
    best_step: int | None
    """Step of the lowest held-out loss."""
    best_loss: float | None
    """That loss, nats a token, on the windows of the periodic evaluation."""
    interrupted: bool
    """Whether a signal ended the run before its last step: a checkpoint is there, the final model isn't."""
    out_of_time: bool
    """Whether `run.max_minutes` ended the run before its last step."""

    @property
    def command(self) -> str:
        """The command that goes on with this run."""
        return f"subquad train --config {shlex.quote(str(self.folder / CONFIG))}"


def train(config: TrainConfig, *, resume: bool = True, console: Console | None = None) -> RunResult:
    """Train the decoder of `config` and keep the run in `config.run.folder`.

    The folder gets `config.yaml`, `metrics.jsonl`, `tensorboard/`, `checkpoints/`, and at the end the model
    (`config.json`, `model.safetensors`, `tokenizer.json`: `from_pretrained` reads the folder) and `curves.png`. A
    folder with a complete checkpoint is gone on with, bit for bit; `resume=False` is `run.resume=never`. `console`
    shows progress; without one it goes to the log.

    Raises `ValueError` for a text shorter than `batch.length`, `CheckpointError` (a `ValueError`) for checkpoints that
    can't be gone on with, and `NonFiniteError` for a loss or gradient that isn't finite.
    """
    from subquad.training.trainer import training_arguments

    folder = Path(config.run.folder)
    root = folder / CHECKPOINTS
    arguments = training_arguments(config, root)
    with arguments.main_process_first(local=False, desc="preparing the data"):
        corpus = _prepare(config, console)
    config = config.replace(model=_fitted(config.model, corpus))
    _check_lengths(config, corpus)
    settings = _settings(config, corpus, arguments)
    main = arguments.process_index == 0
    with arguments.main_process_first(local=False, desc="looking for a checkpoint"):
        if main:
            checkpoint.sweep(root)
        start = _checkpoint_to_resume(root, config, "never" if not resume else config.run.resume, settings)
        if main:
            root.mkdir(parents=True, exist_ok=True)
            _keep_settings(folder, config, corpus)
    with _threads(config.run.threads):
        return _run(config, corpus, arguments, settings, start, console)


def _run(
    config: TrainConfig,
    corpus: Corpus,
    arguments: TrainingArguments,
    settings: dict[str, Any],
    start: Path | None,
    console: Console | None,
) -> RunResult:
    from transformers import set_seed

    from subquad.hf import SubquadConfig, SubquadForCausalLM
    from subquad.training.flow import Flow, StopSignal
    from subquad.training.progress import Bar, Meter, Metrics
    from subquad.training.trainer import NumberedWindows, SubquadTrainer

    folder = Path(config.run.folder)
    windows = Windows(corpus.train, config.batch.length)
    step_windows = config.batch.size * config.batch.accumulation * arguments.world_size
    set_seed(config.run.seed)
    end = separator_id(corpus.tokenizer)
    model = SubquadForCausalLM(SubquadConfig.from_decoder(config.model, eos_token_id=end))
    meter = Meter(config.step_tokens * arguments.world_size)
    metrics = Metrics(folder, meter, len(windows), step_windows)
    bar = Bar(console, meter, config)
    with StopSignal() as stop:
        flow = Flow(config.run, stop)
        trainer = SubquadTrainer(
            model,
            config,
            settings,
            args=arguments,
            train_dataset=NumberedWindows(windows),
            eval_dataset=_held_out(config, corpus),
            callbacks=[meter, flow, metrics, bar],
        )
        try:
            trainer.train(resume_from_checkpoint=None if start is None else str(start))
        finally:
            bar.close()
            metrics.close()
    if trainer.is_world_process_zero():
        _finish(folder, trainer, final=not flow.interrupted)
    return RunResult(
        folder=folder,
        config=config,
        model=trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False),  # without training's autocast
        corpus=corpus,
        steps=trainer.state.global_step,
        tokens=trainer.state.global_step * meter.step_tokens,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        seconds=meter.seconds,
        tokens_per_second=meter.tokens_per_second,
        best_step=trainer.state.best_global_step,
        best_loss=trainer.state.best_metric,
        interrupted=flow.interrupted,
        out_of_time=flow.out_of_time,
    )


def _finish(folder: Path, trainer: SubquadTrainer, *, final: bool) -> None:
    """Draw the curves and, at the end of a run, put the model at the top of its folder."""
    from subquad.training.progress import read_metrics

    records = read_metrics(folder)
    if records:
        draw_curves(records, folder / CURVES, title=f"{folder.name}: {trainer.config.model.attention}")
    if not final:
        return
    aside = folder / ".saving-model"
    shutil.rmtree(aside, ignore_errors=True)
    trainer._save(str(aside))
    checkpoint.share(aside)
    # config.json comes last: a folder that has it has the weights.
    for path in sorted(aside.iterdir(), key=lambda path: path.name == "config.json"):
        os.replace(path, folder / path.name)
    aside.rmdir()


def _keep_settings(folder: Path, config: TrainConfig, corpus: Corpus) -> None:
    """Write what repeats the run, so that a crash leaves each file whole."""
    draft = folder / ".draft.yaml"
    config.to_file(draft)
    os.replace(draft, folder / CONFIG)
    checkpoint.write_atomically(folder / "tokenizer.json", corpus.tokenizer.to_str(pretty=True).encode())
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    checkpoint.write_atomically(folder / "tokenizer_config.json", json.dumps(tokenizer).encode())


def _prepare(config: TrainConfig, console: Console | None) -> Corpus:
    """The corpus; the console hears what is being done, as it may take a while the first time."""
    if console is None:
        return prepare(config.data)
    with console.status("preparing the text") as status:
        said = ""

        def show(what: str, done: int, total: int) -> None:
            nonlocal said
            status.update(f"{what}: {done:,} of {total:,}")
            if what != said and not console.is_terminal:
                console.print(what, highlight=False)
            said = what

        return prepare(config.data, progress=show)


def _fitted(model: DecoderConfig, corpus: Corpus) -> DecoderConfig:
    """The model with the tokenizer's vocabulary."""
    size = corpus.train.vocab_size
    if size != model.vocab_size:
        logger.info("model.vocab_size is %d, as the tokenizer has it (it was %d)", size, model.vocab_size)
    return model.replace(vocab_size=size)


def _check_lengths(config: TrainConfig, corpus: Corpus) -> None:
    for name, shard in (("training", corpus.train), ("held-out", corpus.held_out)):
        if len(shard) < config.batch.length:
            raise ValueError(
                f"batch.length {config.batch.length} is longer than the {name} part of the text, which has "
                f"{len(shard)} tokens; give more text or shorter windows"
            )


def _held_out(config: TrainConfig, corpus: Corpus) -> Subset[dict[str, torch.Tensor]]:
    """The windows of the periodic evaluation: always the same, evenly spread."""
    windows = Windows(corpus.held_out, config.batch.length)
    count = min(config.run.eval_windows, len(windows))
    return Subset(windows, [i * len(windows) // count for i in range(count)])


def _settings(config: TrainConfig, corpus: Corpus, arguments: TrainingArguments) -> dict[str, Any]:
    """What must stay the same for a run to go on; the precision is the one that `auto` chose."""
    return {
        "model": config.model.to_dict(),
        "batch": config.batch.to_dict(),
        "optimizer": config.optimizer.to_dict(),
        "run.seed": config.run.seed,
        "run.precision": "bf16" if arguments.bf16 else "float32",
        "processes": arguments.world_size,
        "data": digest([corpus.fingerprint, corpus.train_files, len(corpus.train)]),
        "tokenizer": digest(corpus.tokenizer.to_str()),
    }


def _checkpoint_to_resume(root: Path, config: TrainConfig, policy: str, settings: dict[str, Any]) -> Path | None:
    if policy == "never":
        if checkpoint.listing(root):
            raise CheckpointError(
                f"{root} holds checkpoints of an earlier run and run.resume is 'never'; choose another run.folder, "
                "delete that one, or set run.resume=auto"
            )
        return None
    found = checkpoint.newest_complete(root)
    if found is None:
        if policy == "must":
            raise CheckpointError(f"run.resume is 'must' but {root} holds no checkpoint; set run.resume=auto to start")
        return None
    manifest = checkpoint.read_manifest(found)
    checkpoint.check_settings(manifest, settings)
    if manifest["step"] > config.run.steps:
        raise CheckpointError(
            f"{found} is at step {manifest['step']}, past run.steps={config.run.steps}; raise run.steps or choose "
            "another run.folder"
        )
    logger.info("going on from %s", found)
    return found


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
