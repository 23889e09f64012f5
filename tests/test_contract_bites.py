"""Each law of the contract fails for a mechanism with a planted bug that the law forbids."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, ClassVar
from unittest import SkipTest

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from subquad.attention import Attention, Full, Gla, Latte, Linear, Llp, Shifted, Window
from subquad.attention.base import split
from subquad.attention.bigbird import Bigbird
from subquad.attention.elita import Elita
from subquad.attention.laws import Law
from subquad.attention.memories.key_values import KeyValues, Sight
from subquad.attention.parts import keys, softmax_heads
from subquad.attention.past import Entries, Literal, Past, Whole
from subquad.ops import gated_scan, patterns
from subquad.ops._torch import scan
from subquad.parallel import Sent
from subquad.state import State
from subquad.testing import AttentionContract
from tests.attention import test_gla

Mixed = tuple[Tensor, State]
Mix = Callable[[Tensor, State | None, Tensor | None], Mixed]
Change = Callable[[Any, Mix, Tensor, State | None, Tensor | None], Mixed]


def mixing(base: type[Attention]) -> Callable[[Change], type[Attention]]:
    """Turn `change(layer, mix, x, state, lengths)` into a subclass of `base` with `mix_tokens` changed by it."""

    def planted(change: Change) -> type[Attention]:
        def mix_tokens(self: Attention, *arguments: Any) -> Mixed:
            return change(self, partial(base.mix_tokens, self), *arguments)

        return type(change.__name__, (base,), {"mix_tokens": mix_tokens})

    return planted


def dense(base: type[Attention]) -> Callable[[Callable[[Tensor], Tensor]], type[Attention]]:
    """Turn a function of weights into a subclass of `base` whose definition has the changed weights."""
    return lambda change: type(
        change.__name__, (base,), {"dense_weights": lambda self, x: change(base.dense_weights(self, x))}
    )


@dense(Full)
def looks_ahead(w_BHTS):
    return w_BHTS.roll(1, -1)


@dense(Window)
def rows_are_no_distributions(w_BHTS):
    return w_BHTS * 2


@mixing(Latte)
def forgets_the_state(layer, mix, x, state, lengths):
    return mix(x, None, lengths)


@mixing(Latte)
def state_of_one_token_only(layer, mix, x, state, lengths):
    """Right for one new token after the state, wrong for several."""
    if state is None or x.shape[1] == 1:
        return mix(x, state, lengths)
    first, state = mix(x[:, :1], state, lengths)
    rest, state = mix(x[:, 1:], None, lengths)
    return torch.cat([first, rest], 1), state


@mixing(Linear)
def detached_state(layer, mix, x, state, lengths):
    return mix(x, None if state is None else state.map(Tensor.detach), lengths)


@mixing(Window)
def makes_a_square(layer, mix, x, state, lengths):
    return mix(x + x.new_zeros(x.shape[1], x.shape[1]).sum(), state, lengths)


@mixing(Window)
def keeps_the_prompt_alive(layer, mix, x, state, lengths):
    """The cache is a view of all keys."""
    y, after = mix(x, state, lengths)
    k = keys(layer, *split(layer.config.channels, layer.key(x)), 0)
    kept = k[:, :, -after.tensor("near_keys").shape[2] :]
    return y, State({**after.entries, "near_keys": kept}, after.config_hash)


@mixing(Llp)
def forgets_what_padding_changed(layer, mix, x, state, lengths):
    """After padding, every row counts as many tokens as the longest."""
    y, after = mix(x, state, lengths)
    seen = after.seen.amax().expand(len(x)) if isinstance(after.seen, Tensor) else after.seen
    return y, State({**after.entries, "seen": seen}, after.config_hash)


@mixing(Linear)
def restarts_at_chunks(layer, mix, x, state, lengths):
    pieces = [mix(piece, state, lengths) for piece in x.split(scan.CHUNK, 1)]
    return torch.cat([y for y, _ in pieces], 1), pieces[-1][1]


@mixing(Linear)
def counts_padding(layer, mix, x, state, lengths):
    return mix(x, state, None)


@mixing(Linear)
def stabilised_by_the_largest_key(layer, mix, x, state, lengths):
    """Published performers subtract the maximum over the whole sequence and add eps after it."""
    q, k, v = split(layer.config.channels, layer.query(x), layer.key(x), layer.value(x))
    i = (k - k.amax(2, keepdim=True)).exp() + 1e-4
    y, sums = gated_scan(q.sigmoid(), i, v, None, normalise=True, eps=1e-6)
    return layer.finish(y, x), State({"seen": x.shape[1], "sums": sums}, layer.config_hash)


@mixing(Llp)
def subtracts_the_mean(layer, mix, x, state, lengths):
    return mix(x - x.mean(1, keepdim=True), state, lengths)


@mixing(Window)
def sees_its_batch(layer, mix, x, state, lengths):
    y, after = mix(x, state, lengths)
    return y + 0.01 * y.mean(0, keepdim=True), after


@mixing(Latte)
def rounds_to_half(layer, mix, x, state, lengths):
    y, after = mix(x, state, lengths)
    return y.bfloat16().to(x.dtype), after


@mixing(Latte)
def accumulates_under_autocast(layer, mix, x, state, lengths):
    """Autocast rounds each of twenty products."""
    y, after = mix(x, state, lengths)
    near_one = torch.eye(x.shape[-1], dtype=y.dtype) * 1.003
    for _ in range(20):
        y = y @ near_one
    return y / 1.003**20, after


@mixing(Linear)
def branches_on_data(layer, mix, x, state, lengths):
    return mix(x if bool(x.sum() > 0) else x + 0, state, lengths)


@mixing(Linear)
def sums_in_half(layer, mix, x, state, lengths):
    y, after = mix(x, state, lengths)
    return y * (after.tensor("sums").sum().half() * 0 + 1).to(y.dtype), after


@mixing(Linear)
def goes_on_from_its_last_state(layer, mix, x, state, lengths):
    y, layer.last = mix(x, None if state is None else layer.last, lengths)
    return y, layer.last


@mixing(Linear)
def writes_into_the_given_state(layer, mix, x, state, lengths):
    y, after = mix(x, state, lengths)
    if state is not None:
        state.tensor("sums").copy_(after.tensor("sums"))
    return y, after


@mixing(Window)
def copies_its_static_cache(layer, mix, x, state, lengths):
    y, after = mix(x, state, lengths)
    return y, after.map(Tensor.clone)


class TurnedRing(KeyValues):
    def to_static_cache(self, entries: Entries, seen: int, capacity: int) -> Entries:
        return {slot: x.roll(1, 2) for slot, x in super().to_static_cache(entries, seen, capacity).items()}

    def from_static_cache(self, cache: Entries, seen: int) -> Entries:
        return super().from_static_cache({slot: x.roll(-1, 2) for slot, x in cache.items()}, seen)


class HalfARing(KeyValues):
    def from_static_cache(self, cache: Entries, seen: int) -> Entries:
        return {slot: x.tril() for slot, x in super().from_static_cache(cache, seen).items()}


class KeepsATurnedRing(Llp):
    memory: ClassVar[type[KeyValues]] = TurnedRing

    def mix(self, x_BTD: Tensor, past: Past) -> Tensor:
        q, k, v = softmax_heads(self, x_BTD, past.start)
        (near,) = past.keep(near=self.memory(k, past.values(v), self.sight))
        return near.read(q)


class LosesTokensInPlace(KeepsATurnedRing):
    memory = HalfARing


class ReadsOnlyItsPart(Latte):
    def mix(self, x_BTD: Tensor, past: Past) -> Tensor:
        past.group = None
        return super().mix(x_BTD, past)


class SaysThatNothingIsSent(Latte):
    def communication(self, tokens: int, ranks: int) -> tuple[Sent, ...]:
        return (Sent(),) * ranks


class ValuesWithoutGradient(Linear):
    def mix(self, x_BTD: Tensor, past: Past) -> Tensor:
        if not isinstance(past, Literal):
            past.values = Tensor.detach  # type: ignore[method-assign]
        return super().mix(x_BTD, past)


class HalvesTheDiagonal(Elita):
    """The definition's weights of tokens on themselves are half of what they are."""

    def mix(self, x_BTD: Tensor, past: Past) -> Tensor:
        y_BHTV = super().mix(x_BTD, past)
        if not isinstance(past, Literal):
            return y_BHTV
        own_BHT = super().mix(x_BTD, Literal(x_BTD, causal=True, eye=True)).diagonal(dim1=-2, dim2=-1)
        return y_BHTV - own_BHT[..., None] / 2 * split(self.channels, self.value(x_BTD))[0]


class RotatesFromZero(Llp):
    def mix(self, x_BTD: Tensor, past: Past) -> Tensor:
        q, k, v = softmax_heads(self, x_BTD, 0)
        (near,) = past.keep(near=KeyValues(k, past.values(v), self.sight))
        return near.read(q)


@dataclass(frozen=True)
class ShortWindow(patterns.Window):
    """Says `width`, computes one less."""

    def key_range(self, q_start: int, q_stop: int) -> tuple[int, int | None]:
        return max(0, q_start - self.width + 2), q_stop


@dataclass(frozen=True)
class UnboundedWindow(patterns.Window):
    """Does not say how far it reaches."""

    @property
    def reach(self) -> None:  # type: ignore[override]
        return None


class WindowOneShort(Window):
    pattern: ClassVar[type[patterns.Window]] = ShortWindow

    def __init__(self, config: Window.Config) -> None:
        super().__init__(config)
        self.sight = Sight(((self.pattern(width=config.width),),))


class KeepsEveryKey(WindowOneShort):
    pattern = UnboundedWindow


class SaysLinear(Full):
    cost_order: ClassVar = "linear"


class Halving(Linear):
    """Multiplies a matrix of log2(T) rows for each token."""

    def mix(self, x_BTD: Tensor, past: Past) -> Tensor:
        rows = x_BTD.new_zeros(x_BTD.shape[1] * x_BTD.shape[1].bit_length(), 8) @ x_BTD.new_zeros(8, 64)
        return super().mix(x_BTD, past) + rows.sum()


class ReadsPadding(Full):
    def forward(self, x_BTD: Tensor, state: State | None = None, *, mask: Tensor | None = None) -> Mixed:
        y_BTD, after = super().forward(x_BTD, state, mask=mask)
        return y_BTD + 0 * x_BTD.sum(1, keepdim=True), after


class RollsRoundWithoutSaying(Shifted):
    """LongLoRA's published shift, which wraps around, under a name that promises causality."""

    def __init__(self, config: Shifted.Config) -> None:
        super().__init__(config)
        self.causal = True

    def mix_tokens(self, x_BTD: Tensor, state: State | None, lengths_B: Tensor | None) -> Mixed:
        T = x_BTD.shape[1]
        padded = F.pad(x_BTD, (0, 0, 0, -T % self.config.group))
        y_BTD = self.finish(self.mix(padded, Whole(padded, None, None)), padded)
        return y_BTD[:, :T], State({"seen": T}, self.config_hash)


class DrawsByTheLength(Bigbird):
    """Random blocks of the past that depend on the length of the sequence."""

    def mix(self, x_BTD: Tensor, past: Past) -> Tensor:
        (union,) = self.sight.near
        self.sight = Sight(((*union[:-1], dataclasses.replace(union[-1], seed=x_BTD.shape[1])),))
        return super().mix(x_BTD, past)


class OwnHash(Full):
    """Every instance makes states that no other instance accepts."""

    serial = count()

    def __init__(self, config: Full.Config) -> None:
        super().__init__(config)
        self.config_hash += str(next(self.serial))


class SeesPackedRows(Latte):
    """Mixes a row of documents as one."""

    def forward(
        self, x_BTD: Tensor, state: State | None = None, *, mask: Tensor | None = None, doc_ids: Tensor | None = None
    ) -> Mixed:
        return super().forward(x_BTD, state, mask=mask if doc_ids is None else doc_ids >= 0)

    def weights(self, x_BTD: Tensor, mask: Tensor | None = None, doc_ids: Tensor | None = None) -> Tensor:
        return super().weights(x_BTD, mask if doc_ids is None else doc_ids >= 0)


PLANTED_PATTERNS = {name: patterns.Pattern.registry.pop(name) for name in ("ShortWindow", "UnboundedWindow")}


@pytest.fixture(autouse=True)
def _planted_patterns_exist_only_here(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, pattern in PLANTED_PATTERNS.items():
        monkeypatch.setitem(patterns.Pattern.registry, name, pattern)


PLANTED: list[tuple[type[Attention], dict[str, Any], str]] = [
    (looks_ahead, {}, "weights"),
    (rows_are_no_distributions, {"width": 11}, "weights"),
    (WindowOneShort, {"width": 11}, "definition"),
    (ValuesWithoutGradient, {}, "definition"),
    (HalvesTheDiagonal, {}, "definition"),
    (forgets_the_state, {}, "split_anywhere"),
    (state_of_one_token_only, {}, "split_anywhere"),
    (DrawsByTheLength, {"block": 4, "num_global": 0, "num_random": 1}, "split_anywhere"),
    (detached_state, {}, "split_keeps"),
    (RotatesFromZero, {"segment": 16, "rope": True}, "token"),
    (forgets_the_state, {}, "token"),
    (KeepsEveryKey, {"width": 11}, "state_size"),
    (keeps_the_prompt_alive, {"width": 11}, "state_size"),
    (SaysLinear, {}, "cost"),
    (Halving, {}, "cost"),
    (makes_a_square, {"width": 11}, "cost"),
    (restarts_at_chunks, {}, "block_sizes_change"),
    (WindowOneShort, {"width": 11}, "block_sizes_fit"),
    (counts_padding, {}, "padding_before"),
    (forgets_what_padding_changed, {"segment": 16}, "padding_after"),
    (ReadsPadding, {}, "padding_is_not"),
    (subtracts_the_mean, {"segment": 16}, "padding_is_as"),
    (stabilised_by_the_largest_key, {}, "no_future"),
    (subtracts_the_mean, {"segment": 16}, "no_future"),
    (RollsRoundWithoutSaying, {"group": 16, "wrap": True}, "no_future"),
    (sees_its_batch, {"width": 11}, "batch"),
    (rounds_to_half, {}, "precision_of"),
    (accumulates_under_autocast, {}, "precision_under"),
    (branches_on_data, {}, "compiled_whole_with_aot"),
    (OwnHash, {}, "saved"),
    (sums_in_half, {}, "long_inputs_in_float16"),
    (SeesPackedRows, {}, "documents_packed"),
    (SeesPackedRows, {}, "documents_change"),
    (SeesPackedRows, {}, "documents_keep"),
    (SeesPackedRows, {}, "documents_leave"),
    (goes_on_from_its_last_state, {}, "rollback_goes"),
    (writes_into_the_given_state, {}, "rollback_goes"),
    (copies_its_static_cache, {"width": 11}, "in_place"),
    (KeepsATurnedRing, {"segment": 16}, "in_place"),
    (LosesTokensInPlace, {"segment": 16}, "in_place"),
    (ReadsOnlyItsPart, {}, "ranks_compute"),
    (RotatesFromZero, {"segment": 16, "rope": True}, "ranks_compute"),
    (SaysThatNothingIsSent, {}, "ranks_send"),
]
LIMIT = r"(?s)^\w.*(up to 1e-09 allowed|not equal|exceeds|bytes|allow|not finite)"
# Failures that are not an assertion.
FAILURES = {"compiled_whole_with_aot": torch._dynamo.exc.TorchDynamoException, "saved": ValueError}


@pytest.mark.parametrize(("planted", "options", "law"), PLANTED, ids=[f"{p.__name__}-{law}" for p, _, law in PLANTED])
def test_the_law_fails(planted, options, law):
    class Planted(AttentionContract):
        name = planted.name

        def new(self, num_heads):
            return planted(planted.Config(dim=self.dim, num_heads=num_heads, **options))

    (method,) = [name for name in dir(Planted) if name.startswith(f"test_{law}")]
    with pytest.raises(FAILURES.get(law, AssertionError)) as failure:
        getattr(Planted(), method)()
    assert law in FAILURES or re.search(LIMIT, str(failure.value)), "what was compared, and the limit"
    broken = AttentionContract.law_of(method)
    where = re.escape(f"law '{broken}': {broken.asks}\nbroken by {planted.name}(dim=16, num_heads=")
    note = failure.value.__notes__[0]
    assert re.match(rf"{where}.*\) with inputs of D=16: B=., T=\d.* in torch\.(b?)float", note)
    assert all(f" {name}={value}" in note for name, value in options.items())


TESTS = [name for name in dir(AttentionContract) if AttentionContract.law_of(name) and not name.endswith("inductor")]


def test_every_law_is_tested():
    assert {AttentionContract.law_of(name) for name in TESTS} == set(Law)


@pytest.mark.parametrize("method", TESTS)
def test_a_mechanism_is_not_judged_by_a_law_that_it_is_exempt_from(method):
    law = AttentionContract.law_of(method)

    class Exempt(Full):
        def exemptions(self):
            return {law: "declared"}

    class Judged(AttentionContract):
        def new(self, num_heads):
            return Exempt(Exempt.Config(dim=self.dim, num_heads=num_heads))

    with pytest.raises(SkipTest, match=f"law '{law}': declared"):
        getattr(Judged(), method)()


@pytest.mark.parametrize("planted", [Full, Halving, Linear])
@pytest.mark.parametrize("says", ["linear", "T log T", "quadratic"])
def test_orders_of_costs_are_told_apart(planted, says):
    class Judged(AttentionContract):
        def new(self, num_heads):
            own = type("Own", (planted,), {"cost_order": says})
            return own(planted.Config(dim=self.dim, num_heads=num_heads))

    right = {Full: "quadratic", Halving: "T log T", Linear: "linear"}[planted] == says
    with contextlib.nullcontext() if right else pytest.raises(AssertionError, match=f"cost_order='{says}' allows"):
        Judged().test_cost_grows_as_the_class_says()


def test_a_state_that_is_read_a_bit_off_fails_the_law_of_saving(monkeypatch):
    class Judged(AttentionContract):
        name = "latte"

    load = State.load
    monkeypatch.setattr(State, "load", lambda *args, **kwargs: load(*args, **kwargs).map(next_number))
    with pytest.raises(AssertionError, match="lse"):
        Judged().test_saved_weights_and_state_are_the_same()


def next_number(x: Tensor) -> Tensor:
    return x.nextafter(x + 1)


def test_a_class_without_an_oracle_fails():
    class Judged(AttentionContract):
        name = "latte"

    with pytest.raises(NotImplementedError, match=r"Judged must define oracle\(self, layer, x_TD\): the out"):
        Judged().test_the_oracle_agrees()


@pytest.mark.parametrize("wrong", ["oracle", "mix"])
def test_a_wrong_equation_on_either_side_fails_the_oracle(wrong):
    """The definition has the mistake of `mix` too: no other law finds it."""

    class Unscaled(Gla):
        def mix(self, x_BTD, past):
            return super().mix(x_BTD, past) * (self.config.keys**0.5 if wrong == "mix" else 1)

    class Judged(test_gla.TestGla):
        def new(self, num_heads):
            return Unscaled(Unscaled.Config(dim=self.dim, num_heads=num_heads, norm_eps=1.0))

        def oracle(self, layer, x_TD):
            return test_gla.TestGla.oracle(self, layer, -x_TD if wrong == "oracle" else x_TD)

    Judged().test_definition_is_what_forward_computes_with_every_gradient()
    with pytest.raises(AssertionError, match="the oracle"):
        Judged().test_the_oracle_agrees()
