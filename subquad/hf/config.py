"""The decoder's configuration as a transformers configuration, found by its `model_type`."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any, ClassVar, Self

from transformers import PreTrainedConfig

from subquad.models.config import DecoderConfig

FORMAT_VERSION = 1
FIELDS = tuple(field.name for field in dataclasses.fields(DecoderConfig))


def fields_of(config: type[DecoderConfig], *left_out: str) -> Any:
    """Return a base class with the fields of `config`, which checks their values itself."""
    made: list[Any] = [
        (each.name, Any, dataclasses.field(default=each.default, default_factory=each.default_factory))
        for each in dataclasses.fields(config)
        if each.name not in left_out
    ]
    return dataclasses.make_dataclass(f"{config.__name__}Fields", made, kw_only=True)


class SubquadConfig(fields_of(DecoderConfig), PreTrainedConfig):  # type: ignore[misc]
    """The fields of `DecoderConfig`, with those that transformers adds to every model.

    Another `subquad_version`, the version of the format, is refused. Values are checked as in `DecoderConfig`, and the
    error for a mistyped field suggests the right one. Transformers' usual names (`hidden_size`, ...) are aliases.
    """

    model_type = "subquad"
    own_fields: ClassVar[tuple[str, ...]] = FIELDS
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "dim",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "num_key_value_heads": "num_kv_heads",
        "tie_word_embeddings": "tie_embeddings",
        "initializer_range": "init_std",
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
            if near and key not in self.attribute_map and not hasattr(type(self), key):
                raise ValueError(f"{type(self).__name__} has no field {key!r}; did you mean {near[0]!r}?")
        super().__post_init__(**kwargs)
        self.decoder_config()

    def decoder_config(self) -> DecoderConfig:
        """Return the `DecoderConfig`; raises `ValueError` or `TypeError` as it does."""
        return DecoderConfig.from_dict({name: getattr(self, name) for name in FIELDS})

    @classmethod
    def from_decoder(cls, config: DecoderConfig, **kwargs: Any) -> Self:
        """Return the configuration of the same model; `kwargs` are transformers' own fields, such as `eos_token_id`."""
        return cls(**config.to_dict(), **kwargs)
