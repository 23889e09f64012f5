"""The laws of states: reading in pieces, saving and sharing do not change the result."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from subquad.attention import Attention
from subquad.attention.conversions import after_all_ranks, from_static_cache, to_static_cache
from subquad.attention.drafts import DraftedTokens
from subquad.attention.laws import Law
from subquad.parallel import Sent, context_parallel
from subquad.state import State
from subquad.testing.judged import Judged
from subquad.testing.ranks import Threads, on_ranks
from subquad.testing.tools import Compare, assert_exact, assert_same_maths, assert_same_state, in_pieces, with_gradients


class LawsOfStates(Judged):
    """Test that a sequence may be cut anywhere, and test its state."""

    def test_split_anywhere_gives_the_same_result(self, cuts: Sequence[int] = (0, 1, 23, 40)) -> None:
        with self.judging(Law.SPLIT) as layer:
            x = self.inputs(self.tokens)
            assert_same_maths(in_pieces(layer, x, sorted(cuts)), layer(x)[0], f"outputs, cut at {sorted(cuts)}")

    def test_split_keeps_gradients_through_the_state(self) -> None:
        with self.judging(Law.SPLIT) as layer:
            x = self.inputs(self.tokens)
            pieces = with_gradients(layer, lambda x: in_pieces(layer, x, [23, 40]), x)
            for name, expected in with_gradients(layer, self.forward_of(layer), x).items():
                assert_same_maths(pieces[name], expected, name)

    def test_token_by_token_gives_the_same_result(self) -> None:
        with self.judging(Law.TOKEN_BY_TOKEN) as layer:
            x = self.inputs(self.tokens)
            assert_same_maths(in_pieces(layer, x, list(range(1, self.tokens))), layer(x)[0], "outputs token by token")

    def test_state_size_stops_growing(self) -> None:
        with self.judging(Law.STATE_SIZE, torch.float32) as layer:
            states = [self.state_of(layer, self.inputs(n, 1, torch.float32)) for n in (1024, 2048)]
            short, long = (state.nbytes for state in states)
            grown = f"state: {short} bytes after 1024 tokens, {long} after 2048; state_grows={layer.state_grows}"
            assert (short < long) if layer.state_grows else (short == long), grown
            assert layer.state_bytes(2048) == long, (
                f"state: {layer.state_bytes(2048)} bytes by state_bytes, {long} real"
            )
            for name, entry in states[1].entries.items():
                if isinstance(entry, Tensor):
                    alive = entry.untyped_storage().nbytes()
                    assert alive == entry.nbytes, f"{name} of {entry.nbytes} bytes keeps {alive} bytes alive"

    def test_saved_weights_and_state_are_the_same(self) -> None:
        with self.judging(Law.SAVED) as layer, TemporaryDirectory() as folder:
            x = self.inputs(self.tokens)
            other = self.new(self.num_heads).to(torch.float64).eval()
            other.load_state_dict(layer.state_dict())
            assert_same_maths(other(x)[0], layer(x)[0], "outputs after save and load")
            if not layer.causal:
                return
            state = self.state_of(layer, x)
            file = Path(folder) / "state.safetensors"
            state.save(file)
            loaded = State.load(file, config_hash=other.config_hash)
            assert_same_state(loaded, state, assert_exact, "state after save and load")
            # Not bitwise: a tensor's alignment in memory may change the order of sums in a matmul.
            assert_same_maths(other(x, loaded)[0], layer(x, state)[0], "continuation after save and load")

    @torch.no_grad()
    def test_rollback_goes_on_from_a_kept_state(self) -> None:
        with self.judging(Law.ROLLBACK) as layer:
            x, other = self.inputs(24), self.inputs(9, seed=2)
            kept = [self.state_of(layer, x[:, :20])]
            copies = [kept[0].map(Tensor.clone)]
            layer(x[:, 20:], kept[0])
            for token in x[:, 20:].split(1, 1):
                kept.append(layer(token, kept[-1])[1])
                copies.append(kept[-1].map(Tensor.clone))
            for n, (state, copy) in enumerate(zip(kept, copies, strict=True)):
                whole = layer(torch.cat([x[:, : 20 + n], other], 1))[0]
                assert_same_maths(
                    layer(other, state)[0], whole[:, 20 + n :], f"outputs after {4 - n} tokens taken back"
                )
                assert_same_state(state, copy, assert_exact, f"kept state after {20 + n} tokens")

    @torch.no_grad()
    def test_rollback_takes_drafted_tokens_back(self) -> None:
        with self.judging(Law.ROLLBACK) as layer:
            x, more = self.inputs(27, 3), self.inputs(9, 3, seed=2)
            for before in (0, 1, 21):
                state = self.state_of(layer, x[:, :before]) if before else None
                drafted = DraftedTokens(layer, x[:, before : before + 6], state)
                what = f"after {before} tokens"
                assert_same_maths(drafted.y_BTD, layer(x[:, : before + 6])[0][:, before:], f"drafted outputs {what}")
                kept = [0, 4, 6]
                found = layer(more, drafted.after(torch.tensor(kept)))[0]
                for row, n in enumerate(kept):
                    whole = layer(torch.cat([x[row : row + 1, : before + n], more[row : row + 1]], 1))[0]
                    here = f"outputs {what} and {n} of 6 drafted tokens"
                    assert_same_maths(found[row : row + 1], whole[:, before + n :], here)

    @torch.no_grad()
    def test_in_place_decoding_is_decoding(self) -> None:
        with self.judging(Law.IN_PLACE) as layer:
            for before in (1, 8, 20):
                x = self.inputs(before + 13, 1)
                state, (whole, last) = self.state_of(layer, x[:, :before]), layer(x)
                cache, copy = to_static_cache(layer, state, before + 20), state.map(Tensor.clone)
                if not layer.has_static_cache:
                    what = f"{layer.name} has no static cache and changes its state"
                    assert cache is state is from_static_cache(layer, state), what
                    continue
                cache, what = cache.with_counts_by_row(), f"in place after {before} tokens"
                tensors = {name: x for name, x in cache.entries.items() if isinstance(x, Tensor) and name not in state}
                assert_same_rows(from_static_cache(layer, cache), state, assert_exact, f"state {what}")
                outputs = []
                for token in x[:, before:].split(1, 1):
                    y, cache = layer(token, cache)
                    outputs.append(y)
                assert_same_maths(torch.cat(outputs, 1), whole[:, before:], f"outputs {what}")
                after = from_static_cache(layer, cache)
                assert_same_rows(after, last, assert_same_maths, f"state of 13 more tokens {what}")
                assert_same_state(state, copy, assert_exact, f"state that was read {what}")
                moved = [name for name, x in tensors.items() if cache.tensor(name).data_ptr() != x.data_ptr()]
                assert not moved, f"entries {moved} are not written in place; allowed: none"
                drafted = DraftedTokens(layer, x[:, before : before + 6], to_static_cache(layer, state, before + 20))
                back, n = to_static_cache(layer, drafted.after(4), before + 20).with_counts_by_row(), before + 4
                y, _ = layer(x[:, n : n + 1], back)
                assert_same_maths(y, whole[:, n : n + 1], f"output of one token {what}, 4 and 2 taken back")

    def test_ranks_compute_what_one_process_does(self) -> None:
        with self.judging(Law.RANKS) as layer:
            x, weight = self.inputs(21), self.inputs(21, seed=3)
            expected, state = read(layer, x, weight)

            def work(group: Threads) -> tuple[dict[str, Tensor], State]:
                with context_parallel(group):
                    found, last = read(layer, group.part(x), group.part(weight))
                    return found, after_all_ranks(layer, last, x.device)

            parts = on_ranks(3, work)
            for name, whole in expected.items():
                found = [part[name] for part, _ in parts]
                joined = torch.cat(found, 1) if name in ("output", "gradient of x") else torch.stack(found).sum(0)
                assert_same_maths(joined, whole, f"{name} of three ranks")
            for rank, (_, last) in enumerate(parts):
                assert_same_state(last, state, assert_same_maths, f"state on rank {rank} of three")

    def test_ranks_send_what_communication_says(self) -> None:
        with self.judging(Law.RANKS, torch.float32) as layer:
            x = self.inputs(21, 1, torch.float32)

            def work(group: Threads) -> Sent:
                with context_parallel(group):
                    read(layer, group.part(x), group.part(x))
                return group.sent

            for rank, (sent, said) in enumerate(zip(on_ranks(3, work), layer.communication(21, 3), strict=True)):
                assert sent == said, f"rank {rank} of three sends bytes {sent}, by communication {said}"


def read(layer: Attention, x: Tensor, weight: Tensor) -> tuple[dict[str, Tensor], State]:
    """Return the output for `x`, the gradients of its sum weighted by `weight`, and the state."""
    states = []

    def forward(x: Tensor) -> Tensor:
        y, state = layer(x)
        states.append(state)
        return y

    return with_gradients(layer, forward, x, weight), states[0]


def assert_same_rows(actual: State, expected: State, compare: Compare, what: str) -> None:
    """Assert that both states of one row are the same, but for keys and values before the first in `expected`."""
    entries = actual.entries.copy()
    for name, x in expected.entries.items():
        if isinstance(x, Tensor) and x.ndim == 4 and name in entries:
            entries[name] = actual.tensor(name)[:, :, max(0, actual.tensor(name).shape[2] - x.shape[2]) :]
    assert_same_state(State(entries, actual.config_hash), expected.with_counts_by_row(), compare, what)
