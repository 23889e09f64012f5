"""Transformers models with scaled rotary positions and an adapter (LongLoRA, Chen et al. 2023, arXiv:2309.12307).

The folder of an extension is a PEFT adapter for the original checkpoint, plus the model's configuration with the scaled
positions, which an adapter alone would lose.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from subquad.checksums import check_unchanged
from subquad.hf import lora
from subquad.hf.config import SubquadConfig
from subquad.hf.interface import check_attention, register
from subquad.hf.loading import CONFIG, check_sizes, fetch, naming, no_bar, read_config
from subquad.hf.lora import Base, put_adapter
from subquad.program import command

if TYPE_CHECKING:
    from peft import PeftModel

SCALINGS = ("linear", "ntk", "yarn", "dynamic")


def find_model(name: str) -> Path:
    """Return the folder of the transformers model `name`: a folder, or a name on the Hugging Face hub (downloaded).

    Raises `FileNotFoundError` if there is no such model, and `ValueError` for a subquad model or an adapter.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir():
        folder = fetch(name)
    if lora.is_adapter(folder):
        raise ValueError(f"{name} holds an adapter, not a whole model: merge it with: {lora.merging(name)}")
    if not (folder / CONFIG).is_file():
        raise FileNotFoundError(f"{name} holds no {CONFIG}: it is not a transformers model")
    if isinstance(read_config(folder), SubquadConfig):
        raise ValueError(
            f"{name} holds a subquad model, and only transformers models can be extended: "
            f"export it, then extend what that writes: {command('export', name, '--out', f'{folder}-exported')}"
        )
    return folder


def own_length(config: PreTrainedConfig) -> int:
    """Return `max_position_embeddings` of a rotary model; `ValueError` for positions that can't be scaled (again)."""
    kind, rope = type(config).__name__, getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict) or "rope_theta" not in rope:
        raise ValueError(
            f"only rotary positions, the same in all layers, can be scaled, and {kind} has none (Llama, Qwen2, Qwen3 "
            "and GPT-NeoX have)"
        )
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"positions are already scaled (rope_type={rope['rope_type']!r}); extend the original model")
    length = getattr(config, "max_position_embeddings", None)
    if not isinstance(length, int) or length < 2:
        raise ValueError(f"max_position_embeddings of {kind} must be a number of at least 2, got {length!r}")
    return length


def scale_positions(config: PreTrainedConfig, length: int, scaling: str) -> PreTrainedConfig:
    """Return a copy of `config` with rotary positions scaled to `length` tokens, by f = length / own length.

    With the frequencies `w_i = theta^(-2 i / d)`, i < d / 2, and a ramp `b_i` in [0, 1] that is 1 for waves with more
    than 32 turns within the own length and 0 for waves with less than one:

        linear   w_i / f                           (Chen et al. 2023, arXiv:2306.15595)
        ntk      theta' = theta f^(d / (d - 2))
        yarn     w_i (b_i + (1 - b_i) / f), attention times (1 + 0.1 ln f)^2    (Peng et al. 2023, arXiv:2309.00071)
        dynamic  theta' = theta (f L / own - f + 1)^(d / (d - 2)) for inputs of L > own tokens

    linear, yarn and dynamic are transformers' `rope_type`; ntk only changes `rope_theta`. Raises `ValueError` for an
    unknown scaling, for a `length` not above the own, and as `own_length`.
    """
    own, rope = own_length(config), dict(config.rope_parameters)
    if scaling not in SCALINGS:
        raise ValueError(f"unknown scaling of positions {scaling!r}; valid: {', '.join(SCALINGS)}")
    if length <= own:
        raise ValueError(f"length={length} must be above the model's own max_position_embeddings={own}")
    factor = length / own
    scaled = copy.deepcopy(config)
    if scaling == "ntk":
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        rotated = int(size * rope.get("partial_rotary_factor", 1.0))
        if rotated < 4:
            raise ValueError(f"ntk needs at least 4 rotary channels a head, this model has {rotated}; use linear")
        rope["rope_theta"] *= factor ** (rotated / (rotated - 2))
    else:
        rope |= {"rope_type": scaling, "factor": factor}
    if scaling == "yarn":
        rope["original_max_position_embeddings"] = own
    if scaling != "dynamic":  # dynamic starts to scale above the own length, so it must stay
        scaled.max_position_embeddings = length
    scaled.rope_parameters = rope
    return scaled


def load_original(folder: str | Path, config: PreTrainedConfig) -> PreTrainedModel:
    """Load the model in `folder` in float32 with `config`; `ValueError`, before allocation, if weights don't fit."""
    register()
    check_unchanged(folder)
    with naming(folder), no_bar():
        kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
        if kind is not None:  # otherwise transformers raises an error that lists the models it knows
            check_sizes(kind, Path(folder), copy.deepcopy(config))
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=copy.deepcopy(config),
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
        model, info = loaded
        if info["missing_keys"]:
            raise ValueError(f"weights are missing: {', '.join(sorted(map(str, info['missing_keys'])))}")
    return model


def projections(model: nn.Module) -> list[str]:
    """Return the full names of the linear layers in attention. Raises `ValueError` if there are none."""
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    found = [name for name in linear if any("attn" in part or "attention" in part for part in name.split("."))]
    if not found:
        raise ValueError(f"{type(model).__name__} has no linear layer to adapt in a module named attn or attention")
    return found


def trained_whole(model: PreTrainedModel, *, embeddings: bool, norms: bool) -> list[str]:
    """Return the full names of the modules to train in full: the token embedding, the norms, or both."""
    table = model.get_input_embeddings()
    found = []
    for name, module in model.named_modules():
        norm = type(module).__name__.endswith("Norm") and next(module.parameters(), None) is not None
        if (embeddings and module is table) or (norms and norm):
            found.append(name)
    return found


def adapt(
    model: PreTrainedModel,
    *,
    rank: int,
    alpha: int | None,
    dropout: float,
    embeddings: bool,
    norms: bool,
    base: Base | None = None,
) -> PeftModel:
    """Return `model` with factors in attention and trainable embeddings and norms; a tied head stays tied to them."""
    config = lora.require_peft().LoraConfig(
        r=rank,
        lora_alpha=2 * rank if alpha is None else alpha,
        lora_dropout=dropout,
        target_modules=projections(model),
        modules_to_save=trained_whole(model, embeddings=embeddings, norms=norms) or None,
        ensure_weight_tying=embeddings and bool(model.config.tie_word_embeddings),
        task_type="CAUSAL_LM",
    )
    adapted = put_adapter(model, config)
    config.base_model_name_or_path = None if base is None else base.path
    model.adapter_base = base  # type: ignore[assignment]
    return adapted


def open_extension(folder: str | Path, base: str | Path | None = None) -> PeftModel:
    """Load an extended model: the recorded original (or the one in `base`) with scaled positions, and the adapter.

    Raises `FileNotFoundError` if `folder` holds no extension or the original is missing, and `ValueError` if the
    original has other weights.
    """
    if not lora.is_extension(folder):
        how = command("extend", "MODEL", "--run.folder", folder)
        raise FileNotFoundError(f"{folder} holds no extension; make one with: {how}")
    record = Base.read(folder)
    if base is None:
        place = record.find(folder)
    else:
        place = find_model(str(base))
        record.check(place, folder)
    register()
    return lora.load_adapter(load_original(place, read_config(folder)), folder)


def load_causal(folder: str) -> nn.Module:
    """Load the causal language model in `folder`: a subquad or transformers model, an adapter or an extension.

    Code in the folder is never run. Raises `FileNotFoundError` if there is no model, and `ValueError` for a model that
    is not a causal language model.
    """
    adapted = lora.is_adapter(folder)
    if not adapted and not (Path(folder) / CONFIG).is_file():
        raise FileNotFoundError(f"there is no model in {folder}: config.json is missing")
    check_unchanged(folder)
    register()
    disable_progress_bar()
    if lora.is_extension(folder):
        return open_extension(folder).get_base_model()
    place = Base.read(folder).find(folder) if adapted else folder
    config: Any = read_config(place)
    kind = config.model_type
    if config.is_encoder_decoder:
        raise ValueError(f"{folder} holds an encoder-decoder ({kind}), not a causal language model")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"{folder} holds no causal language model: AutoModelForCausalLM doesn't know type {kind!r}")
    if adapted and isinstance(config, SubquadConfig):
        return lora.open_adapter(folder).get_base_model()
    with naming(folder):
        found: Any = AutoModelForCausalLM.from_pretrained(
            folder, config=config, local_files_only=True, trust_remote_code=False, use_safetensors=True
        )
        check_attention(found)
    return found
