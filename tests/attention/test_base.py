"""The folder of mechanisms is the registry, and every mechanism is an ordinary module."""

import ast
import copy
import functools
import importlib
import inspect
import pickle
import pkgutil
import re
import threading
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import subquad.attention
from subquad.attention import Attention, build, mechanism, names
from subquad.attention.laws import Law
from subquad.attention.parts import SoftmaxConfig
from subquad.ops import documents
from subquad.ops.counting import first_replaced
from subquad.testing import AttentionContract, assert_exact, assert_same_maths, largest_allocation
from subquad.testing.tools import GROWTH, LINEAR_GROWTH

FOLDER = Path(subquad.attention.__file__).parent
SHARED = {
    "base", "branches", "conversions", "divided", "drafts", "laws", "memories", "parts", "past", "recurrent",
    "refusals", "sharing",
}  # fmt: skip
TESTS = Path(__file__).parent
NAMES = names()
CAUSAL = [name for name in NAMES if "causal" in mechanism(name).forms]
each = pytest.mark.parametrize("name", NAMES)
each_causal = pytest.mark.parametrize("name", CAUSAL)


def test_counts_of_two_threads_do_not_meet():
    layer, entered, counted = build("window", dim=16, num_heads=2, width=4), threading.Event(), threading.Event()
    expected = layer.cost(40)

    def other():
        with first_replaced(9):
            entered.set()
            counted.wait(60)

    thread = threading.Thread(target=other)
    thread.start()
    entered.wait(60)
    found = layer.cost(40)
    counted.set()
    thread.join()
    assert found == expected


def test_names_are_the_files_of_the_folder():
    files = {m.name for m in pkgutil.iter_modules([str(FOLDER)])}
    assert set(NAMES) == files - SHARED
    assert sorted(NAMES) == NAMES
    assert {mechanism(name).__name__ for name in NAMES} <= set(subquad.attention.__all__)
    assert Attention not in Attention.registry.values()


@each
def test_a_file_holds_one_mechanism_named_as_itself(name):
    module = importlib.import_module(f"subquad.attention.{name}")
    own = [c for c in vars(module).values() if inspect.isclass(c) and c.__module__ == module.__name__]
    assert [c for c in own if issubclass(c, Attention)] == [mechanism(name)]
    assert mechanism(name).name == name
    assert mechanism(name).__name__ == "".join(part.title() for part in name.split("_"))


@functools.cache
def contracts_of(name):
    """Return instances of the contract tests in the mechanism's test file."""
    path = TESTS / f"test_{name}.py"
    assert path.is_file(), f"write tests/attention/test_{name}.py: a subclass of AttentionContract"
    spec = importlib.util.spec_from_file_location(f"contract_of_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tests = [c for c in vars(module).values() if inspect.isclass(c) and issubclass(c, AttentionContract)]
    return [c() for c in tests if getattr(c, "name", None) == name]


def has_all_laws(contract):
    return tuple(contract.laws) == AttentionContract.laws


@each
def test_every_form_meets_the_whole_contract_with_default_options(name):
    default = [contract for contract in contracts_of(name) if has_all_laws(contract)]
    assert {contract.make().causal for contract in default} == {form == "causal" for form in mechanism(name).forms}


def test_every_contract_test_is_of_a_mechanism():
    tested = re.findall(r'^    name = "(\w+)"$', "".join(f.read_text("utf-8") for f in TESTS.glob("test_*.py")), re.M)
    assert set(tested) == set(NAMES)


@each
@pytest.mark.parametrize("default", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["default", "options"])
def test_the_cost_is_that_of_the_layer(name, default):
    """The contract counts the operations and the states of forms by option."""
    # Scores make all its weights.
    scored = issubclass(mechanism(name).Config, SoftmaxConfig) and name != "latte_macchiato"
    for contract in contracts_of(name):
        if has_all_laws(contract) != default:
            continue
        layer = contract.make(torch.float32)
        n = 48 if Law.BLOCK_SIZES in layer.exemptions() else 37  # whole groups
        x, cost = contract.inputs(n, 1, torch.float32), layer.cost(n)
        assert cost.tokens == n
        assert cost.parameters == sum(p.numel() for p in layer.parameters())
        assert cost.state_bytes == layer(x)[1].nbytes
        assert cost.unmasked_entries <= cost.score_entries
        if scored:  # entries that the definition does not fix at zero
            assert cost.unmasked_entries == layer.weights(x).count_nonzero(), contract.options
        for tokens in (0, 3) if layer.causal else ():
            assert layer.state_bytes(tokens) == layer(x[:, :tokens])[1].nbytes, (contract.options, tokens)


@each
def test_every_mechanism_says_what_it_is_and_where_it_is_from(name):
    cls = mechanism(name)
    assert vars(cls)["summary"]
    assert "\n" not in cls.summary
    assert re.search(r"\d{4}, (arXiv:\d{4}\.\d{4,5}|github\.com/)", vars(cls)["paper"]), "author, year, where"
    assert cls.cost_order in GROWTH
    assert inspect.getdoc(cls)
    assert "y_t = " in (inspect.getmodule(cls).__doc__ or ""), "the equation comes first"


CONFIGS = [Attention.Config, SoftmaxConfig, *(mechanism(name).Config for name in NAMES)]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.__qualname__)
def test_every_option_has_a_docstring(config):
    (tree,) = ast.parse(inspect.cleandoc("\n" + inspect.getsource(config))).body
    described = set()
    for node, after in zip(tree.body, tree.body[1:], strict=False):
        text = after.value if isinstance(after, ast.Expr) else None
        if isinstance(node, ast.AnnAssign) and isinstance(text, ast.Constant) and str(text.value).strip():
            described.add(node.target.id)
    assert set(inspect.get_annotations(config)) - described == set()
    assert all(f.name in {n for c in config.__mro__ for n in inspect.get_annotations(c)} for f in fields(config))


@each
def test_the_class_build_and_from_config_make_the_same(name, tmp_path):
    cls = mechanism(name)
    shown = inspect.signature(cls).parameters
    assert list(shown) == list(inspect.signature(cls.Config).parameters)
    assert all(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in shown.values())
    made = getattr(subquad.attention, cls.__name__)(dim=16, num_heads=2)
    assert type(made) is type(build(name, dim=16, num_heads=2)) is cls
    assert made.config == build(name, dim=16, num_heads=2).config == cls.from_config(made.config).config
    config = build(name, dim=16, num_heads=2, bias=True, dropout=0.25).config
    config.to_file(tmp_path / "c.yaml")
    assert type(config).from_file(tmp_path / "c.yaml") == config


def test_a_class_has_the_errors_of_build():
    with pytest.raises(ValueError, match="attention 'latte' has no option 'num_latent'; did you mean 'num_latents'"):
        subquad.attention.Latte(dim=16, num_heads=2, num_latent=4)
    with pytest.raises(ValueError, match="needs the key 'num_heads'"):
        subquad.attention.Latte(dim=16)


def test_states_and_hashes_are_tied_to_name_and_options(monkeypatch):
    sizes = [(name, heads, p) for name in NAMES for heads in (2, 4) for p in (0.0, 0.5)]
    assert len({build(name, dim=16, num_heads=heads, dropout=p).config_hash for name, heads, p in sizes}) == len(sizes)
    layer = build("latte", dim=16, num_heads=2)
    assert layer(torch.zeros(1, 2, 16))[1].config_hash == layer.config_hash
    # The name counts even where the options are equal.
    one, two = (type(name, (Attention,), {}) for name in ("One", "Two"))
    for cls in (one, two):
        monkeypatch.setattr(cls, "name", cls.__name__, raising=False)
    config = Attention.Config(dim=16, num_heads=2)
    assert one(config).config_hash != two(config).config_hash


@pytest.mark.parametrize(("made", "module", "match"), [
    ("odd", "mine.other", r"Mine\.name is 'odd' but its file is other\.py; use one name for both"),
    ("linear", "mine.linear", r"is already subquad\.attention\.linear\.Linear; give mine\.linear\.Mine another"),
])  # fmt: skip
def test_a_name_that_is_not_its_files_or_is_taken_is_refused(made, module, match):
    before = dict(Attention.registry)
    with pytest.raises(TypeError, match=match):
        type("Mine", (Attention,), {"name": made, "__module__": module})
    assert Attention.registry == before


@each
def test_dropout_acts_in_training_only(name):
    layer, plain = (build(name, dim=16, num_heads=2, dropout=p) for p in (0.5, 0.0))
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(2, 40, 16, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    trained = layer(x)[0]
    assert trained.isfinite().all()
    assert not torch.equal(trained, plain(x)[0])
    assert not torch.equal(trained, layer(x)[0]), "another draw"
    assert_exact(layer.eval()(x)[0], plain.eval()(x)[0])


@each
def test_a_mask_without_padding_is_no_mask(name):
    layer = build(name, dim=16, num_heads=2).double()
    x = torch.randn(2, 9, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert_exact(
        layer.weights(x, torch.ones(2, 9, dtype=torch.bool)), torch.cat([layer.weights(r) for r in x.split(1)])
    )
    assert layer.weights(x, torch.zeros(2, 9, dtype=torch.bool)).count_nonzero() == 0


@each
def test_copies_and_pickles_compute_the_same(name):
    layer, x = build(name, dim=8, num_heads=2).double(), torch.randn(2, 9, 8, dtype=torch.float64)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):  # noqa: S301
        assert_exact(other(x)[0], layer(x)[0])


@each_causal
def test_a_state_goes_on_in_another_precision(name):
    layer, x = build(name, dim=8, num_heads=2), torch.randn(2, 9, 8)
    state = layer(x)[1]
    y = layer.to(torch.bfloat16)(x.bfloat16(), state)[0]
    assert y.dtype == torch.bfloat16
    assert y.isfinite().all()


@pytest.mark.parametrize("name", ["longformer", "bigbird"])
def test_after_padding_memory_grows_as_the_tokens(name):
    """Keys at fixed places are found by each row's own positions, not by reading all keys."""
    layer, x = build(name, dim=8, num_heads=2), torch.randn(2, 4096, 8)
    mask, sizes = torch.ones(2, 64, dtype=torch.bool), []
    mask[0, :5] = False
    with torch.no_grad():
        state = layer(x[:, :64], mask=mask)[1]
        for tokens in (2048, 4096):
            sizes.append(largest_allocation(functools.partial(layer, x[:, :tokens], state)))
    assert sizes[1] < LINEAR_GROWTH * sizes[0], sizes


def test_decoding_compiles_once_for_many_lengths():
    layer, x = build("longformer", dim=8, num_heads=2, width=4, num_global=2), torch.randn(1, 16, 8)
    torch._dynamo.reset()
    step = torch.compile(lambda x, state: layer(x, state), fullgraph=True, backend="eager", dynamic=True)
    outputs = []
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=4):
        state = layer(x[:, :4])[1]
        for t in range(4, 16):
            y, state = step(x[:, t : t + 1], state)
            outputs.append(y)
    assert torch.cat(outputs, 1).isfinite().all()


PACKED = {"llp": {"segment": 4, "rope": True}, "window": {"width": 3, "rope": True}, "shifted": {"group": 4}}


@each_causal
@settings(max_examples=5, suppress_health_check=[HealthCheck.differing_executors])
@given(
    ids=st.lists(st.integers(-1, 2), min_size=1, max_size=30).map(lambda ids: torch.tensor([ids, ids[::-1]])),
    overhead=st.sampled_from([0, 10_000]),
)
def test_any_packing_is_as_its_documents_alone(name, ids, overhead):
    torch.manual_seed(0)
    layer = build(name, dim=8, num_heads=2, **PACKED.get(name, {})).double().eval()
    x = torch.randn(*ids.shape, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    before, documents.GROUP_TOKENS = documents.GROUP_TOKENS, overhead
    try:
        y = layer(x, doc_ids=ids)[0]
    finally:
        documents.GROUP_TOKENS = before
    expected = torch.zeros_like(y)
    for group in documents.lay_out(ids, None, *ids.shape).groups:
        for row, places in zip(group.rows_R.tolist(), group.places_RC, strict=True):
            own = places[places < ids.numel()] - row * ids.shape[1]
            if len(own):
                expected[row, own] = layer(x[row : row + 1, own])[0][0]
    assert_same_maths(y, expected, name)
