"""Layers of recurrences beside those of transformers, with their weights.

transformers' layers round to float32; here they run in float64. Padding is removed before they read a row.
"""

from typing import NamedTuple

import pytest
import torch
from torch import nn

from subquad.attention import build
from subquad.testing import assert_exact, assert_in_budget

DIM, HEADS, TOKENS = 32, 2, 40
ONE = {"hidden_size": DIM, "num_hidden_layers": 1}
LINEAR = {"hidden_size": DIM, "num_attention_heads": HEADS, "num_hidden_layers": 2}
LINEAR |= {"layer_types": ["linear_attention", "full_attention"]}
GATED = {"linear_num_key_heads": HEADS, "linear_num_value_heads": HEADS, **LINEAR}
GATED |= {"linear_key_head_dim": 8, "linear_value_head_dim": 12}
CONVOLVED = {"convolution.weight": "conv1d.weight", "rate.log_rate": "A_log", "rate.step_bias": "dt_bias"}


def weights(ours, theirs, suffix=""):
    """Return which weight of theirs is which of ours, by the names of linear layers."""
    return {f"{a}.weight": f"{b}{suffix}.weight" for a, b in zip(ours.split(), theirs.split(), strict=True)}


class Family(NamedTuple):
    """Our layer, theirs, its configuration, and the parameters of theirs that ours are: by name, or names and rows."""

    ours: nn.Module
    theirs: nn.Module
    config: object
    parts: dict[str, str | list[tuple[str, slice | torch.Tensor]]]


def qwen3_next(library, configs):
    ours = build("gated_delta_net", dim=DIM, num_heads=HEADS, key_channels=8, value_channels=12)
    # The rows of a head stand together: queries, keys, values, gates; and strengths, decays.
    rows = torch.arange(HEADS * 40).view(HEADS, 40).split([8, 8, 12, 12], 1)
    parts = {
        f"{name}.weight": [("in_proj_qkvz.weight", part.flatten())]
        for name, part in zip(("query", "key", "value", "gating"), rows, strict=True)
    }
    parts |= {"strength.weight": [("in_proj_ba.weight", slice(0, None, 2))]}
    parts |= {"fading.weight": [("in_proj_ba.weight", slice(1, None, 2))]}
    parts |= {"norm_weight": "norm.weight", "out.weight": "out_proj.weight", **CONVOLVED}
    config = configs.Qwen3NextConfig(**GATED)
    return Family(ours, library.Qwen3NextGatedDeltaNet(config, 0), config, parts)


def olmo_hybrid(library, configs):
    sizes = {"key_channels": 8, "value_channels": 12}
    ours = build("gated_delta_net", dim=DIM, num_heads=HEADS, beta_range=2, norm_eps=1e-5, **sizes)
    parts = weights("query key value strength fading gating out", "q k v b a g o", "_proj")
    parts |= {"norm_weight": "o_norm.weight", **CONVOLVED}
    config = configs.OlmoHybridConfig(**GATED)
    return Family(ours, library.OlmoHybridGatedDeltaNet(config, 0), config, parts)


def kimi_linear(library, configs):
    ours = build("kda", dim=DIM, num_heads=HEADS, norm_eps=1e-5)
    parts = weights("query key value strength gate_down gate_up out", "q k v b g_a g_b o", "_proj")
    parts |= weights("decay_down decay_up", "forget_gate.f_a forget_gate.f_b", "_proj")
    parts |= {"norm_weight": "o_norm.weight", "convolution.weight": "conv1d.weight"}
    parts |= {"rate.log_rate": "forget_gate.A_log", "rate.step_bias": "forget_gate.dt_bias"}
    config = configs.KimiLinearConfig(linear_head_dim=DIM // HEADS, linear_num_heads=HEADS, **LINEAR)
    return Family(ours, library.KimiLinearDeltaAttention(config, 0), config, parts)


def mamba2(library, configs, G=2):
    H, V, K = 4, 16, 6
    ours = build("mamba2", dim=DIM, num_heads=H, state_channels=K, groups=G)
    rows = torch.arange(2 * H * V + 2 * G * K + H).split([H * V, H * V, G * K, G * K, H])
    parts = {
        f"{name}.weight": [("in_proj.weight", part)]
        for name, part in zip(("gating", "value", "key", "query", "stepping"), rows, strict=True)
    }
    taps = torch.cat(torch.arange(H * V + 2 * G * K).split([H * V, G * K, G * K])[::-1])
    parts |= {f"convolution.{name}": [(f"conv1d.{name}", taps)] for name in ("weight", "bias")}
    parts |= {"rate.log_rate": "A_log", "rate.step_bias": "dt_bias", "skip": "D"}
    parts |= {"norm_weight": "norm.weight", "out.weight": "out_proj.weight"}
    sizes = {"num_heads": H, "head_dim": V, "state_size": K, "n_groups": G, "chunk_size": 16}
    config = configs.Mamba2Config(**sizes, **ONE)
    return Family(ours, library.Mamba2Mixer(config, 0), config, parts)


def xlstm(library, configs, mode="inference"):
    ours = build("mlstm", dim=DIM, num_heads=HEADS, key_channels=DIM // HEADS // 2)
    # Its eps is added to the divisor, and its gates are softly capped, by default at 15.
    free = {"eps": 0.0, "gate_soft_cap": 1e9, "norm_eps": 1e-5, "chunk_size": 8}
    parts = weights("query key value gating out", "q k v ogate_preact out_proj")
    parts |= {"norm_weight": "multihead_norm.weight"}
    for a, b in (("input_forget.weight", "weight"), ("input_forget_bias", "bias")):
        parts[a] = [(f"igate_preact.{b}", slice(None)), (f"fgate_preact.{b}", slice(None))]
    config = configs.xLSTMConfig(num_heads=HEADS, mode=mode, **free, **ONE)
    return Family(ours, library.xLSTMLayer(config), config, parts)


FAMILIES = {"qwen3_next": qwen3_next, "olmo_hybrid": olmo_hybrid, "kimi_linear": kimi_linear, "mamba2": mamba2}
FAMILIES |= {"xlstm": xlstm, "xlstm, training": lambda *modules: xlstm(*modules, mode="train")}


def ours_of(parts, tensors, name):
    """Return what is our parameter `name`, of their parameters or gradients, flat."""
    spec = parts[name]
    spec = [(spec, slice(None))] if isinstance(spec, str) else spec
    return torch.cat([tensors[theirs][rows].flatten() for theirs, rows in spec])


@torch.no_grad()
def drawn(family):
    """Return the layers in float64, theirs with random weights and ours with the same."""
    ours, theirs = family.ours.double(), family.theirs.double()
    torch.manual_seed(0)
    for name, parameter in theirs.named_parameters():
        parameter.normal_(std=1.0 if name.endswith(("A_log", "dt_bias")) else 0.3)
    for name, parameter in ours.named_parameters():
        parameter.copy_(ours_of(family.parts, dict(theirs.named_parameters()), name).view_as(parameter))
    return family


@pytest.fixture(params=FAMILIES)
def family(request, peer, torch_forms):
    """The name of a family, and its layers in float64 with the same random weights."""
    library = torch_forms(request.param.split(",")[0])
    return request.param, drawn(FAMILIES[request.param](library, peer("transformers")))


def first(found):
    return found[0] if isinstance(found, tuple) else found


def test_a_layer_is_transformers_without_the_padding(family, agree, in_double, random):
    name, (ours, theirs, _, parts) = family
    real = torch.ones(3, TOKENS, dtype=torch.bool)
    real[1, :7] = real[1, 20:29] = real[2, 32:] = False  # left and within, and right
    outputs, gradients = [], []
    for is_ours in (True, False):
        x = random(3, TOKENS, DIM).requires_grad_()
        if is_ours:
            rows = [y[mask] for y, mask in zip(ours(x, mask=real)[0], real, strict=True)]
        else:
            with in_double():
                rows = [first(theirs(row[mask][None]))[0] for row, mask in zip(x, real, strict=True)]
        outputs.append(torch.cat(rows))
        (outputs[-1] * random(*outputs[-1].shape, seed=1)).sum().backward()
        gradients.append(x.grad)
    agree("transformers", f"layer of {name}", *outputs)
    agree("transformers", f"layer of {name}: gradients of inputs", *gradients)
    found = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for part, parameter in ours.named_parameters():
        expected = ours_of(parts, found, part)
        agree("transformers", f"layer of {name}: gradients of weights", parameter.grad.flatten(), expected)


@pytest.mark.parametrize("family", [name for name in FAMILIES if "training" not in name], indirect=True)
@torch.no_grad()
def test_tokens_one_by_one_after_a_prompt_are_transformers(family, peer, agree, in_double, random):
    name, (ours, theirs, config, _) = family
    pieces = random(2, 24, DIM).split([16] + 8 * [1], 1)
    state, before, outputs = None, None, ([], [])
    if name != "xlstm":
        before = peer("transformers").DynamicCache(config=config)
    for piece in pieces:
        y, state = ours(piece, state)
        with in_double():
            z = theirs(piece, before)
        z, before = z if isinstance(z, tuple) else (z, before)
        outputs[0].append(y)
        outputs[1].append(z)
    agree("transformers", f"layer of {name}: one by one", *(torch.cat(rows, 1) for rows in outputs))


@pytest.mark.parametrize("groups", [1, 2])
@torch.no_grad()
def test_flash_linear_attentions_mamba2_hands_heads_the_wrong_group_in_prefill(
    peer, agree, note, in_double, random, groups
):
    """Of 4 heads in 2 groups, heads 1 and 2 get the B and C of the other group; token by token they get their own.

    Its norm and its silu, kernels for GPUs, are replaced by those of transformers and torch.
    """
    library = peer("transformers.models.mamba2.modeling_mamba2")
    reference = mamba2(library, peer("transformers"), groups)
    sizes = {"num_heads": 4, "head_dim": 16, "state_size": 6, "n_groups": groups, "chunk_size": 16}
    layer = peer("fla.layers").Mamba2(hidden_size=DIM, **sizes)
    layer.norm, layer.act = reference.theirs.norm, nn.functional.silu
    ours, theirs, _, _ = drawn(reference._replace(theirs=layer))
    x = random(2, 24, DIM)
    expected, rows = ours(x)[0], []
    state = {"conv_state": x.new_zeros(2, 64 + 12 * groups, 4), "recurrent_state": x.new_zeros(2, 4, 16, 6)}
    with in_double():
        prefill = theirs(x)[0]
        for row in x.split(1, 1):
            y, state["conv_state"], state["recurrent_state"] = theirs.torch_forward(row, state)
            rows.append(y)
    agree("flash-linear-attention", "Mamba2.torch_forward, one by one", expected, torch.cat(rows, 1))
    if groups == 1:
        agree("flash-linear-attention", "Mamba2.torch_forward, prefill, one group", expected, prefill)
    else:
        note("flash-linear-attention", "error: Mamba2.torch_forward, prefill, groups", (prefill - expected).abs().max())
        assert (prefill - expected).abs().max() > 1e-2


@pytest.mark.parametrize("layer", ["GatedLinearAttention", "MultiScaleRetention", "DeltaNet", "Mamba2"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_flash_linear_attentions_layers_do_not_run_on_a_cpu(peer, layer):
    options = {"head_dim": 16} if layer == "Mamba2" else {}
    with pytest.raises(RuntimeError, match="active drivers"):
        getattr(peer("fla.layers"), layer)(hidden_size=DIM, num_heads=4, **options)(torch.zeros(1, 16, DIM))


def test_kimi_linears_forget_gate_has_nan_gradients_and_rounds_slow_decays_to_none(peer, note):
    """In float32 it takes `log(1 + exp(z))`, or z above 20, and the gradient is that of both."""
    library, config = (
        peer("transformers.models.kimi_linear.modeling_kimi_linear"),
        peer("transformers").KimiLinearConfig,
    )
    gate = library.KimiLinearForgetGate(config(linear_head_dim=8, linear_num_heads=1, **LINEAR))
    ours = build("kda", dim=8, num_heads=1).rate
    for parameter in (gate.A_log, ours.log_rate):
        nn.init.zeros_(parameter)
    theirs, own = {}, {}
    for z in (89.0, -10.0, -17.0):
        for found, bias, x in ((theirs, gate.dt_bias, gate), (own, ours.step_bias, ours)):
            nn.init.constant_(bias, z)
            log_f = (x(torch.zeros(1, 1, DIM)) if x is gate else x(torch.zeros(1, 1, 8))[0]).flatten()
            found[z] = log_f, torch.autograd.grad(log_f.sum(), bias)[0]
    assert theirs[89.0][0].isfinite().all()
    assert theirs[89.0][1].isnan().all()
    assert_exact(own[89.0][1], -torch.ones(8), "our gradient")
    assert_exact(theirs[-17.0][0], torch.zeros(8), "no decay at all")
    assert (own[-17.0][0] < 0).all()
    exact = -torch.full((8,), -10.0, dtype=torch.float64).exp().log1p()
    assert_in_budget(own[-10.0][0], exact.float(), exact, torch.float32, "our decay")
    note("transformers", "error: kimi_linear, a log decay of -exp(-10), relative", (theirs[-10.0][0] / exact - 1).max())
    assert (theirs[-10.0][0] / exact - 1).abs().min() > 1e-4


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("module", "name"),
    [("qwen3_next", "torch_chunk_gated_delta_rule"), ("kimi_linear", "chunk_kimi_delta_attention")],
)
def test_where_flash_linear_attention_is_installed_transformers_delta_rules_fail_on_a_cpu(peer, module, name):
    function = getattr(peer(f"transformers.models.{module}.modeling_{module}"), name)
    q = torch.zeros(1, 16, 1, 16)
    with pytest.raises(RuntimeError, match="active drivers"):
        function(q, q, q, g=q if module == "kimi_linear" else q[..., 0], beta=q[..., 0])
