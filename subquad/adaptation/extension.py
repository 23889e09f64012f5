"""Extend the context of a transformers model: scaled positions, sparse attention, an adapter (LongLoRA)."""

from __future__ import annotations

import copy
import dataclasses
import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from subquad.adaptation import extended
from subquad.adaptation.config import ATTENTION, SPANS, ExtendConfig
from subquad.config import suggest
from subquad.data import prepare
from subquad.data.files import MODEL_FILES
from subquad.data.tokenizers import check_vocabulary, has_tokenizer, tokenizer_hash
from subquad.data.windows import WindowParts, windows_of
from subquad.hf import lora, set_attention
from subquad.models.config import DecoderConfig
from subquad.training.config import BatchConfig, TrainConfig
from subquad.training.errors import StepMemoryError
from subquad.training.run import RunResult, check_folder, train
from subquad.training.task import Adapter, Batch, Task, preparing, rows, spread

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ExtensionTask(Task):
    """Predict the next token of a text with an adapted transformers model."""

    def evaluate(self, model: Any, batch: Batch) -> dict[str, torch.Tensor]:
        return {"loss": rows(model(**batch, use_cache=False).loss, batch)}

    def explain_memory(self, error: BaseException, device: torch.device) -> StepMemoryError:
        """Return an error that names the settings of `ExtendConfig` that lower the need for memory."""
        batch, reason = self.config.batch, str(error).strip() or type(error).__name__
        return StepMemoryError(
            f"out of memory in a step of batch.size={batch.size} windows of {batch.length} tokens "
            f"({reason}): try a smaller batch.size with proportionally more batch.accumulation, "
            "run.activation_checkpointing=true, or a shorter length"
        )


def _make_model(config: ExtendConfig, folder: Path, scaled: PreTrainedConfig, base: lora.Base) -> Any:
    """Make the extended model: the original's weights, and factors drawn from the current random state."""
    model = extended.load_original(folder, scaled)
    model.extended_config = extended_config(scaled, config)  # type: ignore[assignment]
    attend(model, config)
    model.config.use_cache = False
    if config.run.activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    adapted = extended.adapt(model, base=base, **config.lora.to_dict())
    trains, every = lora.counts(adapted)
    logger.info("%d of %d parameters train (%.2f %%)", trains, every, 100 * trains / every)
    return adapted


def _save(model: Any, folder: Path) -> None:
    """Write the adapter and the extended model's configuration."""
    lora.save_adapter(model, folder)
    model.get_base_model().extended_config.save_pretrained(folder)


def scaled_config(config: ExtendConfig) -> tuple[Path, PreTrainedConfig, PreTrainedConfig]:
    """Return the original's folder, its configuration, and a copy with scaled positions.

    Raises `ValueError` and `FileNotFoundError` for a model that can't be extended, and for a wrong length, attention or
    option.
    """
    if not config.model:
        raise ValueError("no model: give the folder of a transformers model, or its name on the hub")
    if config.attention not in ATTENTION:
        raise ValueError(f"unknown attention {config.attention!r}; {suggest(config.attention, ATTENTION)}")
    lora.require_peft()
    folder = extended.find_model(config.model)
    if Path(config.run.folder).resolve() == folder.resolve():
        raise ValueError(f"run.folder={config.run.folder!r} is the model's own folder; choose another one")
    check_folder(Path(config.run.folder))
    original = extended.read_config(folder)
    scaled = extended.scale_positions(original, config.length, config.rope)
    if not has_tokenizer(folder):
        raise FileNotFoundError(f"{config.model} holds no tokenizer.json; an extension needs a model and its tokenizer")
    own = extended.own_length(original)
    if config.attention != "full":
        with torch.device("meta"):
            attend(_empty(original), config)
    elif config.options:
        raise ValueError(f"attention=full has no options, got {sorted(config.options)}")
    if config.control and config.length % own:
        raise ValueError(f"control=true needs a multiple of the model's {own} tokens, got length={config.length}")
    return folder, original, scaled


def _empty(config: PreTrainedConfig) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(copy.deepcopy(config))  # `attend` writes into it


def attend(model: PreTrainedModel, config: ExtendConfig) -> None:
    """Give `model` the attention of `config`."""
    if config.attention == "full":
        return
    name = SPANS[config.attention]
    options = {name: max(2, config.length // 8 * 2), **config.options}
    set_attention(model, config.attention, **options)
    if options[name] >= config.length:
        option = f"options.{name}={options[name]}"
        raise ValueError(f"{option} must be below length={config.length}: otherwise it is full attention")


def extend(config: ExtendConfig, console: Console | None = None) -> RunResult:
    """Train the adapter of `config` in `config.run.folder`, as `train` does; an interrupted run resumes bit for bit.

    Raises as `train` and `scaled_config`.
    """
    folder, _, scaled = scaled_config(config)
    return _train(config, folder, scaled, console)


def train_control(config: ExtendConfig, console: Console | None = None) -> RunResult:
    """Train the control of `config` in the folder `control` of its run: the same windows in the same steps, cut into
    parts of the model's own length, with its own positions and full attention."""
    folder, original, _ = scaled_config(config)
    own = extended.own_length(original)
    parts = config.length // own
    alone = config.replace(
        length=own,
        attention="full",
        options={},
        control=False,
        keep_attention=False,
        run=config.run.replace(folder=str(Path(config.run.folder) / "control")),
        batch=config.batch.replace(size=config.batch.size * parts),
    )
    return _train(alone, folder, original, console, parts)


def _train(
    config: ExtendConfig, folder: Path, scaled: PreTrainedConfig, console: Console | None, parts: int = 1
) -> RunResult:
    """Run the training loop. Only the name of the attention is used of `TrainConfig.model`: `_task` makes the model."""
    values = TrainConfig(
        model=DecoderConfig(attention=config.attention),
        data=config.data.replace(tokenizer=str(folder)),
        batch=BatchConfig(length=config.length, **config.batch.to_dict()),
        optimizer=config.optimizer,
        schedule=config.schedule,
        run=config.run,
    )

    return train(values, console=console, prepare=partial(_task, config, folder, scaled, parts))


def _task(
    config: ExtendConfig,
    folder: Path,
    scaled: PreTrainedConfig,
    parts: int,
    values: TrainConfig,
    console: Console | None,
) -> Task:
    """Return the task: the text, each window cut into `parts`, and the model made from the original's weights.

    Raises `ValueError` for too little text, and for a tokenizer with more tokens than the model knows.
    """
    corpus = preparing(console, "text", lambda progress: prepare(values.data, progress=progress))
    check_vocabulary(corpus.tokenizer, scaled.vocab_size)
    length = values.batch.length
    for name, part in (("training", corpus.train), ("held-out", corpus.held_out)):
        if len(part) < length:
            raise ValueError(f"length={length} exceeds the {len(part)} tokens of the {name} text; give more text")
    held_out = windows_of(corpus.held_out, length, stride=length - 1)
    train_windows: Any = windows_of(corpus.train, parts * length, stride=parts * length - 1)
    if parts > 1:
        train_windows = WindowParts(train_windows, length, parts)
    record = dataclasses.replace(lora.Base.of(folder), path=config.model)

    trained = {name: getattr(config, name) for name in ("length", "rope", "attention", "options")}
    kept = {name: (folder / name).read_bytes() for name in MODEL_FILES if (folder / name).is_file()}
    return ExtensionTask(
        config=values,
        adapter=Adapter(partial(_make_model, config, folder, scaled, record), _save, lora.read_weights),
        data=corpus,
        train=train_windows,
        held_out=spread(held_out, values.run.eval_windows),
        identity={
            **corpus.identity,
            "tokenizer": tokenizer_hash(corpus.tokenizer),
            "extension": {**trained, "parts": parts, "lora": config.lora.to_dict(), "base": record.weights},
        },
        files=kept,
        together=parts,
        settings=config,
    )


def extended_config(scaled: PreTrainedConfig, config: ExtendConfig) -> PreTrainedConfig:
    """Return the extended model's configuration: full attention, or with `keep_attention` the one it trained with."""
    if not config.keep_attention:
        return scaled
    with torch.device("meta"):
        model = _empty(scaled)
        attend(model, config)
    return model.config
