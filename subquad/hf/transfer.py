"""Import and export: transformers models as ours, and back, tensor by tensor."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import PreTrainedModel

from subquad.attention import mechanism
from subquad.config import suggest
from subquad.hf.config import SubquadConfig
from subquad.hf.families import FAMILIES, Family, base, rope
from subquad.hf.families.base import Move, mixer, same, token_ids
from subquad.hf.interface import wanted_attention
from subquad.hf.loading import CONFIG, check_sizes, fetch, naming, quiet, read_config
from subquad.hf.model import SubquadForCausalLM
from subquad.layers.feedforward import build_feedforward
from subquad.models.blocks import mechanism_options
from subquad.models.config import DecoderConfig
from subquad.parsing import read_json_mapping

TRAINING_ALONE = ("dropout", "attention_dropout", "init_std")
"""Settings that do not affect a trained model's outputs; kept if the family has them."""


def from_transformers(model: PreTrainedModel | str | os.PathLike[str]) -> SubquadForCausalLM:
    """Return our causal language model with the settings, tensors and therefore logits of a transformers model.

    `model` is a causal language model of a family in `FAMILIES`, its folder, or its name on the hub (safetensors only).
    Its layers are the family's mechanisms, or the one that `config.subquad` names. Tensors are copied in their dtype,
    special tokens are kept, and the model is in evaluation mode. Raises `ValueError` for another family, for a
    setting that our decoder does not support (naming it), and for tensors that are missing, left over or misshapen.
    """
    if isinstance(model, str | os.PathLike):
        with naming(os.fspath(model)):
            return _taken(_load(model))
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a model of transformers, its folder or its name, got {type(model).__name__}")
    return _taken(model)


def _taken(model: PreTrainedModel) -> SubquadForCausalLM:
    family = _family(model.config.model_type)
    base.require(model.config, is_causal=True)
    if type(model).__name__ != family.model:
        raise ValueError(f"a model of family {family.name!r} must be a {family.model}, got {type(model).__name__}")
    config = DecoderConfig.from_dict({"attention": "full", **_simplest(family.settings(model.config))})
    tensors = dict(model.state_dict())
    if config.tie_embeddings:
        _check_tied(tensors, family, config)
    entry = getattr(model.config, "subquad", None)
    attending = config
    if entry is not None:
        attention, options = wanted_attention(entry)
        if {*config.mechanisms} != {"full"}:
            raise ValueError(
                f"config.subquad puts attention {attention!r} in the place of full attention, but the {family.name} "
                f"model has layers of {', '.join(map(repr, config.mechanisms))}; remove config.subquad"
            )
        attending = config.replace(attention=attention, options={attention: options} if options else {})
    with torch.device("meta"):
        made = SubquadForCausalLM(SubquadConfig.from_decoder(attending, **token_ids(model.config)))
    ours: dict[str, Tensor] = {}
    for move in [*family.moves(canonical(config)), *_head(family, config)]:
        if move.theirs not in tensors:
            raise ValueError(f"the {family.name} model has no tensor {move.theirs!r}")
        for name, part in zip(move.ours, move.cut(tensors.pop(move.theirs).detach()), strict=True):
            ours[_ours(name)] = part.clone(memory_format=torch.contiguous_format)
    copies = {copy: source for name in attending.mechanisms for copy, source in mechanism(name).weight_map.items()}
    for copy, source in copies.items():
        found = {name: tensor for name, tensor in ours.items() if f".attention.{source}." in name}
        ours |= {name.replace(f".{source}.", f".{copy}."): tensor.clone() for name, tensor in found.items()}
    if tensors:
        raise ValueError(f"the {family.name} model has tensors that our decoder lacks: {', '.join(tensors)}")
    if config.tie_embeddings:
        ours[_ours("head.weight")] = ours[_ours("embedding.tokens.weight")]
    _load_all(made, ours)
    made.tie_weights()
    _keep_ends(model, made)
    return made.eval()


def to_transformers(model: SubquadForCausalLM, family: str | None = None) -> PreTrainedModel:
    """Return a transformers model with the settings, tensors and therefore logits of ours.

    `family` is a name in `FAMILIES`; None: the first that fits. Dropout and the initial spread of weights are dropped
    if the family has none. Raises `ValueError` for an unknown family and for a setting that the family does not
    support, such as a mechanism that its layers cannot be, naming it.
    """
    if not isinstance(model, SubquadForCausalLM):
        raise TypeError(f"model must be a SubquadForCausalLM, got {type(model).__name__}")
    if family is not None and family not in FAMILIES:
        raise ValueError(f"unknown family {family!r}; {suggest(family, FAMILIES)}")
    known = {name for each in FAMILIES.values() for name in each.mechanisms}
    for name in model.model.decoder.config.mechanisms:
        if name not in known:
            raise ValueError(
                f"transformers' models do not support attention {name!r}, only {', '.join(map(repr, sorted(known)))}"
            )
    config = canonical(model.model.decoder.config)
    chosen, values = _fitting(config, [FAMILIES[family]] if family is not None else list(FAMILIES.values()))
    theirs_class: Any = getattr(transformers, chosen.model)
    made: PreTrainedModel = theirs_class(theirs_class.config_class(**values, **token_ids(model.config)))
    ours = dict(model.state_dict())
    if config.tie_embeddings:
        del ours[_ours("head.weight")]
    tensors: dict[str, Tensor] = {}
    for move in [*chosen.moves(config), *_head(chosen, config)]:
        parts = [ours.pop(_ours(name)).detach() for name in move.ours]
        tensors[move.theirs] = move.join(parts).clone(memory_format=torch.contiguous_format)
    if ours:
        raise ValueError(f"the model has tensors that {chosen.name} lacks: {', '.join(ours)}")
    if config.tie_embeddings:
        tensors[chosen.head] = tensors[_table(chosen, config)]
    _load_all(made, tensors)
    made.tie_weights()
    _keep_ends(model, made)
    return made.eval()


def _keep_ends(source: PreTrainedModel, target: PreTrainedModel) -> None:
    """Keep the end tokens of generation where they are others than the configuration's: often there are more."""
    found = source.generation_config
    if found is not None and found.eos_token_id not in (None, source.config.eos_token_id):
        target.generation_config.eos_token_id = found.eos_token_id


def canonical(config: DecoderConfig) -> DecoderConfig:
    """Return the same decoder with derived settings made explicit and settings without effect at their defaults."""
    names = config.mechanisms
    having = ("qkv_bias", "out_bias", *(["ff_bias"] if config.feedforward != "none" else []))
    biases = {name: getattr(config, name) for name in having}
    width = config.ff_dim
    if width is None and config.feedforward not in ("bilinear", "none"):
        with torch.device("meta"):
            width = build_feedforward(config.feedforward, config.dim, mult=config.ff_mult).down.in_features
    return config.replace(
        attention=names[0] if len({*names}) == 1 else config.layer_mechanisms,
        options={name: own for name in sorted({*names}) if (own := _own_options(config, name))},
        num_kv_heads=config.num_kv_heads or config.num_heads,
        head_dim=config.head_dim or config.dim // config.num_heads,
        ff_dim=width,
        ff_mult=DecoderConfig.ff_mult if width is not None else config.ff_mult,
        norm_eps=config.norm_eps or (1e-5 if config.norm.endswith("layer") else 1e-6),
        bias=config.bias and any("qkv_bias" not in mechanism(name).option_names() for name in names),
        **{name: config.bias if value is None else value for name, value in biases.items()},
        loop_loss=config.loop_loss if config.loops > 1 else "last",
        lookup_residual=config.lookup_residual or config.lookup is None,
        rope_base=config.rope_base if config.position == "rope" else DecoderConfig.rope_base,
    )


def _own_options(config: DecoderConfig, name: str) -> dict[str, Any]:
    """Return the options of a mechanism that differ from those that the decoder's settings give it."""
    own, given = mixer(config, name), mechanism_options(config.replace(options={}), name)
    values = {field.name: (getattr(own, field.name), given.get(field.name, field.default)) for field in fields(own)}
    return {key: value for key, (value, usual) in values.items() if value != usual and key != "dim"}


def _simplest(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings without those that hold by default, so that mechanisms that lack them can be chosen."""
    said = dict(settings)
    if said.get("head_dim") == said["dim"] / said["num_heads"]:
        del said["head_dim"]
    if said.get("num_kv_heads") == said["num_heads"]:
        del said["num_kv_heads"]
    if "qkv_bias" in said and said["qkv_bias"] == said["out_bias"]:
        said["bias"] = said.pop("qkv_bias")
        del said["out_bias"]
        if said["ff_bias"] == said["bias"]:
            del said["ff_bias"]
    return said


def _family(model_type: Any) -> Family:
    for family in FAMILIES.values():
        if model_type in (family.name, family.holder):
            return family
    raise ValueError(
        f"our decoder does not support models of family {model_type!r}; {suggest(str(model_type), FAMILIES)}"
    )


def _fitting(config: DecoderConfig, families: list[Family]) -> tuple[Family, dict[str, Any]]:
    """Return the first family that supports every setting of `config`, and the values of its configuration."""
    if config.feedforward == "bilinear":
        raise ValueError("transformers' models do not support feedforward='bilinear'")
    without_effect = set(TRAINING_ALONE) if config.position == "learned" else {*TRAINING_ALONE, "max_positions"}
    wanted = {name: value for name, value in config.to_dict().items() if name not in without_effect}
    reasons: dict[str, str] = {}
    for family in families:
        if others := sorted({*config.mechanisms} - {*family.mechanisms}):
            reasons[family.name] = f"it has no attention {', '.join(map(repr, others))}"
            continue
        try:
            values = family.config(config)
            theirs: Any = getattr(transformers, family.model)
            back = canonical(
                DecoderConfig.from_dict({"attention": "full", **family.settings(theirs.config_class(**values))})
            )
        except (ValueError, StrictDataclassError) as error:
            reasons[family.name] = str(error)
            continue
        found = back.to_dict()
        differ = [name for name, value in wanted.items() if found[name] != value]
        if not differ:
            return family, values
        reasons[family.name] = ", ".join(
            f"{name}={getattr(config, name)!r} (it has {getattr(back, name)!r})" for name in differ
        )
    told = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    raise ValueError(f"no family of transformers supports the model's settings. {told}")


def _check_tied(tensors: dict[str, Tensor], family: Family, config: DecoderConfig) -> None:
    """Remove the head from `tensors`, after checking that it equals the table of tokens."""
    head = tensors.pop(family.head, None)
    table = tensors.get(_table(family, config))
    if head is not None and table is not None and not torch.equal(head, table):
        raise ValueError(
            f"the {family.name} model's head should be tied, but {family.head!r} differs from its table of tokens"
        )


def _table(family: Family, config: DecoderConfig) -> str:
    moves = family.moves(canonical(config))
    return next(move.theirs for move in moves if move.ours == ("embedding.tokens.weight",))


def _ours(name: str) -> str:
    """Return the name in a `SubquadForCausalLM` of a decoder's tensor."""
    return f"lm_{name}" if name.startswith("head.") else f"model.decoder.{name}"


def _head(family: Family, config: DecoderConfig) -> list[Move]:
    return [] if config.tie_embeddings else [same(family.head, "head.weight")]


def _load(place: str | os.PathLike[str]) -> PreTrainedModel:
    """Load a transformers model from its folder or the hub; every tensor must fit."""
    folder = Path(place)
    if not folder.exists():
        folder = fetch(os.fspath(place))
    if not (folder / CONFIG).is_file():
        raise FileNotFoundError(f"{place} holds no {CONFIG}, so it is not the folder of a transformers model")
    if (named := read_json_mapping(folder / CONFIG).get("model_type")) is not None:
        _family(named)  # before transformers, which may not know it
    config: Any = read_config(folder)
    family = _family(config.model_type)
    if config.model_type == family.holder:
        config = config.text_config  # transformers leaves the tensors for images out
    theirs: Any = getattr(transformers, family.model)
    rope.check(config)
    check_sizes(theirs, folder, config)
    with quiet():
        model, info = theirs.from_pretrained(
            folder, config=config, trust_remote_code=False, use_safetensors=True, output_loading_info=True
        )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        names = sorted(str(key) for key in info.get(kind, ()) if not str(key).endswith(family.buffers))
        if names:
            raise ValueError(f"{kind.replace('_', ' ')}: {', '.join(names)}")
    return model


def _load_all(model: PreTrainedModel, tensors: dict[str, Tensor]) -> None:
    """Replace all of the model's tensors by `tensors`."""
    own = model.state_dict()
    for name, tensor in own.items():
        if name not in tensors:
            raise ValueError(f"the converted weights lack {name!r}")
        if tensors[name].shape != tensor.shape:
            raise ValueError(f"{name!r} must be {list(tensor.shape)}, got {list(tensors[name].shape)}")
    model.load_state_dict(tensors, assign=True)
