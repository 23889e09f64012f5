"""The state of a causal mechanism or model: what it remembers of the tokens it has read."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import struct
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from subquad.parsing import decoded, parse_json

logger = logging.getLogger(__name__)

FORMAT = "subquad-state"
FORMAT_VERSION = 2
UNCHECKED_VERSION = 1
"""The format version without checksums, which is still read."""
CHECKSUM_DIGITS = 64
SPARE, LEAST_SPARE = 8, 16
"""Spare room of a growing cache: one token more for each of these, and at least this many."""


class State:
    """A named tree of tensors (batch first), integers and nested states. Never changed in place.

    `seen` holds how many real tokens were read: an `int` where all rows agree, else a `[B]` tensor. `config_hash` ties
    a state to the configuration of the layer or model that made it.
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
        return sum(entry.nbytes for entry in self.entries.values() if not isinstance(entry, int))

    @property
    def batch(self) -> int | None:
        """Number of sequences, by the first tensor; None without tensors."""
        for entry in self.entries.values():
            found = entry.batch if isinstance(entry, State) else entry.shape[0] if isinstance(entry, Tensor) else None
            if found is not None:
                return found
        return None

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
        aside = Path(f"{path}.tmp")
        try:
            aside.write_bytes(data)
            os.replace(aside, path)
        except OSError:
            aside.unlink(missing_ok=True)
            raise

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
        if header.get("version") not in (str(UNCHECKED_VERSION), str(FORMAT_VERSION)):
            raise ValueError(
                f"{path} has state format version {header.get('version')}; "
                f"this release reads versions {UNCHECKED_VERSION} and {FORMAT_VERSION}"
            )
        if header["version"] != str(UNCHECKED_VERSION) or "checksum" in header:
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
            f"({header['weights']}, this model has {weights}); use the model that made it"
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
        elif isinstance(entry, Tensor):
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


def appended(old_BGNK: Tensor, new_BGTK: Tensor, /) -> Tensor:
    """Return `cat([old, new], 2)`; without gradients, copy `old` only if the memory behind it is in use.

    Copying a cache for every token would cost as much again as reading it. The result has spare room behind it, and the
    first continuation writes there: `old` itself never changes, and a second continuation of the same state copies.
    """
    N, S = old_BGNK.shape[2], old_BGNK.shape[2] + new_BGTK.shape[2]
    recorded = torch.compiler.is_compiling() or type(new_BGTK) is not Tensor
    if torch.is_grad_enabled() or recorded or S == N or old_BGNK.dtype != new_BGTK.dtype:
        return torch.cat([old_BGNK.to(new_BGTK.dtype), new_BGTK], 2)
    room: _Room | None = _ROOMS.get(old_BGNK)
    if room is None or not room.claim(N, S):
        room = _Room(new_BGTK.new_empty(*old_BGNK.shape[:2], S + max(LEAST_SPARE, S // SPARE), old_BGNK.shape[3]), S)
        room.buffer[:, :, :N] = old_BGNK
    room.buffer[:, :, N:S] = new_BGTK
    all_BGSK: Tensor = room.buffer[:, :, :S]
    _ROOMS[all_BGSK] = room
    return all_BGSK


class _Room:
    """A buffer whose first `used` slots along dimension 2 are in use."""

    def __init__(self, buffer: Tensor, used: int) -> None:
        self.buffer = buffer
        self.used = used
        self.lock = threading.Lock()

    def claim(self, begin: int, end: int) -> bool:
        """Take the slots from `begin` to `end`; False if they are in use or don't exist."""
        if self.buffer.is_inference() and not torch.is_inference_mode_enabled():
            return False
        with self.lock:
            if self.used != begin or end > self.buffer.shape[2]:
                return False
            self.used = end
            return True


# Not an attribute of the tensors: copies, by `copy` or `pickle`, would carry it with them.
_ROOMS = WeakTensorKeyDictionary()


def advance(seen: int | Tensor, tokens: int, lengths_B: Tensor | None) -> int | Tensor:
    """Return the tokens seen after `tokens` more slots, of which row b has `lengths_B[b]` real ones."""
    return seen + tokens if lengths_B is None else torch.as_tensor(seen, device=lengths_B.device) + lengths_B


def last_slots(x_BGSK: Tensor, kept: int, lengths_B: Tensor | None) -> Tensor:
    """Return the last `kept` real slots of each row; a shorter row repeats slot 0, at a negative position."""
    S = x_BGSK.shape[2]
    if lengths_B is None and kept == S:
        return x_BGSK
    if lengths_B is None:
        last_BGSK = x_BGSK[:, :, S - kept :]
        # A copy where a small cache would keep a long prompt alive; decoding drops a token and copies nothing.
        spare = S - kept
        return last_BGSK if spare <= kept // SPARE else last_BGSK.clone(memory_format=torch.contiguous_format)
    slots_BS = (lengths_B[:, None] - kept + torch.arange(kept, device=x_BGSK.device)).clamp(min=0)
    return x_BGSK.gather(2, slots_BS[:, None, :, None].expand(*x_BGSK.shape[:2], kept, x_BGSK.shape[3]))


def first_slots(new_BGTK: Tensor, old_BGNK: Tensor | None, seen: int | Tensor, count: int) -> Tensor:
    """Return the first `count` tokens of each row: `old` up to `seen`, then new ones; empty slots hold any others."""
    B, G, T, K = new_BGTK.shape
    if T == 0 or count == 0:
        return new_BGTK.new_zeros(B, G, count, K) if old_BGNK is None else old_BGNK
    if old_BGNK is None:
        return new_BGTK[:, :, torch.arange(count, device=new_BGTK.device).clamp(max=T - 1)]
    place_N = torch.arange(count, device=new_BGTK.device)
    both_BGSK = torch.cat([old_BGNK.to(new_BGTK.dtype), new_BGTK], 2)
    if isinstance(seen, int):
        return both_BGSK[:, :, torch.where(place_N < seen, place_N, count + (place_N - seen).clamp(0, T - 1))]
    seen_B1 = seen.to(new_BGTK.device)[:, None]
    place_BN = torch.where(place_N < seen_B1, place_N, count + (place_N - seen_B1).clamp(0, T - 1))
    return both_BGSK.gather(2, place_BN[:, None, :, None].expand(B, G, count, K))
