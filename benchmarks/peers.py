"""Operators of other libraries, timed in the same run. They are imported on use; missing ones are reported.

A peer gets the sizes of the mechanism that it is compared with, in its own tensor layout.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from benchmarks.operators import (
    ENGINES,
    PASSES,
    Case,
    Operator,
    Pass,
    Shape,
    causal_sdpa,
    latte_flops,
    scan_flops,
    segments,
    window,
)
from subquad.config import suggest
from subquad.evaluation.provenance import version_of
from subquad.ops.patterns import Pattern

FORWARD: tuple[Pass, ...] = ("forward",)


@dataclass(frozen=True)
class Peer:
    """A library, or one of torch's own kernels."""

    name: str
    module: str
    devices: tuple[str, ...]
    cases: Callable[[str], list[Case]] = lambda _: []
    """Returns the cases on a device type."""
    distribution: str = "torch"
    measures: tuple[str, ...] = ("ops",)
    """Benchmarks that time it. Whole models are made by `benchmarks.models.peer_model`."""
    by_name: bool = False
    """Whether `auto` leaves it out."""

    @property
    def install(self) -> str:
        """Return the command that installs it."""
        return f"pip install {self.distribution}"

    @property
    def is_installed(self) -> bool:
        """Return whether the module can be imported."""
        return find_spec(self.module) is not None


def load(module: str) -> Any:
    """Import a peer's module without its output and warnings."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        return importlib.import_module(module)


def chosen(
    asked: str | Sequence[str], device: torch.device | str, what: str = "ops"
) -> tuple[list[Peer], list[dict[str, str]]]:
    """Return the peers of a benchmark on a device, and a record of each: its version, or the command that installs it.

    `asked` is `auto` (all that are installed), `none`, or names. Raises `ValueError` for a name that is unknown, has
    nothing to time on this device, or isn't installed.
    """
    kind = torch.device(device).type
    known = {peer.name: peer for peer in PEERS if what in peer.measures and kind in peer.devices}
    if asked == "none":
        return [], []
    if asked != "auto":
        wanted = [asked] if isinstance(asked, str) else list(asked)
        for name in wanted:
            if name not in known:
                raise ValueError(f"unknown peer {name!r} on {kind}; {suggest(name, ['auto', 'none', *known])}")
            if not known[name].is_installed:
                raise ValueError(f"peer {name!r} is not installed; {known[name].install}")
        known = {name: known[name] for name in wanted}
    else:
        known = {name: peer for name, peer in known.items() if not peer.by_name}
    there = [peer for peer in known.values() if peer.is_installed]
    return there, [_record(peer) for peer in known.values()]


def cases_beside(
    peers: Sequence[Peer], records: list[dict[str, str]], mechanisms: Sequence[str], device: torch.device | str
) -> list[Case]:
    """Return the peers' cases without those compared with an untimed mechanism; a record notes if none is left."""
    found = list[Case]()
    for peer in peers:
        cases = [c for c in peer.cases(torch.device(device).type) if c.beside is None or c.beside in mechanisms]
        if not cases:
            (record,) = (record for record in records if record["name"] == peer.name)
            record["status"] = "not timed: it is compared with none of these mechanisms"
        found += cases
    return found


def _record(peer: Peer) -> dict[str, str]:
    if peer.is_installed:
        return {"name": peer.name, "status": "installed", "version": version_of(peer.distribution) or "unknown"}
    return {"name": peer.name, "status": "not installed", "install": peer.install}


def _case(name: str, label: str, make: Callable[[Shape], Operator], **options: Any) -> Case:
    """Return a peer's case; `{}` in its label stands for the segment and marks a case that depends on it."""
    return Case(name, make, lambda s: label.format(s.segment), "peer", by_segment="{}" in label, **options)


# --- torch's own


def _flex(device: str) -> list[Case]:
    def make(pattern: Callable[[Shape], Pattern]) -> Callable[[Shape], Operator]:
        def operator(shape: Shape) -> Operator:
            from torch.nn.attention.flex_attention import create_block_mask, flex_attention

            allowed, T = pattern(shape).allowed, shape.tokens
            mask = create_block_mask(lambda b, h, q, k: allowed(q, k), None, None, T, T, device=shape.device)
            # FlexAttention is many times slower with dynamic shapes.
            attend: Any = torch.compile(flex_attention, dynamic=False)
            return Operator(shape.qkv(), lambda q, k, v: attend(q, k, v, block_mask=mask))

        return operator

    passes = FORWARD if device == "cpu" else PASSES  # FlexAttention has no backward pass on a CPU
    return [
        _case("flex, llp", "FlexAttention, as llp, segment {}", make(segments), passes=passes, beside="llp"),
        _case("flex, window", "FlexAttention, as window, {} wide", make(window), passes=passes, beside="window"),
    ]


def _cudnn(_: str) -> list[Case]:
    def context() -> Any:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        return sdpa_kernel([SDPBackend.CUDNN_ATTENTION])

    return [_case("sdpa-cudnn", "sdpa, causal, cuDNN", lambda s: Operator(s.qkv(), causal_sdpa, context))]


# --- libraries for a CPU


def _local_attention(_: str) -> list[Case]:
    def make(**options: Any) -> Callable[[Shape], Operator]:
        def operator(shape: Shape) -> Operator:
            size = shape.segment if options.get("exact_windowsize") else max(1, shape.segment // 2)
            layer = load("local_attention").LocalAttention(
                window_size=size, causal=True, look_backward=1, autopad=True, use_rotary_pos_emb=False, **options
            )
            return Operator(shape.qkv(), layer)

        return operator

    exact = make(exact_windowsize=True)
    return [
        _case("local-attention, llp", "local-attention, as llp, segment {}", make(), beside="llp"),
        _case("local-attention, window", "local-attention, as window, {} wide", exact, beside="window"),
    ]


BUCKET = 64


def _linear_attention_transformer(_: str) -> list[Case]:
    def make(shape: Shape) -> Operator:
        name = "linear_attention_transformer.linear_attention_transformer"
        attend = load(name).causal_linear_attn
        return Operator(shape.qkv(), lambda q, k, v: attend(q, k, v, bucket_size=BUCKET))

    label = f"linear-attention-transformer, blind in buckets of {BUCKET}"
    return [_case("linear-attention-transformer", label, make, flops=scan_flops, beside="linear")]


# --- gated and delta scans, on the inputs of ours


def _token_first(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Transpose `[B, H, T, C]` to the layout of these libraries `[B, T, H, C]`, and `[B, H, T, 1]` to `[B, T, H]`."""
    moved = [x.detach().transpose(1, 2) for x in tensors]
    return [(x[..., 0] if x.shape[-1] == 1 else x).contiguous().requires_grad_() for x in moved]


def _scan(peer: str, ours: str, module: str, name: str, *between: str, **options: Any) -> Case:
    """Return the case of `name(q, k, v, ...)`; `between` are its names of our inputs between keys and values.

    A function without a `scale` divides the queries by sqrt(K), so they are multiplied by it beforehand.
    """

    def make(shape: Shape) -> Operator:
        attend = own(module, name)

        def call(q: Tensor, k: Tensor, *others: Tensor) -> Tensor:
            *more, v = others
            out: Tensor = attend(q, k, v, **dict(zip(between, more, strict=True)), **options)[0]
            return out

        q, *others = (x.detach() for x in ENGINES[ours].make(shape, None).inputs)
        return Operator(_token_first([q if "scale" in options else q * shape.channels**0.5, *others]), call)

    return _case(f"{peer}, {ours}", f"{peer} {name}, as {ours}", make, beside=ours)


def _ssd(peer: str, module: str, name: str) -> Case:
    """Return the case of Mamba-2's scan, in chunks of 256 tokens."""

    def make(shape: Shape) -> Operator:
        attend, rate_H = own(module, name), -torch.ones(shape.heads, device=shape.device)

        def call(q: Tensor, k: Tensor, step: Tensor, v: Tensor) -> Tensor:
            out: Tensor = attend(v, step, rate_H, k, q, chunk_size=256)
            return out

        return Operator(_token_first(ENGINES["mamba2"].make(shape, None).inputs), call)

    return _case(f"{peer}, mamba2", f"{peer} {name}, chunks of 256", make, beside="mamba2")


def own(module: str, name: str) -> Any:
    """Return a function; one of transformers' without the kernels that it takes from other libraries for a GPU."""
    found = getattr(load(module), name)
    return inspect.unwrap(found) if module.startswith("transformers") else found


def _transformers(_: str) -> list[Case]:
    delta = "transformers.models.qwen3_next.modeling_qwen3_next", "torch_chunk_gated_delta_rule"
    return [
        _ssd("transformers", "transformers.models.mamba2.modeling_mamba2", "mamba2_chunk_scan"),
        _scan("transformers", "gated_delta_net", *delta, "beta", "g", chunk_size=64),
    ]


def _mamba(_: str) -> list[Case]:
    return [_ssd("mamba-ssm", "mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined")]


# --- flash-linear-attention


def _fla(_: str) -> list[Case]:
    def linear(shape: Shape) -> Operator:
        attend = load("fla.ops.linear_attn").chunk_linear_attn
        q, k, v = shape.qkv()
        features = [torch.nn.functional.elu(x.detach()) + 1 for x in (q, k)]
        return Operator(_token_first([*features, v]), lambda q, k, v: attend(q, k, v, scale=1.0, normalize=True)[0])

    def simple_gla(shape: Shape) -> Operator:
        attend = load("fla.ops.simple_gla").chunk_simple_gla
        q, k, v = _token_first(shape.qkv())
        log_f = torch.nn.functional.logsigmoid(shape.normal(1, 3).detach().float())
        log_f_BTH = log_f[..., 0].transpose(1, 2).contiguous().requires_grad_()
        return Operator([q, k, log_f_BTH, v], lambda q, k, log_f, v: attend(q, k, v, log_f)[0])

    def latte(shape: Shape) -> Operator:
        attend = load("fla.ops.gla").chunk_gla
        p, logits, v = shape.normal(shape.latents), shape.normal(shape.latents, 1), shape.normal(shape.channels, 2)

        def call(p_BTHL: Tensor, logits_BTHL: Tensor, v_BTHV: Tensor) -> Tensor:
            a_BTHL = logits_BTHL.float().logcumsumexp(1)
            i_BTHL = (logits_BTHL - a_BTHL).exp().to(v_BTHV.dtype)
            log_f_BTHL = torch.cat([torch.zeros_like(a_BTHL[:, :1]), a_BTHL[:, :-1] - a_BTHL[:, 1:]], 1)
            out: Tensor = attend(p_BTHL, i_BTHL, v_BTHV, log_f_BTHL, scale=1.0)[0]
            return out

        return Operator(_token_first([p.detach().softmax(-1), logits, v]), call)

    name = "flash-linear-attention"
    of_latte: dict[str, Any] = {"flops": latte_flops, "by_latents": True, "beside": "latte"}
    return [
        _case("fla, chunk_linear_attn", f"{name} chunk_linear_attn", linear, flops=scan_flops, beside="linear"),
        _case("fla, chunk_simple_gla", f"{name} chunk_simple_gla", simple_gla, beside="elita"),
        _case("fla, chunk_gla", f"{name} chunk_gla, as causal Latte", latte, **of_latte),
        _scan("fla", "retnet", "fla.ops.simple_gla", "chunk_simple_gla", "g", scale=1.0),
        _scan("fla", "gla", "fla.ops.gla", "chunk_gla", "g", scale=1.0),
        _scan("fla", "delta_net", "fla.ops.delta_rule", "chunk_delta_rule", "beta", scale=1.0),
        _scan("fla", "gated_delta_net", "fla.ops.gated_delta_rule", "chunk_gated_delta_rule", "beta", "g", scale=1.0),
        _scan("fla", "kda", "fla.ops.kda", "chunk_kda", "beta", "g", scale=1.0),
    ]


def _library(name: str, cases: Callable[[str], list[Case]]) -> Peer:
    """Return a library for a CPU whose distribution and module have its name."""
    return Peer(name, name.replace("-", "_"), ("cpu",), cases, name)


def _model(name: str, module: str, measures: tuple[str, ...], **more: Any) -> Peer:
    """Return a library whose whole model is timed."""
    return Peer(name, module, ("cpu", "cuda"), distribution=module.replace("_", "-"), measures=measures, **more)


PEERS = (
    Peer("sdpa-cudnn", "torch", ("cuda",), _cudnn),
    Peer("flex", "torch", ("cpu", "cuda"), _flex),
    _library("local-attention", _local_attention),
    _library("linear-attention-transformer", _linear_attention_transformer),
    Peer("fla", "fla", ("cuda",), _fla, "flash-linear-attention"),
    Peer("mamba-ssm", "mamba_ssm", ("cuda",), _mamba, "mamba-ssm"),
    _model("perceiver-ar-pytorch", "perceiver_ar_pytorch", ("model",)),  # it has no operator to time alone
    _model("transformers", "transformers", ("ops", "model", "decode"), cases=_transformers),
    *(
        _model(f"transformers-{name}", "transformers", ("model",), by_name=True)
        for name in ("llp", "shifted", "window")
    ),
    _model("transformers-qwen3_5", "transformers", ("decode",)),
)
