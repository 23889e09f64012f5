"""The decoder's configuration as a transformers configuration, found by its `model_type`."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any, ClassVar, Self

from transformers import PreTrainedConfig

from subquad.models.config import DecoderConfig

FORMAT_VERSION = 1
FIELDS = tuple(field.name for field in dataclasses.fields(DecoderConfig))


def _default(name: str) -> Any:
    """Return the default of a field of `DecoderConfig`."""
    field = DecoderConfig.__dataclass_fields__[name]
    if field.default is dataclasses.MISSING:
        return dataclasses.field(default_factory=field.default_factory)
    return field.default


class SubquadConfig(PreTrainedConfig):
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
    vocab_size: int = _default("vocab_size")
    dim: int = _default("dim")
    num_layers: int = _default("num_layers")
    num_heads: int = _default("num_heads")
    num_kv_heads: int | None = _default("num_kv_heads")
    attention: str | list[str] = _default("attention")
    options: dict[str, Any] = _default("options")
    position: str = _default("position")
    max_positions: int = _default("max_positions")
    rope_base: float = _default("rope_base")
    norm: str = _default("norm")
    feedforward: str = _default("feedforward")
    ff_mult: float = _default("ff_mult")
    loops: int = _default("loops")
    loop_loss: str = _default("loop_loss")
    bias: bool = _default("bias")
    dropout: float = _default("dropout")
    attention_dropout: float = _default("attention_dropout")
    tie_embeddings: bool = _default("tie_embeddings")
    lookup: int | None = _default("lookup")
    lookup_residual: bool = _default("lookup_residual")
    init_std: float = _default("init_std")
    head_dim: int | None = _default("head_dim")
    ff_dim: int | None = _default("ff_dim")
    norm_eps: float | None = _default("norm_eps")
    qk_norm: bool = _default("qk_norm")
    qkv_bias: bool | None = _default("qkv_bias")
    out_bias: bool | None = _default("out_bias")
    ff_bias: bool | None = _default("ff_bias")
    parallel_residual: bool = _default("parallel_residual")
    norm_position: str = _default("norm_position")
    rope_fraction: float = _default("rope_fraction")
    rope_scaling: dict[str, Any] | None = _default("rope_scaling")
    embedding_scale: float = _default("embedding_scale")
    position_scale: float | None = _default("position_scale")
    residual_scale: float = _default("residual_scale")
    logit_divisor: float = _default("logit_divisor")
    head_bias: bool = _default("head_bias")
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
