"""The state of a causal mechanism or model: the memory of the tokens that it has read."""

from __future__ import annotations

import hashlib
import json
import logging
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from subquad.disk import write_atomically
from subquad.parsing import decoded, parse_json
from subquad.tracing import has_values

logger = logging.getLogger(__name__)

FORMAT = "subquad-state"
FORMAT_VERSION = 1
CHECKSUM_DIGITS = 64
COUNTS = ("seen", "start")
"""Entries that count the tokens of one sequence; all other numbers of a state belong to the model."""


class State:
    """A named tree of tensors (batch first), integers and nested states. Never changed in place.

    `seen` holds how many real tokens were read: an `int` where all rows agree, else a `[B]` tensor. `config_hash` ties
    a state to the configuration of the layer or model that made it.

    A state is a pytree: `torch.export` takes it as an input, `torch.func.vmap` maps over it. There its integers are
    tensors without a dimension, so that an exported step does not hold them as constants.
    """

    def __init__(self, entries: Mapping[str, Tensor | int | State], config_hash: str = "") -> None:
        self.entries = dict(entries)
        self.config_hash = config_hash

    def __getitem__(self, name: str) -> Tensor | int | State:
        return self.entries[name]

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def tensor(self, name: str) -> Tensor:
        """Return the entry `name`, which must be a tensor."""
        entry = self.entries[name]
        if not isinstance(entry, Tensor):
            raise TypeError(f"the state's entry {name!r} must be a tensor, got {type(entry).__name__}")
        return entry

    def child(self, name: str) -> State:
        """Return the entry `name`, which must be a state."""
        entry = self.entries[name]
        if not isinstance(entry, State):
            raise TypeError(f"the state's entry {name!r} must be a state, got {type(entry).__name__}")
        return entry

    @property
    def seen(self) -> int | Tensor:
        """Real tokens read so far: an `int`, or a `[B]` tensor if rows differ."""
        entry = self.entries["seen"]
        if isinstance(entry, State):
            raise TypeError("the state's entry 'seen' must be a number or a tensor, got State")
        return entry

    @property
    def nbytes(self) -> int:
        """Total bytes of all tensors in the tree."""
        return sum(tensor.nbytes for tensor in self.tensors())

    @property
    def batch(self) -> int | None:
        """Number of sequences, by the first tensor; None without tensors."""
        for entry in self.entries.values():  # a plain loop: each layer asks in each decoding step
            if isinstance(entry, State):
                found = entry.batch
            else:
                found = entry.shape[0] if isinstance(entry, Tensor) and entry.ndim else None
            if found is not None:
                return found
        return None

    def tensors(self) -> Iterator[Tensor]:
        """Yield all tensors of the tree."""
        for entry in self.entries.values():
            if isinstance(entry, State):
                yield from entry.tensors()
            elif isinstance(entry, Tensor):
                yield entry

    def without(self, name: str) -> State:
        """Return the state without one of its entries."""
        return State({key: entry for key, entry in self.entries.items() if key != name}, self.config_hash)

    def to(self, device: torch.device | str) -> State:
        """Return the state on another device."""
        return self.map(lambda tensor: tensor.to(device))

    def map(self, fn: Callable[[Tensor], Tensor]) -> State:
        """Return the state with `fn` applied to each tensor."""
        changed = {
            name: entry.map(fn) if isinstance(entry, State) else fn(entry) if isinstance(entry, Tensor) else entry
            for name, entry in self.entries.items()
        }
        return State(changed, self.config_hash)

    def detach(self) -> State:
        """Return the state without the graph that made it."""
        return self.map(Tensor.detach)

    def select(self, rows: Tensor | Sequence[int] | Sequence[bool] | slice) -> State:
        """Return the state of some rows: their numbers in any order, also repeated, a slice, or a bool for each row.

        Raises `ValueError` for anything else than whole numbers or `[B]` bools in one dimension.
        """
        index = torch.arange(self.batch or 0)[rows] if isinstance(rows, slice) else torch.as_tensor(rows)
        if index.numel() == 0 and not isinstance(rows, Tensor):
            index = index.long()
        whole = not (index.is_floating_point() or index.is_complex() or index.dtype == torch.bool)
        if index.ndim != 1 or not (whole or (index.dtype == torch.bool and self.batch in (None, len(index)))):
            raise ValueError(
                f"rows must be whole numbers or a bool for each of the {self.batch} rows, in one dimension, "
                f"got {index.dtype} {tuple(index.shape)}"
            )
        return self.map(lambda x: x[index.to(x.device)] if x.ndim else x)

    @staticmethod
    def cat(states: Sequence[State]) -> State:
        """Return the state of all rows of `states`, in their order.

        The states are of one model, and their rows may have read different numbers of tokens: keys and values are
        aligned at their ends, and the entries before a row's first token are never read. Raises `ValueError` for no
        states, and for states of different configurations or decoding modes.
        """
        states = list(states)
        if not states or not all(isinstance(state, State) for state in states):
            kinds = ", ".join(type(state).__name__ for state in states)
            raise ValueError(f"cat needs a list of one or more states, got [{kinds}]")
        return _cat(states, any(len({state.entries.get(name) for state in states}) > 1 for name in COUNTS))

    def with_counts_by_row(self) -> State:
        """Return the state with its counts as tensors `[B]`, also where all rows agree."""
        return _cat([self], True)

    def check(self, config_hash: str, owner: str, batch: int | None = None) -> None:
        """Raise `ValueError` if another configuration made the state, or (with `batch`) it has another batch size."""
        if self.config_hash != config_hash:
            raise ValueError(
                f"the state was made by configuration {self.config_hash!r} but {owner} has {config_hash!r}; "
                "use the model that made it"
            )
        have = self.batch
        if batch is not None and have is not None and have != batch:
            raise ValueError(f"the state holds {have} sequences but {owner} was given {batch}")

    def save(self, path: str | Path, *, model: nn.Module | None = None) -> None:
        """Write a safetensors file whose header has the format version, the configuration's hash and a checksum.

        With `model`, the layer or model that made the state, the file also names its weights, and `load` with a model
        of other weights refuses it.
        """
        from safetensors.torch import save

        tensors: dict[str, Tensor] = {}
        numbers: dict[str, int] = {}
        hashes: dict[str, str] = {}
        _flatten(self, "", tensors, numbers, hashes)
        blank = "0" * CHECKSUM_DIGITS
        header = {
            "format": FORMAT,
            "version": str(FORMAT_VERSION),
            "numbers": json.dumps(numbers),
            "hashes": json.dumps(hashes),
            "checksum": blank,
        }
        if model is not None:
            header["weights"] = weights_hash(model)
        data = save(tensors, metadata=header)
        # The checksum is that of the file with zeros in the checksum's own place.
        data = data.replace(blank.encode(), hashlib.sha256(data).hexdigest().encode(), 1)
        write_atomically(Path(path), data)

    @classmethod
    def load(cls, path: str | Path, *, config_hash: str | None = None, model: nn.Module | None = None) -> State:
        """Read a file that `save` wrote.

        With `model`, its configuration and its weights must be those that made the state; `config_hash` checks a
        configuration alone. Raises `ValueError` if the file isn't a state, a byte was changed, it has another format
        version, or it belongs to another configuration or other weights.
        """
        from safetensors.torch import load

        data = Path(path).read_bytes()
        try:
            header = _header(data)
            tensors = load(data)
        except Exception as error:  # the header names any dtype and shape, and safetensors does not check them all
            raise ValueError(
                f"{path} is not a readable state file: it is cut off, damaged or of another kind ({error})"
            ) from error
        if header.get("format") != FORMAT:
            raise ValueError(f"{path} is not a subquad state: its format is {header.get('format')!r}, not {FORMAT!r}")
        if header.get("version") != str(FORMAT_VERSION):
            raise ValueError(
                f"{path} has state format version {header.get('version')}; this release reads version {FORMAT_VERSION}"
            )
        _check_checksum(data, header, path)
        try:
            numbers, hashes = (parse_json(header[name], name) for name in ("numbers", "hashes"))
            _check_tree(tensors, numbers, hashes)
            state = _nest(tensors, numbers, hashes)
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} has a damaged header: {error!r}") from error
        expected = config_hash if model is None else getattr(model, "config_hash", config_hash)
        if expected is not None:
            try:
                state.check(expected, "the model")
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from error
        if model is not None:
            _check_weights(header, model, path)
        return state


def check_is_state(state: object) -> None:
    """Raise `TypeError` unless `state` is a `State` or None. The error says how to give a mask, a likely mistake."""
    if state is not None and not isinstance(state, State):
        raise TypeError(
            f"state must be a State that an earlier call returned, got {type(state).__name__}; give a mask by its "
            "name: layer(x, mask=mask)"
        )


def fitted(entry: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return `entry` `[B, ...]` with `shape` after B: cut each dimension, or pad it with zeros, at the front."""
    for dim, size in enumerate(shape, 1):
        extra = size - entry.shape[dim]
        if extra < 0:
            entry = entry.narrow(dim, -extra, size)
        elif extra > 0:
            zeros = entry.new_zeros((*entry.shape[:dim], extra, *entry.shape[dim + 1 :]))
            entry = torch.cat([zeros, entry], dim)
    return entry


def _cat(states: Sequence[State], by_row: bool) -> State:
    """Join states; with `by_row` counts become tensors `[B]`, on the device of the states' other tensors."""
    device = next((x.device for state in states for x in state.tensors()), None)
    batches = [1 if state.batch is None else state.batch for state in states]
    return _joined(states, batches, torch.zeros(1, dtype=torch.long, device=device) if by_row else None)


def _joined(states: Sequence[State], batches: Sequence[int], count_1: Tensor | None) -> State:
    """Join states of `batches` rows; counts become tensors like `count`, if it is given."""
    if len(hashes := {state.config_hash for state in states}) > 1:
        raise ValueError(f"states of one configuration can be joined, got {', '.join(sorted(hashes))}")
    entries: dict[str, Tensor | int | State] = {}
    for name in dict.fromkeys(name for state in states for name in state.entries):
        found = [state.entries.get(name) for state in states]
        like = next(entry for entry in found if entry is not None)
        if isinstance(like, int) and name in COUNTS and count_1 is not None:
            like = count_1
        if isinstance(like, State):
            children = [entry if isinstance(entry, State) else State({}, like.config_hash) for entry in found]
            entries[name] = _joined(children, batches, count_1)
        elif isinstance(like, Tensor):
            rows = [_rows(entry, batch, like) for entry, batch in zip(found, batches, strict=True)]
            shape = tuple(max(sizes) for sizes in zip(*(row.shape[1:] for row in rows), strict=True))
            entries[name] = torch.cat([fitted(row, shape) for row in rows])
        elif any(entry not in (None, like) for entry in found):
            raise ValueError(f"states with the same {name} can be joined, got {', '.join(map(str, found))}")
        else:
            entries[name] = like
    return State(entries, states[0].config_hash)


def _rows(entry: Tensor | int | State | None, batch: int, like: Tensor) -> Tensor:
    """Return the `batch` rows of an entry: a tensor as it is, a number for each, None as zeros."""
    if isinstance(entry, Tensor):
        return entry.to(like.device, like.dtype) if entry.ndim else entry.to(like.device).expand(batch)
    if entry is None:
        return like.new_zeros((batch, *like.shape[1:]))
    assert isinstance(entry, int)
    return like.new_full((batch,), entry)


def weights_hash(model: nn.Module) -> str:
    """Return sixteen hexadecimal digits that differ when any parameter or saved buffer of `model` differs.

    Every weight is read once: about a second for 1 GiB on a CPU.
    """
    found = hashlib.sha256()
    tied: set[int] = set()
    for name, tensor in sorted(model.state_dict(keep_vars=True).items()):
        if id(tensor) in tied:
            continue
        tied.add(id(tensor))
        values = tensor.detach().to("cpu").contiguous().reshape(-1)
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        found.update(str(zlib.crc32(memoryview(values.view(torch.uint8).numpy()))).encode())
    return found.hexdigest()[:16]


def _check_checksum(data: bytes, header: Mapping[str, str], path: str | Path) -> None:
    """Raise `ValueError` if `data` doesn't match its checksum."""
    checksum = header.get("checksum")
    if isinstance(checksum, str) and len(checksum) == CHECKSUM_DIGITS:
        blank = data.replace(checksum.encode(), b"0" * CHECKSUM_DIGITS, 1)
        if hashlib.sha256(blank).hexdigest() == checksum:
            return
    raise ValueError(f"{path} is damaged: its content does not have the checksum that it was saved with")


def _check_weights(header: Mapping[str, str], model: nn.Module, path: str | Path) -> None:
    """Raise `ValueError` if the file names other weights than those of `model`."""
    if "weights" not in header:
        logger.warning("%s does not name the weights that made it: they are not checked", path)
        return
    weights = weights_hash(model)
    if header["weights"] != weights:
        raise ValueError(
            f"{path}: the state was made by a model of this configuration with other weights "
            f"({header['weights']}, this model has {weights}); use the model that made it, in its dtype"
        )


def _header(data: bytes) -> dict[str, str]:
    (size,) = struct.unpack("<Q", data[:8])
    if size > len(data):
        raise ValueError("the header is longer than the file")
    header = parse_json(decoded(data[8 : 8 + size], "the header"), "the header")
    metadata = header.get("__metadata__") if isinstance(header, dict) else None
    return metadata if isinstance(metadata, dict) else {}


def _flatten(state: State, prefix: str, tensors: dict, numbers: dict, hashes: dict) -> None:
    hashes[prefix] = state.config_hash
    for name, entry in state.entries.items():
        path = f"{prefix}/{name}" if prefix else name
        if isinstance(entry, State):
            _flatten(entry, path, tensors, numbers, hashes)
        elif isinstance(entry, Tensor) and entry.ndim:
            # A copy, since safetensors refuses tensors that share memory.
            tensors[path] = entry.detach().clone(memory_format=torch.contiguous_format)
        else:
            numbers[path] = int(entry)


def _check_tree(tensors: Mapping[str, Tensor], numbers: Mapping[str, int], hashes: Mapping[str, str]) -> None:
    """Raise `ValueError` for entries that `save` never writes."""
    if not all(type(number) is int for number in numbers.values()) or not all(
        isinstance(config_hash, str) for config_hash in hashes.values()
    ):
        raise ValueError("numbers must be whole numbers and hashes texts")
    if flat := sorted(name for name, tensor in tensors.items() if not tensor.ndim):
        raise ValueError(f"tensors have the batch first, and {flat[0]} has no dimension")
    names = [*tensors, *numbers, *(path for path in hashes if path)]
    if len(names) != len(set(names)):
        raise ValueError("two entries have one name")


def _nest(tensors: Mapping[str, Tensor], numbers: Mapping[str, int], hashes: Mapping[str, str]) -> State:
    states = {path: State({}, config_hash) for path, config_hash in hashes.items()}
    for path in sorted(states, key=lambda path: path.count("/")):
        if path:
            parent, _, name = path.rpartition("/")
            states[parent].entries[name] = states[path]
    entries: dict[str, Tensor | int] = {**tensors, **numbers}
    for path, entry in entries.items():
        parent, _, name = path.rpartition("/")
        states[parent].entries[name] = entry
    return states[""]


Constant = tuple[tuple[str, ...], str]
"""What is constant in a state as a pytree: the names of its children, and its configuration's hash."""


def _leaves(state: State) -> tuple[list[Any], Constant]:
    return [number_to_leaf(entry) for entry in state.entries.values()], (tuple(state.entries), state.config_hash)


def _named_leaves(state: State) -> tuple[list[tuple[Any, Any]], Constant]:
    leaves, constant = _leaves(state)
    return [(pytree.MappingKey(name), leaf) for name, leaf in zip(constant[0], leaves, strict=True)], constant


def _from_leaves(leaves: Iterable[Any], constant: Constant) -> State:
    names, config_hash = constant
    return State({name: leaf_to_number(leaf) for name, leaf in zip(names, leaves, strict=True)}, config_hash)


def _constant_of(text: str) -> Constant:
    names, config_hash = parse_json(text, "a state's names")
    return tuple(names), config_hash


def number_to_leaf(entry: Any) -> Any:
    """Return a number as a pytree has it, a tensor without a dimension; anything else as it is."""
    return torch.tensor(entry, device="cpu") if isinstance(entry, int) else entry


def leaf_to_number(leaf: Any) -> Any:
    """Undo `number_to_leaf`, but where the value of a tensor is not known: in an exported step, or inside `vmap`."""
    if not isinstance(leaf, Tensor) or leaf.ndim or not has_values(leaf):
        return leaf
    if leaf.is_floating_point() or leaf.is_complex():
        raise ValueError(f"a state's counts are whole numbers, got {leaf.dtype}: cast its floating-point tensors alone")
    return int(leaf)


pytree.register_pytree_node(
    State,
    _leaves,
    _from_leaves,
    serialized_type_name="subquad.State",
    to_dumpable_context=json.dumps,
    from_dumpable_context=_constant_of,
    flatten_with_keys_fn=_named_leaves,
)
torch.serialization.add_safe_globals([State])  # for `torch.load` of a state, and of what holds one
