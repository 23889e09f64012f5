import copy
import hashlib
import io
import json
import struct
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from torch.utils import _pytree as pytree

from subquad import attention
from subquad.ops.caches import advance, appended
from subquad.state import CHECKSUM_DIGITS, FORMAT, FORMAT_VERSION, State, weights_hash
from subquad.testing import assert_exact, assert_same_maths
from tests.models.small import OPTIONS, assert_refused


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
    blank = "0" * CHECKSUM_DIGITS
    own = {"format": FORMAT, "version": str(FORMAT_VERSION), "checksum": blank}
    return {**own, "numbers": "{}", "hashes": '{"": "h"}', **changes}


def sealed(metadata):
    """A file whose checksum is right, whatever else its header says."""
    data = save({"a": torch.ones(2)}, metadata=metadata)
    return data.replace(b"0" * CHECKSUM_DIGITS, hashlib.sha256(data).hexdigest().encode(), 1)


@pytest.mark.parametrize(("metadata", "message"), [
    (header(version="99"), "s has state format version 99; this release reads version 1"),
    (header(format="something"), "s is not a subquad state: its format is 'something', not 'subquad-state'"),
    (None, "s is not a subquad state: its format is None, not 'subquad-state'"),
    ({k: v for k, v in header().items() if k != "numbers"}, "s has a damaged header: "),
    (header(numbers="{"), "s has a damaged header: "),
    (header(numbers="[]"), "s has a damaged header: "),
    (header(hashes="{}"), "s has a damaged header: "),
    (header(hashes='{"x/y": "h"}'), "s has a damaged header: "),
    (header(checksum="1" * CHECKSUM_DIGITS), "s is damaged: its content does not have the checksum"),
    (header(checksum="short"), "s is damaged: its content does not have the checksum"),
])  # fmt: skip
def test_another_header_is_refused(tmp_path, metadata, message):
    (tmp_path / "s").write_bytes(sealed(metadata))
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
    assert (metadata["format"], metadata["version"]) == ("subquad-state", "1")
    data[8 + size :: 9] = bytes((byte + 1) % 256 for byte in data[8 + size :: 9])
    (tmp_path / "s").write_bytes(data)
    with pytest.raises(ValueError, match="s is damaged: its content does not have the checksum that it was saved with"):
        State.load(tmp_path / "s")


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


def test_two_writers_of_one_file_leave_one_of_them_whole(tmp_path):
    file = tmp_path / "shared"

    def save(number, times=25):
        for _ in range(times):
            State({"seen": number, "x": torch.full((1, 4000), float(number))}).save(file)

    save(1, 1)
    with ThreadPoolExecutor(2) as pool:
        writers = [pool.submit(save, number) for number in (1, 2)]
        while not all(writer.done() for writer in writers):
            found = State.load(file)
            assert found.tensor("x").unique().tolist() == [found.seen]
    assert [writer.result() for writer in writers] == [None, None]
    assert list(tmp_path.iterdir()) == [file]


WRITE = """import sys, time, torch
from subquad import State
file, number, until = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
state, saves = State({"seen": number, "x": torch.full((1, 100_000), float(number))}), 0
while time.time() < until:
    state.save(file)
    saves += 1
print(saves)
"""


@pytest.mark.slow
def test_two_processes_that_save_one_state_for_a_minute(tmp_path):
    file, until = tmp_path / "shared", time.time() + 60
    command = [sys.executable, "-c", WRITE, str(file)]
    writers = [
        subprocess.Popen([*command, str(number), str(until)], stdout=subprocess.PIPE, text=True) for number in (1, 2)
    ]
    met = Counter()
    while time.time() < until:
        if file.exists():
            found = State.load(file)
            assert found.tensor("x").unique().tolist() == [found.seen]
            met[found.seen] += 1
    saves = [int(writer.communicate(timeout=60)[0]) for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0]
    assert set(met) == {1, 2}
    assert list(tmp_path.iterdir()) == [file]
    sys.stdout.write(f"saved {saves} times, read {met.total()} times\n")


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


# A state as a thing of PyTorch: a pytree, rows, `torch.load`.


def test_a_tree_gives_back_the_state_and_its_keys():
    leaves, spec = pytree.tree_flatten_with_path(state())
    assert_same(pytree.tree_unflatten([leaf for _, leaf in leaves], spec), state())
    assert pytree.keystr(leaves[1][0]) == "['0']['seen']"
    assert isinstance(leaves[1][1], torch.Tensor), "a number is a tensor there"
    half = pytree.tree_map(lambda x: x.half() if x.is_floating_point() else x, state())
    assert half.child("0").tensor("keys").dtype == torch.float16
    assert half.child("0").seen == 7
    with pytest.raises(ValueError, match=r"counts are whole numbers, got torch.bfloat16"):
        pytree.tree_map(lambda x: x.bfloat16(), rows(5, seen=1001))
    loaded = pytree.treespec_loads(pytree.treespec_dumps(spec))
    assert_same(pytree.tree_unflatten([leaf for _, leaf in leaves], loaded), state())
    assert pytree.tree_structure(state()) != pytree.tree_structure(state().without("0"))


def test_a_count_without_a_dimension_is_saved_as_a_number(tmp_path):
    rows(5, seen=torch.tensor(4)).save(tmp_path / "s.safetensors")
    assert_same(State.load(tmp_path / "s.safetensors"), rows(5, seen=4))


def test_torch_loads_a_state_without_running_code():
    file = io.BytesIO()
    torch.save({"states": [state()]}, file)
    file.seek(0)
    assert_same(torch.load(file, weights_only=True)["states"][0], state())


def test_a_detached_state_has_no_graph():
    whole = state().map(lambda x: x.float().requires_grad_())
    assert all(x.requires_grad for x in whole.tensors())
    assert not any(x.requires_grad for x in whole.detach().tensors())


def rows(*numbers, seen):
    keys = torch.tensor([[float(n)] * 3 for n in numbers]).view(len(numbers), 1, 3)
    return State({"seen": seen, "0": State({"seen": seen, "keys": keys}, "layer")}, "model")


@pytest.mark.parametrize(
    "chosen", [[2, 0, 0], (2, 0, 0), torch.tensor([2, 0, 0]), torch.tensor([2, 0, 0], dtype=torch.int32)]
)
def test_rows_are_chosen_in_any_order(chosen):
    assert_same(rows(5, 6, 7, seen=4).select(chosen), rows(7, 5, 5, seen=4))
    whole = rows(5, 6, 7, seen=torch.tensor([1, 2, 3]))
    assert_same(whole.select(chosen), rows(7, 5, 5, seen=torch.tensor([3, 1, 1])))


def test_rows_are_removed_by_bools():
    assert_same(rows(5, 6, 7, seen=4).select([True, False, True]), rows(5, 7, seen=4))
    assert rows(5, 6, seen=4).select([]).batch == 0


@pytest.mark.parametrize("chosen", [[0.5], torch.ones(1, 1, dtype=torch.long), [True], torch.tensor(0)])
def test_rows_that_are_none_are_refused(chosen):
    with pytest.raises(ValueError, match="rows must be whole numbers or a bool for each of the 2 rows"):
        rows(5, 6, seen=4).select(chosen)


@pytest.mark.parametrize("chosen", [range(1, 3), slice(1, 3), slice(1, None), slice(-2, 9)])
def test_neighbouring_rows_are_chosen(chosen):
    assert_same(rows(5, 6, 7, seen=4).select(chosen), rows(6, 7, seen=4))


def test_states_are_joined_row_by_row():
    assert_same(State.cat([rows(5, 6, seen=4), rows(7, seen=4)]), rows(5, 6, 7, seen=4))
    joined = State.cat([rows(5, 6, seen=4), rows(7, seen=9)])
    assert_same(joined, rows(5, 6, 7, seen=torch.tensor([4, 4, 9])))
    by_row = rows(5, seen=4).with_counts_by_row()
    assert_same(by_row, rows(5, seen=torch.tensor([4])))
    assert_same(State.cat([by_row, rows(7, seen=9)]), rows(5, 7, seen=torch.tensor([4, 9])))


def test_states_that_do_not_belong_together_are_refused():
    for states, kinds in (([], ""), ([rows(5, seen=4), None], "State, NoneType"), (rows(5, seen=4), "str, str")):
        with pytest.raises(ValueError, match=rf"cat needs a list of one or more states, got \[{kinds}\]"):
            State.cat(states)
    with pytest.raises(ValueError, match="states of one configuration can be joined, got a, b"):
        State.cat([State({"seen": 1}, "a"), State({"seen": 1}, "b")])
    with pytest.raises(ValueError, match="states with the same refill can be joined, got 1, 2"):
        State.cat([State({"seen": 1, "refill": 1}), State({"seen": 1, "refill": 2})])


@pytest.mark.parametrize("name", ["elita", "gla", "llp", "longformer", "luna", "window"])
def test_joined_rows_are_as_each_alone(name):
    layer = attention.build(name, dim=8, num_heads=2, **OPTIONS.get(name, {})).double().eval()
    texts = [torch.randn(1, n, 8, dtype=torch.double) for n in (3, 11, 7)]
    with torch.no_grad():
        states = [layer(x)[1] for x in texts]
        x = torch.randn(3, 2, 8, dtype=torch.double)
        y, joined = layer(x, State.cat(states))
        y_left, _ = layer(x[[2, 0]], joined.select([2, 0]))
        for i, state in enumerate(states):
            alone, after = layer(x[i : i + 1], state)
            assert_same_maths(y[i : i + 1], alone, f"row {i}")
            if i != 1:
                at = [2, 0].index(i)
                assert_same_maths(y_left[at : at + 1], layer(x[i : i + 1], after)[0], f"row {i} goes on")
