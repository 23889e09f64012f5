import copy
import io
import json
import struct

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from subquad import attention
from subquad.state import FORMAT, UNCHECKED_VERSION, State, advance, appended, weights_hash
from subquad.testing import assert_exact
from tests.models.small import assert_refused


def state():
    layers = [
        State({"seen": 7, "keys": torch.arange(6.0).view(1, 2, 3), "empty": torch.zeros(1, 0)}, "hash-a"),
        State({"seen": torch.tensor([7, 3]), "lse": torch.tensor([-1e30, torch.inf], dtype=torch.float64)}, "hash-b"),
    ]
    return State({"seen": 7, "0": layers[0], "1": layers[1], "half": torch.ones(2, dtype=torch.bfloat16)}, "hash-model")


def assert_same(actual, expected):
    assert isinstance(actual, State)
    assert set(actual) == set(expected)
    assert actual.config_hash == expected.config_hash
    for name in expected:
        a, e = actual[name], expected[name]
        assert type(a) is type(e), name
        if isinstance(e, State):
            assert_same(a, e)
        elif isinstance(e, torch.Tensor):
            assert a.dtype == e.dtype
            assert_exact(a, e, name)
        else:
            assert a == e


@pytest.mark.parametrize("state", [state(), State({}, "hash-model")], ids=["full", "empty"])
def test_a_file_gives_back_the_state(state, tmp_path):
    state.save(tmp_path / "s.safetensors")
    assert_same(State.load(tmp_path / "s.safetensors"), state)
    assert_same(State.load(tmp_path / "s.safetensors", config_hash="hash-model"), state)


def test_views_strides_and_gradients_are_saved_by_value(tmp_path):
    whole = torch.arange(12.0).view(3, 4).requires_grad_()
    shared = {"row": whole[1], "same": whole[1], "other": whole[2]}
    views = State({"transposed": whole.mT, **shared, "expanded": torch.ones(1).expand(5)})
    views.save(tmp_path / "s.safetensors")
    loaded = State.load(tmp_path / "s.safetensors")
    for name in views:
        assert_exact(loaded.tensor(name), views.tensor(name).detach(), name)
        assert not loaded.tensor(name).requires_grad


def test_another_configurations_state_is_refused(tmp_path):
    state().save(tmp_path / "s.safetensors")
    message = "the state was made by configuration 'hash-model' but the model has 'other'; use the model that made it"
    with pytest.raises(ValueError, match=message):
        State.load(tmp_path / "s.safetensors", config_hash="other")
    with pytest.raises(ValueError, match="made by configuration 'hash-model' but this layer has 'other'"):
        state().check("other", "this layer")
    state().check("hash-model", "this layer")


def header(**changes):
    return {"format": FORMAT, "version": str(UNCHECKED_VERSION), "numbers": "{}", "hashes": '{"": "h"}', **changes}


@pytest.mark.parametrize(("metadata", "message"), [
    (header(version="99"), "s has state format version 99; this release reads versions 1 and 2"),
    (header(format="something"), "s is not a subquad state: its format is 'something', not 'subquad-state'"),
    (None, "s is not a subquad state: its format is None, not 'subquad-state'"),
    ({k: v for k, v in header().items() if k != "numbers"}, "s has a damaged header: "),
    (header(numbers="{"), "s has a damaged header: "),
    (header(numbers="[]"), "s has a damaged header: "),
    (header(hashes="{}"), "s has a damaged header: "),
    (header(hashes='{"x/y": "h"}'), "s has a damaged header: "),
    (header(version="2"), "s is damaged: its content does not have the checksum"),
])  # fmt: skip
def test_another_header_is_refused(tmp_path, metadata, message):
    (tmp_path / "s").write_bytes(save({"a": torch.ones(2)}, metadata=metadata))
    with pytest.raises(ValueError, match=message):
        State.load(tmp_path / "s")


def test_truncated_files_and_rubbish_are_refused(tmp_path):
    state().save(tmp_path / "whole")
    data = (tmp_path / "whole").read_bytes()
    headers = (b"[]", b"null", b"{\xff\xff}")
    rubbish = [b"\x00" * 64, b"\xff" * 64, *(struct.pack("<Q", len(header)) + header for header in headers)]
    for damaged in [*rubbish, *(data[:size] for size in [*range(0, len(data) - 1, 23), len(data) - 1])]:
        (tmp_path / "s").write_bytes(damaged)
        with pytest.raises(ValueError, match="s is not a readable state file: "):
            State.load(tmp_path / "s")
    (tmp_path / "s").write_bytes(struct.pack("<Q", 2**40) + b"{}")
    with pytest.raises(ValueError, match=r"s is not a readable state file: .*the header is longer than the file"):
        State.load(tmp_path / "s")


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
def test_a_file_with_one_changed_byte_is_refused(tmp_path, position, flip):
    state().save(tmp_path / "s")
    data = bytearray((tmp_path / "s").read_bytes())
    data[int(position * len(data))] ^= flip
    (tmp_path / "s").write_bytes(data)
    with pytest.raises(ValueError, match=r"s (is not|is damaged|has)\b"):
        State.load(tmp_path / "s")


def test_changed_values_are_refused_by_the_checksum(tmp_path):
    state().save(tmp_path / "s")
    data = bytearray((tmp_path / "s").read_bytes())
    (size,) = struct.unpack("<Q", data[:8])
    metadata = json.loads(data[8 : 8 + size])["__metadata__"]
    assert (metadata["format"], metadata["version"]) == ("subquad-state", "2")
    data[8 + size :: 9] = bytes((byte + 1) % 256 for byte in data[8 + size :: 9])
    (tmp_path / "s").write_bytes(data)
    with pytest.raises(ValueError, match="s is damaged: its content does not have the checksum that it was saved with"):
        State.load(tmp_path / "s")


def test_a_file_of_version_one_is_read_without_a_checksum(tmp_path):
    (tmp_path / "old").write_bytes(save({"a": torch.ones(2)}, metadata=header()))
    assert_exact(State.load(tmp_path / "old").tensor("a"), torch.ones(2))


def test_a_state_of_other_weights_is_refused(tmp_path, caplog):
    torch.manual_seed(0)
    layer = attention.build("linear", dim=8, num_heads=2)
    _, state = layer(torch.randn(1, 5, 8))
    state.save(tmp_path / "s", model=layer)
    assert_same(State.load(tmp_path / "s", model=layer), state)
    other = attention.build("linear", dim=8, num_heads=2)
    with pytest.raises(ValueError, match="s: the state was made by a model of this configuration with other weights"):
        State.load(tmp_path / "s", model=other)
    other.load_state_dict(layer.state_dict())
    assert_same(State.load(tmp_path / "s", model=other), state)
    with pytest.raises(ValueError, match="the state was made by configuration"):
        State.load(tmp_path / "s", model=attention.build("linear", dim=8, num_heads=4))
    state.save(tmp_path / "nameless")
    with caplog.at_level("WARNING", logger="subquad.state"):
        State.load(tmp_path / "nameless", model=other)
    assert "nameless does not name the weights that made it" in caplog.text


def test_the_hash_of_weights_sees_every_value_dtype_and_name():
    layer = torch.nn.Linear(3, 2, dtype=torch.bfloat16)
    layer.register_buffer("scale", torch.tensor(1.0))
    before = weights_hash(layer)
    assert weights_hash(layer) == before
    with torch.no_grad():
        layer.weight[1, 2] += 1
    changed = weights_hash(layer)
    assert changed != before
    assert weights_hash(layer.float()) != changed
    layer.scale.add_(1)
    assert weights_hash(layer) not in (before, changed)


def test_entries_are_read_by_kind():
    s = state()
    assert s.seen == 7
    assert s.child("1").seen.tolist() == [7, 3]
    assert_exact(s.tensor("half"), torch.ones(2, dtype=torch.bfloat16))
    assert "half" in s
    assert "other" not in s
    assert list(s) == ["seen", "0", "1", "half"]
    assert_refused(
        (lambda: s.tensor("seen"), TypeError, "the state's entry 'seen' must be a tensor, got int"),
        (lambda: s.tensor("0"), TypeError, "the state's entry '0' must be a tensor, got State"),
        (lambda: s.child("half"), TypeError, "the state's entry 'half' must be a state, got Tensor"),
        (lambda: State({"seen": s}).seen, TypeError, "the state's entry 'seen' must be a number or a tensor, got Stat"),
    )


def test_nbytes_counts_tensors_of_the_whole_tree():
    entries = {"seen": 3}
    numbers = State(entries)
    entries["seen"] = torch.zeros(4)
    assert numbers.nbytes == 0, "a state keeps its own entries"
    assert state().nbytes == 6 * 4 + 2 * 8 + 2 * 8 + 2 * 2


def test_map_changes_tensors_of_the_whole_tree_and_nothing_else():
    s = state()
    doubled = s.map(lambda x: x * 2)
    assert_exact(doubled.child("0").tensor("keys"), 2 * s.child("0").tensor("keys"))
    assert_exact(doubled.child("1").seen, torch.tensor([14, 6]))
    assert doubled.seen == 7
    assert doubled.child("0").config_hash == "hash-a"
    assert doubled.config_hash == "hash-model"
    assert_same(s, state())


@pytest.mark.parametrize(("seen", "lengths", "expected"), [
    (5, None, 8),
    (torch.tensor([5, 6]), None, torch.tensor([8, 9])),
    (5, torch.tensor([3, 1]), torch.tensor([8, 6])),
    (torch.tensor([5, 6]), torch.tensor([3, 1]), torch.tensor([8, 7])),
])  # fmt: skip
def test_advance_counts_real_tokens(seen, lengths, expected):
    actual = advance(seen, 3, lengths)
    assert type(actual) is type(expected)
    assert torch.as_tensor(actual).tolist() == torch.as_tensor(expected).tolist()


def test_a_file_that_cannot_be_written_leaves_nothing_behind(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        State({"seen": 1}).save(tmp_path / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def cache(tokens: int, start: float = 0.0) -> torch.Tensor:
    return torch.arange(2 * 3 * tokens * 4, dtype=torch.float32).view(2, 3, tokens, 4) + start


@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=6), forks=st.lists(st.integers(0, 5), max_size=3))
def test_what_is_appended_is_the_concatenation_and_leaves_what_was_there(sizes, forks):
    with torch.no_grad():
        known = [cache(5)]
        plain = [known[0].clone()]
        for number, size in enumerate(sizes):
            new = cache(size, 1000.0 * number)
            known.append(appended(known[-1], new))
            plain.append(torch.cat([plain[-1], new], 2))
        for fork in forks:  # a second continuation of an earlier state
            place = min(fork, len(known) - 1)
            new = cache(3, -5.0 * fork)
            known.append(appended(known[place], new))
            plain.append(torch.cat([plain[place], new], 2))
    for one, other in zip(known, plain, strict=True):
        assert_exact(one, other)


def test_a_cache_with_room_behind_it_is_not_copied():
    with torch.no_grad():
        first = appended(cache(5), cache(1))
        second = appended(first, cache(1))
        other = appended(first, cache(1))
        assert second.data_ptr() == first.data_ptr()
        assert other.data_ptr() != first.data_ptr()
        assert appended(first, cache(1).double()).dtype == torch.float64
        spent = [first]
        while spent[-1].data_ptr() == first.data_ptr():
            spent.append(appended(appended(spent[-1], cache(1)), cache(1)))
        assert_exact(spent[-1], torch.cat([spent[-2], cache(1), cache(1)], 2))


def loaded(value):
    """The value, saved and loaded again by torch."""
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=True)


@pytest.mark.parametrize("copied", [copy.deepcopy, loaded])
def test_a_copy_of_a_cache_stands_alone(copied):
    with torch.no_grad():
        first = appended(cache(5), cache(1))
        longer = appended(copied(first), cache(2))
        assert_exact(appended(first, cache(1, 7.0)), torch.cat([first, cache(1, 7.0)], 2))
    assert_exact(longer, torch.cat([first, cache(2)], 2))


def test_gradients_go_through_what_is_appended():
    old, new = cache(5).requires_grad_(), cache(2).requires_grad_()
    appended(old, new).square().sum().backward()
    assert_exact(old.grad, 2 * old.detach())
    assert_exact(new.grad, 2 * new.detach())
    with torch.inference_mode():
        inside = appended(cache(5), cache(1))
    with torch.no_grad():
        outside = appended(inside, cache(1))
    assert outside.data_ptr() != inside.data_ptr()
    assert_exact(outside, torch.cat([inside, cache(1)], 2))
