"""The folder of mechanisms is the registry: one file, one name, one contract test."""

import ast
import importlib
import inspect
import pkgutil
import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import subquad.attention
from subquad.attention import Attention, Cost, build, mechanism, names
from subquad.attention.blocked import BlockedAttention
from subquad.attention.scanned import ScannedAttention
from subquad.testing import AttentionContract, assert_exact

FOLDER = Path(subquad.attention.__file__).parent
SHARED = {"base", "blocked", "projected", "scanned", "sharing"}
TESTS = Path(__file__).parent
NAMES = names()
each = pytest.mark.parametrize("name", NAMES)


def config_classes():
    return [Attention.Config, BlockedAttention.Config, *(mechanism(name).Config for name in NAMES)]


def test_names_are_the_files_of_the_folder():
    files = {m.name for m in pkgutil.iter_modules([str(FOLDER)])}
    assert set(NAMES) == {name for name in files if not name.startswith("_")} - SHARED
    assert sorted(NAMES) == NAMES
    assert {mechanism(name).__name__ for name in NAMES} <= set(subquad.attention.__all__)


@each
def test_a_file_holds_one_mechanism_named_as_itself(name):
    module = importlib.import_module(f"subquad.attention.{name}")
    own = [c for c in vars(module).values() if inspect.isclass(c) and c.__module__ == module.__name__]
    assert [c for c in own if issubclass(c, Attention)] == [mechanism(name)]
    assert mechanism(name).name == name
    assert mechanism(name).__name__ == "".join(part.title() for part in name.split("_"))


def contracts_of(name):
    """The contract tests in the mechanism's test file."""
    path = TESTS / f"test_{name}.py"
    assert path.is_file(), f"write tests/attention/test_{name}.py: a subclass of AttentionContract"
    spec = importlib.util.spec_from_file_location(f"contract_of_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tests = [c for c in vars(module).values() if inspect.isclass(c) and issubclass(c, AttentionContract)]
    return [c for c in tests if c.__name__.startswith("Test") and vars(c).get("name") == name]


@each
def test_every_mechanism_has_a_contract_test(name):
    assert contracts_of(name)


# Scores make all weights of these; latte_macchiato adds those that go through its state.
SCORED = [name for name in NAMES if issubclass(mechanism(name), BlockedAttention) and name != "latte_macchiato"]


@pytest.mark.parametrize("name", SCORED)
@pytest.mark.parametrize("tokens", [5, 37])
def test_unmasked_entries_are_the_weights_that_are_not_fixed_at_zero(name, tokens):
    for contract in (cls() for cls in contracts_of(name)):
        layer = contract.make()
        n = 48 if 7 in layer.exemptions() else tokens  # whole groups
        w_BHTS = layer.weights(contract.inputs(n, 1))
        cost = layer.cost(n)
        assert cost.unmasked_entries == w_BHTS.count_nonzero(), contract.options
        assert cost.unmasked_entries <= cost.score_entries, contract.options


@each
def test_state_bytes_are_those_of_the_state_with_any_options(name):
    for contract in (cls() for cls in contracts_of(name)):
        layer = contract.make(torch.float32)
        for tokens in (0, 3, 8, 20) if layer.causal else ():
            assert layer.state_bytes(tokens) == layer(contract.inputs(tokens, 1, torch.float32))[1].nbytes, tokens


def test_every_contract_test_is_of_a_mechanism():
    tested = set(
        re.findall(r'^    name = "(\w+)"$', "".join(f.read_text("utf-8") for f in TESTS.glob("test_*.py")), re.M)
    )
    assert tested == set(NAMES)


@each
def test_every_mechanism_says_what_it_is_and_where_it_is_from(name):
    cls = mechanism(name)
    assert vars(cls)["summary"]
    assert "\n" not in cls.summary
    assert re.search(r"\d{4}, (arXiv:\d{4}\.\d{4,5}|github\.com/)", vars(cls)["paper"]), "author, year, where"
    assert cls.cost_order in ("linear", "quadratic")
    assert set(cls.forms) <= {"causal", "bidirectional"}
    assert cls.forms
    assert inspect.getdoc(cls)
    assert "y_t = " in (inspect.getmodule(cls).__doc__ or ""), "the equation comes first"


@pytest.mark.parametrize("config", config_classes(), ids=lambda c: c.__qualname__)
def test_every_option_has_a_docstring(config):
    (tree,) = ast.parse(inspect.cleandoc("\n" + inspect.getsource(config))).body
    described = set()
    for node, after in zip(tree.body, tree.body[1:], strict=False):
        is_text = (
            isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str)
        )
        if isinstance(node, ast.AnnAssign) and is_text and after.value.value.strip():
            described.add(node.target.id)
    own = set(inspect.get_annotations(config))
    assert own - described == set()
    assert all(f.name in {n for c in config.__mro__ for n in inspect.get_annotations(c)} for f in fields(config))


@each
@pytest.mark.parametrize("form", ["causal", "bidirectional"])
def test_a_mechanism_has_the_forms_that_it_says(name, form):
    forms, causal = mechanism(name).forms, form == "causal"
    if form in forms:
        assert build(name, dim=16, num_heads=2, causal=causal).causal == causal
        return
    with pytest.raises(ValueError, match=f"attention '{name}' has no {form} form; it has: {', '.join(forms)}"):
        build(name, dim=16, num_heads=2, causal=causal)


@each
def test_a_bidirectional_layer_takes_no_state(name):
    if "bidirectional" not in mechanism(name).forms:
        pytest.skip("causal only")
    layer, x = build(name, dim=16, num_heads=2, causal=False), torch.randn(2, 5, 16)
    state = layer(x)[1]
    with pytest.raises(ValueError, match=f"this {name} layer is not causal: it reads whole sequences and takes no st"):
        layer(x, state)


@each
def test_the_defaults_build_every_mechanism(name):
    torch.manual_seed(0)
    layer = build(name, dim=16, num_heads=2)
    y, state = layer(torch.randn(2, 5, 16))[:2]
    assert y.shape == (2, 5, 16)
    assert state.config_hash == layer.config_hash
    assert type(layer) is mechanism(name)
    assert layer.config == mechanism(name).Config(dim=16, num_heads=2)


@each
def test_a_configuration_survives_a_file(name, tmp_path):
    config = build(name, dim=16, num_heads=2, bias=True, dropout=0.25).config
    config.to_file(tmp_path / "c.yaml")
    assert type(config).from_file(tmp_path / "c.yaml") == config


@each
def test_states_and_hashes_are_tied_to_name_and_options(name):
    hashes = [build(name, dim=16, num_heads=heads, dropout=p).config_hash for heads in (2, 4) for p in (0.0, 0.5)]
    assert len(set(hashes)) == 4
    assert build(name, dim=16, num_heads=2).config_hash == build(name, dim=16, num_heads=2).config_hash


def test_hashes_of_different_mechanisms_with_equal_options_differ(monkeypatch):
    class One(Attention):
        pass

    class Two(Attention):
        pass

    for cls in (One, Two):
        monkeypatch.setattr(cls, "name", cls.__name__, raising=False)
    config = Attention.Config(dim=16, num_heads=2)
    assert One(config).config_hash != Two(config).config_hash


def test_hashes_of_different_mechanisms_differ():
    assert len({build(name, dim=16, num_heads=2).config_hash for name in NAMES}) == len(NAMES)


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
@settings(max_examples=5, deadline=None)
@given(tokens=st.integers(0, 600))
def test_the_cost_is_that_of_the_layer(name, tokens):
    layer = build(name, dim=16, num_heads=2)
    cost = layer.cost(tokens)
    assert isinstance(cost, Cost)
    assert cost.tokens == tokens
    assert cost.parameters == sum(p.numel() for p in layer.parameters())
    with torch.no_grad():
        state = layer(torch.zeros(1, tokens, 16))[1]
    assert cost.state_bytes == state.nbytes
    assert cost.state_bytes == layer.state_bytes(tokens)
    assert cost.unmasked_entries <= cost.score_entries


@each
def test_a_mask_without_padding_is_no_mask(name):
    layer = build(name, dim=16, num_heads=2).double()
    x = torch.randn(2, 9, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert_exact(
        layer.weights(x, torch.ones(2, 9, dtype=torch.bool)), torch.cat([layer.weights(r) for r in x.split(1)])
    )
    assert layer.weights(x, torch.zeros(2, 9, dtype=torch.bool)).count_nonzero() == 0


def test_a_shared_base_is_not_a_mechanism():
    assert not {BlockedAttention, ScannedAttention, Attention} & set(Attention.registry.values())


def test_a_name_that_is_not_the_files_is_refused():
    before = dict(Attention.registry)
    with pytest.raises(TypeError, match=r"Odd\.name is 'odd' but its file is \w+\.py; use one name for both"):

        class Odd(Attention):
            name = "odd"

    assert Attention.registry == before


def test_a_name_that_is_taken_is_refused(monkeypatch):
    before = dict(Attention.registry)
    match = r"attention 'linear' is already subquad\.attention\.linear\.Linear; give mine\.linear\.Mine another name"
    with pytest.raises(TypeError, match=match):
        type("Mine", (Attention,), {"name": "linear", "__module__": "mine.linear"})
    assert Attention.registry == before


@each
def test_a_class_shows_its_options_and_is_what_build_makes(name):
    cls = mechanism(name)
    shown = inspect.signature(cls).parameters
    assert list(shown) == list(inspect.signature(cls.Config).parameters)
    assert all(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in shown.values())
    made = getattr(subquad.attention, cls.__name__)(dim=16, num_heads=2)
    assert type(made) is cls
    assert made.config == build(name, dim=16, num_heads=2).config == cls.from_config(made.config).config


def test_a_class_has_the_errors_of_build():
    with pytest.raises(ValueError, match="attention 'latte' has no option 'num_latent'; did you mean 'num_latents'"):
        subquad.attention.Latte(dim=16, num_heads=2, num_latent=4)
    with pytest.raises(TypeError, match="num_latents must be int"):
        subquad.attention.Latte(dim=16, num_heads=2, num_latents="4")
    with pytest.raises(ValueError, match="needs the key 'num_heads'"):
        subquad.attention.Latte(dim=16)
