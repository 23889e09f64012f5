"""Layers whose heads torch's tensor parallelism divides among processes: as on one process, or refused."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from subquad.attention import build, mechanism, names
from subquad.attention.conversions import to_static_cache
from subquad.models import DecoderConfig, build_model
from subquad.state import State
from subquad.testing import assert_same_maths

PLAN = ("query", "key", "value", "out")
LATENTS, GLOBALS = ("latent_query", "latent_key"), ("global_query", "global_key", "global_value")
RIGHT = {
    "bigbird": ("bigbird", {"block": 4}, PLAN),
    "dilated": ("dilated", {"width": 3, "rope": True}, PLAN),
    "full": ("full", {"bias": True, "head_dim": 6}, PLAN),
    "full with fewer key heads": ("full", {"num_kv_heads": 2, "score_scale": 0.3, "rope": True}, PLAN),
    "full with a gate": ("full", {"output_gate": True}, (*PLAN, "gating")),
    "latte": ("latte", {"num_latents": 8, "scale": True}, PLAN),
    "latte_macchiato": ("latte_macchiato", {"width": 5, "num_latents": 8}, (*PLAN, *LATENTS)),
    "linear": ("linear", {"rotary": True}, PLAN),
    "llp": ("llp", {"segment": 8, "num_kv_heads": 2}, PLAN),
    "llp_printed": ("llp_printed", {"segment": 8, "key_norm": False}, ("query", "key", "out", "first_out")),
    "longformer": ("longformer", {"width": 5, "num_kv_heads": 2}, (*PLAN, *GLOBALS)),
    "performer": ("performer", {}, PLAN),
    "performer by relu": ("performer", {"kernel": "relu"}, PLAN),
    "window": ("window", {"width": 4, "sinks": 2, "causal": True}, PLAN),
    "window on both sides": ("window", {"width": 4, "causal": False}, PLAN),
}
"""Layers, and the projections that the plan divides."""
REFUSED = {
    "full whose gate is whole": ("full", {"output_gate": True}, PLAN, r"gating\.weight would not be divided"),
    "gla, the decays alone": ("gla", {}, ("decay_up",), "with its options"),
    "latte_macchiato with whole latents": ("latte_macchiato", {}, PLAN, r"latent_key\.weight, latent_query\.weight"),
    "linear with a learned map": ("linear", {"feature_map": "learned"}, PLAN, "key_map, query_map would not"),
    "llp with shifted heads": ("llp", {"segment": 8, "shifted_heads": True}, PLAN, "with its options"),
    "llp_printed as printed": ("llp_printed", {}, ("query", "key", "out", "first_out"), r"norm\.bias, norm\.weight"),
    "longformer with whole global projections": ("longformer", {}, PLAN, "global_key.*global_query.*global_value"),
    "one key head": ("full", {"num_kv_heads": 1}, PLAN, "it has 1, which must be a multiple"),
    "query alone": ("llp", {}, ("query",), r"key\.weight, out\.weight, value\.weight"),
    "queries and keys are normed": ("full", {"qk_norm": True}, PLAN, r"key_norm\.weight, query_norm\.weight"),
    "three heads": ("full", {"num_heads": 3}, PLAN, "it has 3, which must be a multiple"),
    "value alone": ("linear", {}, ("value",), r"key\.weight, out\.weight, query\.weight would not"),
    "window with a learned sink": ("window", {"learned_sink": True}, PLAN, "sink_logits would not be divided"),
}

for mechanism_name in names():
    if any(kind == mechanism_name for kind, *_ in [*RIGHT.values(), *REFUSED.values()]):
        continue
    made = build(mechanism_name, dim=24, num_heads=4)
    linear = tuple(name for name, module in made.named_children() if isinstance(module, nn.Linear))
    if made.divisible:
        RIGHT[mechanism_name] = (mechanism_name, {}, linear)
    else:
        REFUSED[mechanism_name] = (mechanism_name, {}, linear, "with its options they are not all alike")


@functools.cache
def mesh():
    return init_device_mesh("cpu", (2,))


def make(name, options):
    torch.manual_seed(0)
    return build(name, **{"dim": 24, "num_heads": 4, **options}).double()


def divide(module, projections):
    """Give the named projections the plan that torch's documents name for them."""
    plan = {name: RowwiseParallel() if name.endswith(("out", "down")) else ColwiseParallel() for name in projections}
    return parallelize_module(module, mesh(), plan)


def whole(x):
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def is_one(_, name):
    """Compare outputs, gradients and, with a state, outputs after it."""
    kind, options, projections = RIGHT[name]
    for form in mechanism(kind).forms if "causal" not in options else ["the given form"]:
        one = make(kind, {"causal": form == "causal", **options})
        parts, results = divide(copy.deepcopy(one), projections), []
        for layer in (one, parts):
            x = torch.randn(2, 13, 24, dtype=torch.float64, generator=torch.manual_seed(1)).requires_grad_()
            y, _ = layer(x)
            y.square().sum().backward()
            found = {"output": y, "x": x.grad} | {n: whole(p.grad) for n, p in layer.named_parameters()}
            if layer.causal:
                found["prompt"], state = layer(x[:, :10])
                for t in (10, 11):
                    found[f"step {t}"], state = layer(x[:, t : t + 1], state)
            results.append(found)
        for what, value in results[0].items():
            assert_same_maths(results[1][what].detach(), value.detach(), f"{form}: {what}")


def is_refused(_, name):
    kind, options, projections, reason = REFUSED[name]
    layer = make(kind, options)
    divide(layer, projections)
    with pytest.raises(ValueError, match=f"heads cannot be divided among 2 processes in this {kind} layer.*{reason}"):
        layer(torch.zeros(1, 4, layer.config.dim, dtype=torch.float64))


def gathered_for_one_is_refused(_):
    """Whole queries beside divided keys: the queries of this process would read the wrong keys."""
    for kind in ("full", "linear"):
        layer = make(kind, {})
        plan = {name: ColwiseParallel() for name in ("key", "value")} | {"out": RowwiseParallel()}
        parallelize_module(layer, mesh(), plan | {"query": ColwiseParallel(output_layouts=Replicate())})
        with pytest.raises(ValueError, match="has 4 query heads and 2 key heads of"):
            layer(torch.zeros(1, 4, 24, dtype=torch.float64))


def static_caches_hold_heads(_):
    """Decode with keys and values in a static cache."""
    for kind, options in (("full", {}), ("window", {"width": 4, "sinks": 2}), ("llp", {"segment": 4})):
        one = make(kind, options)
        steps = []
        for layer in (one, divide(copy.deepcopy(one), PLAN)):
            x = torch.randn(1, 13, 24, dtype=torch.float64, generator=torch.manual_seed(1))
            _, state = layer(x[:, :11])
            by_row = State({**state.entries, "seen": torch.tensor([11])}, state.config_hash)
            steps.append(layer(x[:, 11:12], to_static_cache(layer, by_row, 16))[0])
        assert_same_maths(steps[1].detach(), steps[0].detach(), kind)


def models_are_one(_):
    """Divide every block of a decoder and of a Perceiver AR by names that torch matches."""
    for attention, changes in (("llp", {}), ("perceiver_ar", {"options": {"perceiver_ar": {"latents": 4}}})):
        shape = {"vocab_size": 20, "dim": 24, "num_layers": 2, "num_heads": 4, "feedforward": "swiglu"}
        one = build_model(DecoderConfig(attention=attention, **shape, **changes)).double()
        parts = divide(copy.deepcopy(one), [f"layers.*.attention.{name}" for name in PLAN])
        divide(parts, [f"layers.*.feedforward.{name}" for name in ("gate", "up", "down")])
        tokens = torch.arange(12)[None]
        assert_same_maths(parts(tokens)[0].detach(), one(tokens)[0].detach(), attention)


CASES = {f"{name} divided": [2, __name__, "is_one", name] for name in RIGHT}
CASES |= {f"{name} refused": [2, __name__, "is_refused", name] for name in REFUSED}
CASES |= {
    name: [2, __name__, name] for name in ("gathered_for_one_is_refused", "static_caches_hold_heads", "models_are_one")
}
