"""The gated and the delta scan beside the plain torch forms of three libraries: outputs, states and gradients.

The forms of flash-linear-attention and transformers round all inputs to float32; here they run in float64. Tensors are
theirs, `[B, T, H, .]`: B batch, T tokens, H heads, G groups of heads that share queries and keys, K and V channels.
"""

import inspect
import math
from functools import partial

import pytest
import torch
from torch.nn import functional as F

from subquad.ops import delta_scan, gated_scan
from subquad.testing import assert_exact

B, H, K, V = 2, 2, 8, 6
CHUNK = {"chunk_size": 16}
BACKENDS = ("reference", "torch", "sequential")


def swap(x):
    """Exchange tokens and heads."""
    return None if x is None else x.transpose(1, 2)


def flat(out, state):
    return torch.cat([out.flatten()] + ([] if state is None else [state.flatten()]))


def draw(random, tokens, *, groups=H, decays=1, delta=False, state=True):
    """Return q, k, v, then if any log f, beta and the state, by name."""
    keys = random(B, tokens, groups, K, seed=1)
    inputs = {"q": random(B, tokens, groups, K), "k": F.normalize(keys, dim=-1) if delta else keys}
    inputs["v"] = random(B, tokens, H, V, seed=2)
    if decays:
        log_f = -(0.05 + random(B, tokens, H, decays, seed=3).abs() / 3)
        inputs["g"] = log_f[..., 0] if decays == 1 else log_f
    if delta:
        inputs["beta"] = 2 * random(B, tokens, H, seed=4).sigmoid()
    if state:
        inputs["initial_state"] = random(B, H, K, V, seed=5)
    return inputs


def scan(backend, with_state, *, q, k, v, g=None, beta=None, initial_state=None):
    """Our scan, of queries divided by sqrt(K) as in all the others: outputs, and the state if asked for."""
    if g is not None:
        g = g[..., None] if g.dim() == 3 else g
    args = [swap(x) for x in (q * K**-0.5, k, v)]
    if beta is None:
        found = gated_scan(*args, swap(g), state=initial_state, backend=backend)
    else:
        found = delta_scan(*args, swap(beta[..., None]), swap(g), state=initial_state, backend=backend)
    return flat(swap(found.out), found.state if with_state else None)


def compare(agree_in_gradients, in_double, library, what, form, inputs):
    """Compare each backend with `form(q, k, v, **others)`, which returns outputs and state, or None for no state."""
    names, with_state = list(inputs), "initial_state" in inputs

    def theirs(q, k, v, *others):
        with in_double():
            out, state = form(q, k, v, **dict(zip(names[3:], others, strict=True)))
            return flat(out, state if with_state else None)

    def ours(backend, *tensors):
        return scan(backend, with_state, **dict(zip(names, tensors, strict=True)))

    for backend in BACKENDS:
        agree_in_gradients(library, what, partial(ours, backend), theirs, list(inputs.values()))


FLA = {  # name: (module, tokens, what is drawn, further options)
    "naive_recurrent_simple_gla": ("simple_gla", 61, {}, {"output_final_state": True}),
    "naive_chunk_simple_gla": ("simple_gla", 61, {}, {"output_final_state": True, **CHUNK}),
    "naive_parallel_simple_gla": ("simple_gla", 61, {"state": False}, {}),
    "naive_recurrent_gla": ("gla", 61, {"decays": K}, {"output_final_state": True}),
    "naive_recurrent_linear_attn": ("linear_attn", 61, {"decays": 0}, {"output_final_state": True}),
    "naive_recurrent_gated_delta_rule": ("gated_delta_rule", 61, {"delta": True}, {"output_final_state": True}),
    "naive_chunk_gated_delta_rule": ("gated_delta_rule", 61, {"delta": True}, {"output_final_state": True, **CHUNK}),
    "naive_recurrent_kda": ("kda", 61, {"delta": True, "decays": K, "groups": 1}, {"output_final_state": True}),
    "naive_chunk_kda": ("kda", 64, {"delta": True, "decays": K, "groups": 1}, {"output_final_state": True, **CHUNK}),
}


@pytest.mark.parametrize("name", FLA)
def test_flash_linear_attentions_references(peer, agree_in_gradients, in_double, random, name):
    module, tokens, kinds, options = FLA[name]
    function = getattr(peer(f"fla.ops.{module}.naive"), name)

    def form(q, k, v, g=None, **others):
        decays = {} if g is None else {"gk" if module == "gla" else "g": g}
        return function(q, k, v, **decays, **others, **options)

    compare(agree_in_gradients, in_double, "flash-linear-attention", name, form, draw(random, tokens, **kinds))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("delta_rule_recurrence", {}),
        ("delta_rule_chunkwise", CHUNK),
        ("delta_rule_parallel", {"BM": 32, "BN": 16}),
    ],
)
def test_flash_linear_attentions_delta_rule(peer, agree_in_gradients, in_double, random, name, options):
    function = getattr(peer("fla.ops.delta_rule.naive"), name)
    takes_state = name == "delta_rule_recurrence"

    def form(q, k, v, beta, **before):  # heads before tokens here
        out, state = function(*(swap(x) for x in (q, k, v, beta)), **before, **options)
        return swap(out), state

    inputs = draw(random, 64, decays=0, delta=True, state=takes_state)
    compare(agree_in_gradients, in_double, "flash-linear-attention", name, form, inputs)


def test_flash_linear_attentions_retention(peer, agree_in_gradients, in_double, random):
    function = peer("fla.ops.retention.naive").naive_retention
    inputs = draw(random, 61, decays=0, state=False)
    log_f = torch.log1p(-(2.0 ** (-5 - torch.arange(H, dtype=torch.float64)))).expand(B, 61, H)

    def theirs(q, k, v):
        with in_double():
            return swap(function(swap(q), swap(k), swap(v))).flatten()

    def ours(q, k, v):
        return scan(None, False, q=q, k=k, v=v, g=log_f)

    agree_in_gradients("flash-linear-attention", "naive_retention", ours, theirs, list(inputs.values()))


def test_flash_linear_attentions_normalised_linear_attention(peer, agree_in_gradients, in_double, random):
    function = peer("fla.ops.linear_attn.naive").naive_recurrent_linear_attn
    q, k, v = list(draw(random, 61, decays=0, state=False).values())

    def theirs(q, k, v):
        with in_double():
            return function(q.exp(), k.exp(), v, scale=1.0, normalize=True)[0]

    def ours(q, k, v):
        return swap(gated_scan(swap(q.exp()), swap(k.exp()), swap(v), None, normalise=True, eps=1e-10).out)

    agree_in_gradients("flash-linear-attention", "naive_recurrent_linear_attn, normalised", ours, theirs, [q, k, v])


def test_flash_linear_attentions_hgrn(peer, agree_in_gradients, in_double, random):
    """HGRN, of which HGRN2 is the outer-product form: a state of one channel for each channel of the model."""
    function = peer("fla.ops.hgrn.naive").naive_recurrent_hgrn
    x, log_f = random(B, 61, 5), -random(B, 61, 5, seed=1).abs()

    def theirs(x, log_f):
        with in_double():
            return function(x, log_f)[0]

    def ours(x, log_f):
        one = torch.ones(B, 5, 61, 1, dtype=torch.float64)
        return gated_scan(one, one, x.mT[..., None], log_f.mT[..., None]).out[..., 0].mT

    agree_in_gradients("flash-linear-attention", "naive_recurrent_hgrn", ours, theirs, [x, log_f])


@pytest.mark.parametrize("form", ["chunk", "recurrent"])
def test_attention_gyms_gated_delta_rule(peer, agree_in_gradients, in_double, random, form):
    """It computes in float64 if the inputs are, and keeps states as `[V, K]`."""
    function = getattr(peer("attn_gym.linear"), f"{form}_gdn")

    def theirs(q, k, v, g, beta, initial_state):
        before = {"initial_state": initial_state.mT.contiguous(), "output_final_state": True}
        out, state = function(q, k, v, g, beta, **before, impl="reference")
        return out, state.mT

    inputs = draw(random, 61, delta=True, groups=1)
    compare(agree_in_gradients, in_double, "attn-gym", f"{form}_gdn, reference", theirs, inputs)


@pytest.mark.parametrize("form", ["chunk", "recurrent"])
def test_attention_gyms_kimi_delta_attention(peer, agree_in_gradients, in_double, random, form):
    """Its decays are powers of 2; the public function refuses float64."""
    function = getattr(peer("attn_gym.linear.kda.naive"), f"naive_{form}_kda")

    def theirs(q, k, v, g, beta, initial_state):
        before = {"initial_state": initial_state.mT, "output_final_state": True}
        out, state = function(q, k, v, g / math.log(2), beta, **before)
        return out, state.mT

    inputs = draw(random, 128, delta=True, decays=K)
    compare(agree_in_gradients, in_double, "attn-gym", f"naive_{form}_kda", theirs, inputs)


DELTA = {"delta": True, "groups": 1}
TRANSFORMERS = {  # name: (the file that it is in, what is drawn, further options)
    "torch_chunk_gated_delta_rule": ("qwen3_next", DELTA, CHUNK),
    "torch_recurrent_gated_delta_rule": ("qwen3_next", DELTA, {}),
    "chunk_kimi_delta_attention": ("kimi_linear", {"delta": True, "decays": K}, CHUNK),
    "recurrent_kimi_delta_attention": ("kimi_linear", {"delta": True, "decays": K}, {}),
}


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers_delta_rules(torch_forms, agree_in_gradients, in_double, random, name):
    module, kinds, options = TRANSFORMERS[name]
    form = partial(getattr(torch_forms(module), name), output_final_state=True, **options)

    compare(agree_in_gradients, in_double, "transformers", name, form, draw(random, 61, **kinds))


def test_transformers_state_space_dual(torch_forms, agree_in_gradients, in_double, random):
    """Its values are times the step, which its decays are the exponential of: here the step is -log f."""
    function = torch_forms("mamba2").mamba2_chunk_scan

    def theirs(q, k, v, g, initial_state):
        before = {"initial_states": initial_state.mT, "return_final_states": True}
        rates = torch.full((H,), -1.0, dtype=torch.float64)
        out, state = function(v / -g[..., None], -g, rates, k, q * K**-0.5, 16, **before)
        return out, state.mT

    inputs = draw(random, 61, groups=1)
    compare(agree_in_gradients, in_double, "transformers", "mamba2_chunk_scan", theirs, inputs)


COPIES = {
    "torch_chunk_gated_delta_rule": ("qwen3_5", "qwen3_5_moe", "olmo_hybrid"),
    "torch_recurrent_gated_delta_rule": ("qwen3_5", "qwen3_5_moe", "olmo_hybrid"),
    "chunk_kimi_delta_attention": ("bailing_hybrid",),
    "recurrent_kimi_delta_attention": ("bailing_hybrid",),
    "mamba2_chunk_scan": ("bamba", "falcon_h1", "granitemoehybrid", "nemotron_h", "zamba2"),
}


@pytest.mark.parametrize("name", COPIES)
def test_transformers_families_have_copies_of_the_forms_compared_here(torch_forms, name):
    original = inspect.getsource(getattr(torch_forms(TRANSFORMERS.get(name, ("mamba2",))[0]), name))
    for module in COPIES[name]:
        assert inspect.getsource(getattr(torch_forms(module), name)) == original, module


@pytest.fixture(params=["transformers", "flash-linear-attention"])
def chunked(request, peer, torch_forms):
    """The name of a library, and its gated delta rule in chunks, `function(inputs)`."""
    if request.param == "transformers":
        function = torch_forms("qwen3_next").torch_chunk_gated_delta_rule
    else:
        function = peer("fla.ops.gated_delta_rule.naive").naive_chunk_gated_delta_rule
    return request.param, lambda q, k, v, **others: function(q, k, v, **others)[0]


def test_their_delta_rules_round_float64_inputs_to_float32(note, chunked, random):
    library, function = chunked
    inputs = draw(random, 61, delta=True, state=False)
    theirs, exact = function(**inputs), scan("reference", False, **inputs)
    note(library, "error: gated delta rule of float64 inputs", (theirs.flatten() - exact).abs().max())
    assert_exact(theirs.float(), function(**{name: x.float() for name, x in inputs.items()}), library)


def test_a_state_that_overflows_makes_earlier_outputs_nan_in_their_chunks(chunked, random):
    """Keys of length 3,000 from token 40 on, written with strength 1: the state grows beyond float32."""
    _, function = chunked
    inputs = {name: x.float() for name, x in draw(random, 60, delta=True, state=False).items()}
    inputs["beta"] = torch.ones_like(inputs["beta"])
    usual = {name: x.clone() for name, x in inputs.items()}
    inputs["k"][:, 40:] *= 3000
    assert function(**usual).isfinite().all()
    assert function(**inputs)[:, :40].isnan().all(), "tokens that cannot know of it"
    for backend in BACKENDS:
        ours = [scan(backend, False, **x).view(B, 60, H, V) for x in (inputs, usual)]
        assert not ours[0].isfinite().all(), "ours overflows too"
        assert_exact(ours[0][:, :40], ours[1][:, :40], f"{backend}: earlier tokens keep their bits")


def test_flash_linear_attentions_two_gated_delta_rules_take_gates_in_another_order(peer):
    module = peer("fla.ops.gated_delta_rule.naive")
    orders = [
        list(inspect.signature(getattr(module, f"naive_{form}_gated_delta_rule")).parameters)[3:5]
        for form in ("recurrent", "chunk")
    ]
    assert orders == [["beta", "g"], ["g", "beta"]]
