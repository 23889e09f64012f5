"""The decoder's configuration as a transformers configuration, found by its `model_type`."""

from __future__ import annotations

import dataclasses
import difflib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from transformers import PreTrainedConfig

from subquad.attention import mechanism, names
from subquad.config import known_elsewhere
from subquad.models.config import DecoderConfig

FORMAT_VERSION = 1
FIELDS = tuple(field.name for field in dataclasses.fields(DecoderConfig))
STUB = "modeling_subquad.py"
"""File in a saved folder that names the model's classes, for commands that import transformers alone."""
LORA_TARGETS = ("query", "value")
"""Linear layers that get LoRA factors if PEFT is not told which."""


def fields_of(config: type[DecoderConfig], *left_out: str) -> Any:
    """Return a base class with the fields of `config`; `config` checks their values."""
    made: list[Any] = [
        (each.name, Any, dataclasses.field(default=each.default, default_factory=each.default_factory))
        for each in dataclasses.fields(config)
        if each.name not in left_out
    ]
    return dataclasses.make_dataclass(f"{config.__name__}Fields", made, kw_only=True)


if TYPE_CHECKING:
    DecoderFields = DecoderConfig
else:
    DecoderFields = fields_of(DecoderConfig)


class SubquadConfig(DecoderFields, PreTrainedConfig):  # type: ignore[misc]
    """The fields of `DecoderConfig`, with those that transformers adds to every model.

    Another `subquad_version`, the version of the format, is refused. Values are checked as in `DecoderConfig`, and the
    error for a mistyped field suggests the right one. Transformers' usual names (`hidden_size`, ...) are aliases.
    """

    model_type = "subquad"
    auto_classes: ClassVar[dict[str, str]] = {
        "AutoModel": "SubquadModel",
        "AutoModelForCausalLM": "SubquadForCausalLM",
        "AutoModelForSequenceClassification": "SubquadForSequenceClassification",
        "AutoModelForTokenClassification": "SubquadForTokenClassification",
    }
    """Classes of models with this configuration in `subquad.hf`, by transformers' classes that choose among them."""
    own_fields: ClassVar[tuple[str, ...]] = FIELDS
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "dim",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "num_key_value_heads": "num_kv_heads",
        "tie_word_embeddings": "tie_embeddings",
        "initializer_range": "init_std",
        "max_position_embeddings": "max_positions",
    }

    subquad_version: int = FORMAT_VERSION
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.subquad_version != FORMAT_VERSION:
            raise ValueError(
                f"the configuration has subquad_version {self.subquad_version!r}; this release reads version "
                f"{FORMAT_VERSION}: install the release that wrote it"
            )
        for key in kwargs:
            near = difflib.get_close_matches(key, self.own_fields, n=1, cutoff=0.75)
            hint = known_elsewhere(key, self.own_fields) or (near and f"did you mean {near[0]!r}?")
            if hint and key not in self.attribute_map and not hasattr(type(self), key):
                raise ValueError(f"{type(self).__name__} has no field {key!r}; {hint.rstrip('; ')}")
            owners = [name for name in names() if key in mechanism(name).option_names()]
            if owners and key not in self.own_fields and key not in self.attribute_map:
                chosen = [self.attention] if isinstance(self.attention, str) else self.attention
                used = [name for name in owners if name in chosen]
                raise ValueError(
                    f"{key}={kwargs[key]!r} is an option of attention {', '.join(map(repr, used or owners))}: write "
                    f"options={{{(used or owners)[0]!r}: {{{key!r}: {kwargs[key]!r}}}}}"
                )
        super().__post_init__(**kwargs)
        self.decoder_config()

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Save as transformers does, with a stub that says where the model's classes are (`auto_map`)."""
        classes = {"AutoConfig": type(self).__name__, **self.auto_classes}
        self.auto_map = {auto: f"{Path(STUB).stem}.{name}" for auto, name in classes.items()}
        named = ", ".join(sorted(classes.values()))
        text = f'''"""Classes of this model: it needs the package subquad (pip install subquad)."""\n
from subquad.hf import {named}\n
__all__ = {sorted(classes.values())}
'''
        if not Path(save_directory).is_file():  # for a file transformers raises its own error
            Path(save_directory).mkdir(parents=True, exist_ok=True)
            (Path(save_directory) / STUB).write_text(text, encoding="utf-8")
        super().save_pretrained(save_directory, *args, **kwargs)  # at the end: it may upload the folder

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as transformers does."""
        # PEFT reads a configuration as a dict before it looks up its default targets, so it is imported by now.
        if "peft" in sys.modules:
            tables = vars(sys.modules["peft.utils.constants"]) if "peft.utils.constants" in sys.modules else {}
            for name, table in tables.items():
                if name.endswith("_TARGET_MODULES_MAPPING") and table.get("llama") == ["q_proj", "v_proj"]:
                    table.setdefault(self.model_type, list(LORA_TARGETS))
        found: dict[str, Any] = super().to_dict()
        return found

    def decoder_config(self) -> DecoderConfig:
        """Return the `DecoderConfig`; raises `ValueError` or `TypeError` as it does."""
        return DecoderConfig.from_dict({name: getattr(self, name) for name in FIELDS})

    @classmethod
    def from_decoder(cls, config: DecoderConfig, **kwargs: Any) -> Self:
        """Return the configuration of the same model; `kwargs` are transformers' own fields, such as `eos_token_id`."""
        return cls(**config.to_dict(), **kwargs)
