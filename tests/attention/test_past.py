"""`past` and the memories that a mechanism keeps in it, below the layers."""

from dataclasses import dataclass

import pytest
import torch

from subquad.attention import Linear, Logsparse, build
from subquad.attention.conversions import to_static_cache
from subquad.attention.drafts import DraftedTokens
from subquad.attention.memories.key_values import Sight
from subquad.attention.memories.recurrence import Recurrence
from subquad.attention.memories.running_softmax import RunningSoftmax
from subquad.attention.past import Converted, Literal, Past, Whole, from_earlier_ranks
from subquad.ops.patterns import Pattern, Window
from subquad.parallel import context_parallel
from subquad.state import State
from subquad.testing import assert_exact, assert_same_maths
from subquad.testing.ranks import on_ranks
from tests.attention import test_latte, test_logsparse

SIZES = {"dim": 16, "num_heads": 2}


def draw(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_a_memory_that_is_kept_and_never_read_is_named():
    class Forgetful(Linear):
        def mix(self, x_BTD, past):
            past.keep(other=Recurrence(draw(1, 2, 5, 3), draw(1, 2, 5, 8)))
            return super().mix(x_BTD, past)

    layer = Forgetful(Forgetful.Config(**SIZES)).double()
    with pytest.raises(RuntimeError, match="linear keeps other and does not read it"):
        layer(draw(1, 5, 16))


X = draw(1, 5, 16)


@pytest.mark.parametrize("past", [
    Past(X, None, None), Whole(X, None, None), Literal(X, causal=True),
    Converted(X, State({"seen": 0}), lambda memory, entries: entries),
], ids=lambda past: type(past).__name__)  # fmt: skip
def test_a_memory_is_read_once(past):
    (sums,) = past.keep(sums=Recurrence(draw(1, 2, 5, 3), draw(1, 2, 5, 8), normalise=True))
    sums.read(draw(1, 2, 5, 3))
    with pytest.raises(RuntimeError, match="memory 'sums' is read twice: keep one for each read"):
        sums.read(draw(1, 2, 5, 3))


def test_decoding_in_place_takes_one_token_without_padding():
    layer = build("window", width=4, **SIZES).double()
    cache = to_static_cache(layer, layer(X)[1], 40).with_counts_by_row()
    with pytest.raises(ValueError, match=r"reads one token of each row, without padding, got 5 tokens$"):
        layer(X, cache)
    with pytest.raises(ValueError, match="reads one token of each row, without padding, got 1 tokens with padding"):
        layer(X[:, :1], cache, mask=torch.ones(1, 1, dtype=torch.bool))


def test_a_bidirectional_layer_has_no_rows_before():
    with pytest.raises(NotImplementedError, match="a bidirectional layer has no tokens before these"):
        Whole(draw(1, 5, 16), None, None).extended("convolution", draw(1, 5, 3), 2)


@pytest.mark.parametrize("cut", range(8))
def test_rows_before_these_are_those_of_a_whole_sequence(cut):
    x = draw(2, 7, 3)
    whole = Past(x, None, None)
    extended = whole.extended("rows", x, 3)
    assert_exact(extended, torch.cat([torch.zeros(2, 3, 3).double(), x], 1), "zeros stand before the first token")
    first = Past(x[:, :cut], None, None)
    assert_exact(first.extended("rows", x[:, :cut], 3), extended[:, : 3 + cut], "before the cut")
    second = Past(x[:, cut:], State(first.entries, ""), None)
    assert second.start == cut
    assert_exact(second.extended("rows", x[:, cut:], 3), extended[:, cut:], "after the cut")
    assert_exact(second.entries["rows"], whole.entries["rows"], "the rows that are kept")
    assert whole.entries["rows"].untyped_storage().nbytes() == 2 * 3 * 3 * 8, "a view would keep all rows alive"


def test_the_rows_that_are_kept_are_real_ones():
    x, before = draw(3, 6, 3), draw(3, 3, 3, seed=1)
    past = Past(x, State({"seen": 4, "rows": before}, ""), torch.tensor([0, 2, 6]))
    assert_exact(past.extended("rows", x, 3), torch.cat([before, x], 1))
    expected = torch.stack([before[0], torch.cat([before[1, 2:], x[1, :2]]), x[2, 3:]])
    assert_exact(past.entries["rows"], expected, "after 0, 2 and 6 real rows")


def memories(part):
    """Return one memory of each kind of summary, of some tokens of a sequence of 12."""
    k, v, logits = draw(1, 2, 12, 3)[:, :, part], draw(1, 2, 12, 4, seed=1)[:, :, part], draw(1, 2, 12, 5)[:, :, part]
    log_f, beta = -draw(1, 2, 12, 1, seed=2)[:, :, part].abs(), draw(1, 2, 12, 1, seed=3)[:, :, part].sigmoid()
    unit = k / k.norm(dim=-1, keepdim=True)
    return [
        RunningSoftmax(logits, v), Recurrence(k, v), Recurrence(k, v, log_f), Recurrence(unit, v, log_f, beta),
        Recurrence(k, v, log_g=-draw(1, 2, 12, 4, seed=4)[:, :, part].abs()),
        Recurrence(k, v, normalise=True), Recurrence(k, v, log_f, normalise=True),
    ]  # fmt: skip


QUERIES = (5, 3, 3, 3, 3, 3, 3)


def test_decays_of_the_values_are_read_as_they_are_defined():
    q, k, v = draw(2, 2, 12, 3), draw(2, 2, 12, 3, seed=1), draw(2, 4, 12, 5, seed=2)
    memory = Recurrence(k, v, log_g=-3 * draw(2, 4, 12, 5, seed=3).abs())
    out, _ = memory.read(q, None, Past(draw(2, 12, 16), None, None))
    assert_same_maths(out, memory.literal(q, causal=True))
    for other in ({"log_f": v}, {"beta": v[..., :1]}, {"normalise": True}):
        with pytest.raises(ValueError, match="log_g, decays of the values, goes without log_f, beta and normalise"):
            Recurrence(k, v, log_g=-v.abs(), **other)


def after(tokens):
    """Return the entries of each memory after these tokens of one process."""
    past = Past(draw(1, tokens, 16), None, None)
    found = zip(memories(slice(tokens)), QUERIES, strict=True)
    return [memory.read(draw(1, 2, tokens, width), None, past)[1] for memory, width in found]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_memories_of_earlier_ranks_come_merged_in_one_exchange(ranks):
    tokens = 12 // ranks

    def work(group):
        exchange, exchanges = group.exchange, []
        group.exchange = lambda *args, **options: exchanges.append(args) or exchange(*args, **options)
        own = memories(slice(group.rank * tokens, (group.rank + 1) * tokens))
        with context_parallel(group):
            past = Past(draw(1, tokens, 16), None, None)
            found = from_earlier_ranks(own, past)
            of_all = len(exchanges)
            from_earlier_ranks(own[:1], past)
        return found, of_all, len(exchanges) - of_all

    for rank, (found, of_all, of_one) in enumerate(on_ranks(ranks, work)):
        assert of_all == of_one, "all memories take as many exchanges as one"
        assert of_all or ranks == 1
        if rank == 0:
            continue  # there is nothing before it
        for entries, expected in zip(found, after(rank * tokens), strict=True):
            for actual, one in zip(entries, expected, strict=True):
                assert_same_maths(actual, one, f"rank {rank} of {ranks}")


@pytest.mark.parametrize("name", ["latte", "gla", "gated_delta_net", "mlstm"])
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_counted_bytes_are_those_of_real_exchanges(name, ranks):
    torch.manual_seed(0)
    layer = build(name, **SIZES)

    def work(group):
        with context_parallel(group):
            y, _ = layer(torch.randn(1, 3, 16, requires_grad=True))
        torch.autograd.grad(y.sum(), list(layer.parameters()))
        return group.sent

    assert on_ranks(ranks, work) == list(layer.communication(3 * ranks, ranks))


def test_a_draft_keeps_as_many_tokens_as_there_are():
    layer = build("latte", dim=16, num_heads=2).double()
    drafted = DraftedTokens(layer, X[:1, :4])
    for lengths in (-1, 5, torch.tensor([9])):
        with pytest.raises(ValueError, match=r"of 4 drafted tokens 0 to 4 can be kept, got \[(-1|5|9)\]"):
            drafted.after(lengths)
    assert drafted.after(4).seen.tolist() == [4]
    with pytest.raises(ValueError, match="not causal: it reads whole sequences and drafts no tokens"):
        DraftedTokens(build("latte", dim=16, num_heads=2, causal=False).double(), X)


def test_the_law_of_drafts_finds_a_memory_that_ignores_how_many_tokens_count(monkeypatch):
    read = RunningSoftmax.read
    monkeypatch.setattr(RunningSoftmax, "read", lambda self, p, before, at: read(self, p, before, NoMask()))
    with pytest.raises(AssertionError, match=r"outputs after 0 tokens and 0 of 6 drafted tokens"):
        test_latte.TestLatte().test_rollback_takes_drafted_tokens_back()


class NoMask:
    mask = None


def test_a_union_of_patterns_is_read_in_place(monkeypatch):
    monkeypatch.setattr(Logsparse, "has_static_cache", True)
    test_logsparse.TestLogsparse().test_in_place_decoding_is_decoding()


@dataclass(frozen=True)
class Beyond(Pattern):
    """The keys that are at least `distance` tokens behind."""

    distance: int

    def allowed(self, q_pos, k_pos):
        return q_pos - k_pos >= self.distance

    @property
    def nearest(self):
        return self.distance


Pattern.registry.pop("Beyond")
FAR_AND_NEAR = (Beyond(3), Window(width=1)), (Window(width=3), Beyond(3))
"""Two groups of heads: what is far for one is near for the other."""


@pytest.mark.parametrize(("near", "tokens"), [
    (FAR_AND_NEAR, 2), (FAR_AND_NEAR, 3), (FAR_AND_NEAR, 9), (((Beyond(1), Window(width=1)),), 1),
    (((Window(width=2), Beyond(2)),), 12),
])  # fmt: skip
@torch.no_grad()
def test_patterns_are_left_out_only_where_no_head_could_see_a_key(monkeypatch, near, tokens):
    monkeypatch.setitem(Pattern.registry, "Beyond", Beyond)
    layer = build("full", dim=16, num_heads=2).double()
    layer.sight = Sight(near)
    x = torch.randn(2, tokens, 16, dtype=torch.float64)
    whole, state = layer(x[:, :1])[0], layer(x[:, :1])[1]
    assert_same_maths(layer(x)[0], layer.definition(x), "all at once")
    assert_same_maths(torch.cat([whole, layer(x[:, 1:], state)[0]], 1), layer.definition(x), "in two pieces")
    if tokens % 3 == 0:

        def part(group):
            with context_parallel(group):
                return layer(group.part(x))[0]

        assert_same_maths(torch.cat(on_ranks(3, part), 1), layer.definition(x), "on three ranks")
