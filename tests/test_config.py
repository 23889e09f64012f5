import copy
import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subquad.config import Config, digest, read_mapping, suggest


@dataclass(frozen=True, kw_only=True)
class Inner(Config):
    width: int = 4
    name: str = "x"


@dataclass(frozen=True, kw_only=True)
class Outer(Config):
    size: int
    rate: float = 0.5
    on: bool = False
    mode: Literal["fast", "slow", 3] = "fast"
    pair: tuple[int, ...] = (1, 2)
    items: list[Inner] = field(default_factory=list)
    inner: Inner = Inner()
    maybe: int | None = None
    either: int | Inner = 1
    options: dict[str, int] = field(default_factory=dict)
    anything: Any = None


@dataclass(frozen=True, kw_only=True)
class Checked(Config):
    size: int = 1

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size must be at least 1, got {self.size}")


FULL = Outer(
    size=3, rate=1e-30, on=True, mode=3, pair=(5,), items=[Inner(width=9), Inner(name="null")],
    inner=Inner(width=7, name="äß: - #"), maybe=2, either=Inner(width=8), options={"a": 1},
    anything={"k": [1, None, "text"]},
)  # fmt: skip


@pytest.mark.parametrize("suffix", [".yaml", ".yml", ".json"])
@pytest.mark.parametrize("config", [FULL, Outer(size=1)], ids=["full", "defaults"])
def test_a_file_gives_back_what_was_written(tmp_path, suffix, config):
    path = tmp_path / f"config{suffix}"
    config.to_file(path)
    again = Outer.from_file(path)
    assert again == config
    assert type(again.pair) is tuple
    assert all(type(item) is Inner for item in again.items)
    again.to_file(tmp_path / f"again{suffix}")
    assert (tmp_path / f"again{suffix}").read_bytes() == path.read_bytes()
    if suffix == ".json":
        assert json.loads(path.read_text(encoding="utf-8")) == config.to_dict()


@settings(max_examples=50)
@given(
    width=st.integers(-(2**63), 2**63),
    name=st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=20),
    rate=st.floats(allow_nan=False),
    maybe=st.none() | st.integers(-(2**63), 2**64 - 1),
)
def test_any_values_survive_a_round_trip(tmp_path_factory, width, name, rate, maybe):
    config = Outer(size=1, rate=rate, maybe=maybe, inner=Inner(width=width, name=name))
    folder = tmp_path_factory.mktemp("configs")
    for suffix in ("yaml", "json"):
        config.to_file(folder / f"c.{suffix}")
        assert Outer.from_file(folder / f"c.{suffix}") == config


def test_an_integer_may_stand_for_a_float_and_a_configuration_for_its_values():
    inner = Inner(width=9)
    made = Outer.from_dict({"size": 1, "rate": 2, "inner": inner})
    assert (made.rate, type(made.rate)) == (2.0, float)
    assert made.inner is inner


@pytest.mark.parametrize("written", ["1e-4", "1.0e-4", "0.0001", "+1E-04"])
def test_a_float_may_be_written_with_an_exponent_in_yaml(tmp_path, written):
    (tmp_path / "c.yaml").write_text(f"size: 1\nrate: {written}\n", encoding="utf-8")
    assert Outer.from_file(tmp_path / "c.yaml").rate == 1e-4


@pytest.mark.parametrize(("values", "message"), [
    ({"size": 1, "raet": 1.0}, r"^Outer has no key 'raet'; did you mean 'rate'\? valid: anything, either, inner, "),
    ({"size": 1, "inner": {"widht": 1}}, r"^Inner has no key 'inner.widht'; did you mean 'width'\? valid: name, widt"),
    ({"size": 1, "items": [{}, {"nmae": "y"}]}, r"^Inner has no key 'items\[1\].nmae'; did you mean 'name'"),
    ({"size": 1, 7: 1}, "^Outer has no key '7'; valid: anything, "),
    ({}, "^Outer needs the key 'size'$"),
    ({"size": 1, "mode": "fats"},
     r"^mode must be one of its choices, got 'fats'; did you mean 'fast'\? valid: 3, fast, slow$"),
])  # fmt: skip
def test_wrong_keys_and_choices_are_answered_with_the_valid_ones(values, message):
    with pytest.raises(ValueError, match=message):
        Outer.from_dict(values)
    if not values:
        with pytest.raises(ValueError, match=r"^Outer needs the key 'run\.model\.size'$"):
            Outer.from_dict({}, where="run.model")


def test_a_constructor_names_an_unknown_keyword_and_copies_need_none():
    with pytest.raises(TypeError, match=r"^Outer has no key 'raet'; did you mean 'rate'\? valid: anything, either, "):
        Outer(size=1, raet=1.0)
    with pytest.raises(TypeError, match=r"^Inner has no key 'wide'; did you mean 'width'\?"):
        Inner().replace(wide=1)
    assert copy.deepcopy(FULL) == FULL


@dataclass(frozen=True, kw_only=True)
class Wide(Config):
    dim: int = 4
    num_kv_heads: int = 1


@pytest.mark.parametrize(("key", "hint"), [
    ("hidden_size", r"did you mean 'dim'\?"), ("n_embd", r"did you mean 'dim'\?"),
    ("num_key_value_heads", r"did you mean 'num_kv_heads'\?"),
    ("rope_theta", "valid: dim, num_kv_heads"),  # rope_base is no field of this one
    ("num_experts", r"there is no mixture of experts \(docs/limits\.md\); valid: "),
])  # fmt: skip
def test_names_of_other_libraries_are_answered_with_ours(key, hint):
    with pytest.raises(TypeError, match=f"^Wide has no key '{key}'; {hint}"):
        Wide(**{key: 3})
    with pytest.raises(ValueError, match=rf"^Wide has no key 'model\.{key}'; {hint}"):
        Wide.from_dict({key: 3}, where="model")
    assert suggest(f"model.{key}", ["model.dim"]).startswith("did you mean 'model.dim'? ") == ("'dim'" in hint)


@pytest.mark.parametrize(("values", "message"), [
    ({"size": "3"}, "^size must be int, got '3'$"),
    ({"size": 3.0}, r"^size must be int, got 3\.0$"),
    ({"size": True}, "^size must be int, got True$"),
    ({"size": 1, "rate": "fast"}, "^rate must be float, got 'fast'$"),
    ({"size": 1, "on": 1}, "^on must be bool, got 1$"),
    ({"size": 1, "pair": "12"}, "^pair must be tuple, got '12'$"),
    ({"size": 1, "pair": [1, "2"]}, r"^pair\[1\] must be int, got '2'$"),
    ({"size": 1, "items": {"width": 1}}, "^items must be list, got {'width': 1}$"),
    ({"size": 1, "items": [3]}, r"^items\[0\] must be a mapping, got 3$"),
    ({"size": 1, "inner": 5}, "^inner must be a mapping, got 5$"),
    ({"size": 1, "inner": {"width": "w"}}, r"^inner\.width must be int, got 'w'$"),
    ({"size": 1, "maybe": "none"}, r"^maybe must be int \| None, got 'none'$"),
    ({"size": 1, "options": {"a": "b"}}, r"^options\.a must be int, got 'b'$"),
    ({"size": 1, "anything": {"k": [1, {2}]}}, r"^anything\.k\[1\] must be a number, .*, got set: \{2\}$"),
    ({"size": 1, "anything": b"x"}, r"^anything must be a number, .*, got bytes: b'x'$"),
    ([("size", 1)], r"^Outer must be a mapping, got \[\('size', 1\)\]$"),
])  # fmt: skip
def test_wrong_types_are_refused_with_the_full_path(values, message):
    with pytest.raises(TypeError, match=message):
        Outer.from_dict(values)


@pytest.mark.parametrize(("size", "bits"), [(-(2**63) - 1, 64), (2**64, 65)])
def test_a_whole_number_that_no_other_program_holds_is_refused(size, bits):
    with pytest.raises(ValueError, match=rf"^size must lie between -2\^63 and 2\^64 - 1, got .* of {bits} bits$"):
        Outer.from_dict({"size": size})


def test_checks_of_a_class_run_on_reading_and_replacing():
    with pytest.raises(ValueError, match="size must be at least 1, got 0"):
        Checked.from_dict({"size": 0})
    with pytest.raises(ValueError, match="size must be at least 1, got -1"):
        Checked().replace(size=-1)
    assert Checked().replace(size=5) == Checked(size=5)


def test_a_configuration_is_frozen_and_takes_keywords_only():
    with pytest.raises(dataclasses.FrozenInstanceError, match="size"):
        Checked().size = 2
    with pytest.raises(TypeError, match="positional"):
        Checked(2)


def test_the_digest_is_stable_across_releases_and_differs_when_any_value_differs():
    assert Inner().digest() == digest({"width": 4, "name": "x"}) == "c4520229e8a02f3c"
    changes = [{"size": 2}, {"rate": 0.25}, {"on": True}, {"pair": (1,)}, {"inner": Inner(width=5)}, {"maybe": 0}]
    base = Outer(size=1)
    assert len({base.digest(), *(base.replace(**change).digest() for change in changes)}) == len(changes) + 1
    assert base.replace(size=1).digest() == base.digest()


@pytest.mark.parametrize(("name", "content", "message"), [
    ("a.yaml", b"a: [1", r"a\.yaml is not valid YAML: "),
    ("a.yaml", b"\xff\xfe\x00binary", r"a\.yaml is not UTF-8 text: byte 0 is 0xff"),
    ("a.yaml", b"a: !!python/object/apply:os.getcwd []", r"a\.yaml is not valid YAML: "),
    ("a.yaml", b"", r"a\.yaml must hold a mapping of keys to values, got NoneType"),
    ("a.yaml", b"- a\n- b\n", r"a\.yaml must hold a mapping of keys to values, got list"),
    ("a.json", b"{'a': 1}", r"a\.json is not JSON: "),
])  # fmt: skip
def test_a_file_that_cannot_be_read_is_named(tmp_path, name, content, message):
    with pytest.raises(FileNotFoundError, match=name):
        read_mapping(tmp_path / name)
    (tmp_path / name).write_bytes(content)
    for read in (read_mapping, Outer.from_file):
        with pytest.raises(ValueError, match=message):
            read(tmp_path / name)


def test_suggest_names_the_nearest_first_and_a_few_of_many():
    assert suggest("windwo", ["window", "full"]) == "did you mean 'window'? valid: full, window"
    assert suggest("zzz", ["window", "full"]) == "valid: full, window"
    many = [f"name{i}" for i in range(21)]
    assert suggest("zzz", many[1:]).count("name") == 20
    few = suggest("name7x", many)
    assert few.startswith("did you mean 'name7'? valid: name7, ")
    assert few.count("name") == 9
    assert few.endswith(" and 13 more")
