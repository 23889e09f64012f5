"""One thing is flipped in a copy of a mechanism, and the law that forbids it fails."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from subquad.attention import Attention
from subquad.attention.bigbird import Bigbird
from subquad.attention.blocked import Places
from subquad.attention.elita import Elita
from subquad.attention.full import Full
from subquad.attention.latte import Latte
from subquad.attention.linear import Linear
from subquad.attention.llp import Llp
from subquad.attention.shifted import Shifted
from subquad.attention.window import Window
from subquad.ops import gated_scan, patterns
from subquad.ops._torch import scan
from subquad.state import State
from subquad.testing import AttentionContract

Mixed = tuple[Tensor, State]


class LooksAhead(Full):
    """Its weights see one token ahead."""

    def dense_weights(self, x_BTD: Tensor) -> Tensor:
        return super().dense_weights(x_BTD).roll(1, -1)


class RowsAreNotDistributions(Window):
    def dense_weights(self, x_BTD: Tensor) -> Tensor:
        return super().dense_weights(x_BTD) * 2


@dataclass(frozen=True)
class ShortWindow(patterns.Window):
    """Says `width`, computes one less."""

    def key_range(self, q_start: int, q_stop: int) -> tuple[int, int | None]:
        return max(0, q_start - self.width + 2), q_stop


class WindowOneShort(Window):
    def __init__(self, config: Window.Config) -> None:
        super().__init__(config)
        self.patterns = (ShortWindow(width=config.width),)


class ValuesWithoutGradient(Linear):
    def mix_tokens(self, x_BTD: Tensor, state: State | None, lengths_B: Tensor | None) -> Mixed:
        self.cut = True
        try:
            return super().mix_tokens(x_BTD, state, lengths_B)
        finally:
            self.cut = False

    def values(self, x_BTD: Tensor) -> Tensor:
        v_BHTV = super().values(x_BTD)
        return v_BHTV.detach() if getattr(self, "cut", False) else v_BHTV


class ForgetsTheState(Latte):
    def mix_tokens(self, x_BTD: Tensor, state: State | None, lengths_B: Tensor | None) -> Mixed:
        return super().mix_tokens(x_BTD, None, lengths_B)


class StateOfOneTokenOnly(Latte):
    """Right for one new token after the state, wrong for several: it forgets the state after the first."""

    def mix_tokens(self, x_BTD: Tensor, state: State | None, lengths_B: Tensor | None) -> Mixed:
        if state is None or x_BTD.shape[1] == 1:
            return super().mix_tokens(x_BTD, state, lengths_B)
        first, state = super().mix_tokens(x_BTD[:, :1], state, lengths_B)
        rest, state = super().mix_tokens(x_BTD[:, 1:], None, lengths_B)
        return torch.cat([first, rest], 1), state


class DetachedState(Linear):
    def mix_tokens(self, x_BTD: Tensor, state: State | None, lengths_B: Tensor | None) -> Mixed:
        return super().mix_tokens(x_BTD, None if state is None else state.map(torch.Tensor.detach), lengths_B)


class RotatesFromZero(Llp):
    """Every call's tokens stand at positions from 0 on."""

    def rotated(self, x_BHTK: Tensor, start: int | Tensor) -> Tensor:
        return super().rotated(x_BHTK, 0)


class KeepsEveryKey(Window):
    def __init__(self, config: Window.Config) -> None:
        super().__init__(config)
        self.patterns = (UnboundedWindow(width=config.width),)


@dataclass(frozen=True)
class UnboundedWindow(patterns.Window):
    """A window that does not say how far it reaches."""

    @property
    def reach(self) -> None:  # type: ignore[override]
        return None


class SaysLinear(Full):
    """Quadratic, but the class says otherwise."""

    cost_order: ClassVar = "linear"


class MakesASquare(Window):
    """Makes a T x T tensor on the way."""

    def mix_tokens(self, x_BTD: Tensor, state: State | None, lengths_B: Tensor | None) -> Mixed:
        square = x_BTD.new_zeros(x_BTD.shape[1], x_BTD.shape[1])
        return super().mix_tokens(x_BTD + square.sum(), state, lengths_B)


class KeepsThePromptAlive(Window):
    """Its cache is a view of all keys."""

    def mix_tokens(self, x_BTD: Tensor, state: State | None, lengths_B: Tensor | None) -> Mixed:
        y_BTD, after = super().mix_tokens(x_BTD, state, lengths_B)
        keys = self.keys(x_BTD)[:, :, -after.tensor("keys").shape[2] :]
        return y_BTD, State({**after.entries, "keys": keys}, after.config_hash)


class ForgetsWhatPaddingChanged(Llp):
    """After a call with padding every row is thought to have read as much as the longest."""

    def mix_tokens(self, x_BTD: Tensor, state: State | None, lengths_B: Tensor | None) -> Mixed:
        y_BTD, after = super().mix_tokens(x_BTD, state, lengths_B)
        seen = after.seen.amax().expand(len(x_BTD)) if isinstance(after.seen, Tensor) else after.seen
        return y_BTD, State({**after.entries, "seen": seen}, after.config_hash)


class RestartsAtChunks(Linear):
    def mix_tokens(self, x_BTD: Tensor, state: State | None, lengths_B: Tensor | None) -> Mixed:
        pieces = [super(RestartsAtChunks, self).mix_tokens(x, state, lengths_B) for x in x_BTD.split(scan.CHUNK, 1)]
        return torch.cat([y for y, _ in pieces], 1), pieces[-1][1]


class CountsPadding(Linear):
    """Padding has features too: it enters the normaliser."""

    def mix_tokens(self, x_BTD: Tensor, state: State | None, lengths_B: Tensor | None) -> Mixed:
        y_BTD, after = super().mix_tokens(x_BTD, state, None)
        return y_BTD, State({**after.entries}, after.config_hash)


class ReadsPadding(Full):
    """What stands in padding reaches the outputs."""

    def forward(self, x_BTD: Tensor, state: State | None = None, *, mask: Tensor | None = None) -> Mixed:
        y_BTD, after = super().forward(x_BTD, state, mask=mask)
        return y_BTD + 0 * x_BTD.sum(1, keepdim=True), after


class GlobalKeyMaximum(Linear):
    """Stabilised by the largest key of the whole sequence, with eps added after, as published performers do."""

    def mix_tokens(self, x_BTD: Tensor, state: State | None, lengths_B: Tensor | None) -> Mixed:
        q, k = self.split(self.query(x_BTD)), self.split(self.key(x_BTD))
        i_BHTK = (k - k.amax(2, keepdim=True)).exp() + 1e-4
        y_BHTV, sums = gated_scan(q.sigmoid(), i_BHTK, self.values(x_BTD), None, normalise=True, eps=1e-6)
        return self.merge(y_BHTV), State({"seen": x_BTD.shape[1], "sums": sums}, self.config_hash)


class SubtractsTheMean(Llp):
    """The mean of the whole sequence is taken off first."""

    def mix_tokens(self, x_BTD: Tensor, state: State | None, lengths_B: Tensor | None) -> Mixed:
        return super().mix_tokens(x_BTD - x_BTD.mean(1, keepdim=True), state, lengths_B)


class SeesItsBatch(Window):
    def mix_tokens(self, x_BTD: Tensor, state: State | None, lengths_B: Tensor | None) -> Mixed:
        y_BTD, after = super().mix_tokens(x_BTD, state, lengths_B)
        return y_BTD + 0.01 * y_BTD.mean(0, keepdim=True), after


class RoundsToHalf(Latte):
    """Mixes in bfloat16 whatever comes in."""

    def mix_tokens(self, x_BTD: Tensor, state: State | None, lengths_B: Tensor | None) -> Mixed:
        y_BTD, after = super().mix_tokens(x_BTD, state, lengths_B)
        return y_BTD.bfloat16().to(x_BTD.dtype), after


class AccumulatesUnderAutocast(Latte):
    """Lets autocast choose the precision of its mixing twenty times over."""

    def mix_tokens(self, x_BTD: Tensor, state: State | None, lengths_B: Tensor | None) -> Mixed:
        y_BTD, after = super().mix_tokens(x_BTD, state, lengths_B)
        near_one = torch.eye(x_BTD.shape[-1], dtype=y_BTD.dtype) * 1.003
        for _ in range(20):
            y_BTD = y_BTD @ near_one
        return y_BTD / 1.003**20, after


class BranchesOnData(Linear):
    def mix_tokens(self, x_BTD: Tensor, state: State | None, lengths_B: Tensor | None) -> Mixed:
        return super().mix_tokens(x_BTD if bool(x_BTD.sum() > 0) else x_BTD + 0, state, lengths_B)


class RollsRoundWithoutSaying(Shifted):
    """LongLoRA's published shift, which wraps around, under a name that promises causality."""

    def __init__(self, config: Shifted.Config) -> None:
        super().__init__(config)
        self.causal = True

    def attend_slots(self, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        short = -q.shape[2] % self.config.group
        padded = (F.pad(x, (0, 0, 0, short)) for x in (q, k, v))
        return super().attend_slots(*padded, rest[0], Places())[:, :, : q.shape[2]]


class DrawsByTheLength(Bigbird):
    """Random blocks of the past that depend on how many there are in all."""

    def union(self, tokens: int) -> list[patterns.Pattern]:
        drawn = super().union(tokens)
        return [*drawn[:-1], dataclasses.replace(drawn[-1], seed=tokens)]


class CountsTheSlotOnce(Elita):
    """The token's own value enters its gate by half."""

    def dense_weights(self, x_BTD: Tensor) -> Tensor:
        w_BHTS = super().dense_weights(x_BTD)
        return w_BHTS - torch.diag_embed(w_BHTS.diagonal(dim1=-2, dim2=-1)) / 2


_serial = count()


class OwnHash(Full):
    """Every instance makes states that no other accepts."""

    def __init__(self, config: Full.Config) -> None:
        super().__init__(config)
        self.config_hash += str(next(_serial))


class SumsInHalf(Linear):
    """The state's sums go through float16."""

    def mix_tokens(self, x_BTD: Tensor, state: State | None, lengths_B: Tensor | None) -> Mixed:
        y_BTD, after = super().mix_tokens(x_BTD, state, lengths_B)
        return y_BTD * (after.tensor("sums").sum().half() * 0 + 1).to(y_BTD.dtype), after


class SeesPackedRows(Latte):
    """It mixes a row of documents as one."""

    def forward(
        self, x_BTD: Tensor, state: State | None = None, *, mask: Tensor | None = None, doc_ids: Tensor | None = None
    ) -> Mixed:
        return super().forward(x_BTD, state, mask=mask if doc_ids is None else doc_ids >= 0)

    def weights(self, x_BTD: Tensor, mask: Tensor | None = None, doc_ids: Tensor | None = None) -> Tensor:
        return super().weights(x_BTD, mask if doc_ids is None else doc_ids >= 0)


PLANTED_PATTERNS = {name: patterns.Pattern.registry.pop(name) for name in ("ShortWindow", "UnboundedWindow")}


@pytest.fixture(autouse=True)
def _planted_patterns_exist_here_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, pattern in PLANTED_PATTERNS.items():
        monkeypatch.setitem(patterns.Pattern.registry, name, pattern)


PLANTED = [
    (LooksAhead, {}, "law_01_weights"),
    (RowsAreNotDistributions, {"width": 11}, "law_01_weights"),
    (WindowOneShort, {"width": 11}, "law_02"),
    (ValuesWithoutGradient, {}, "law_02"),
    (ForgetsTheState, {}, "law_03_any"),
    (StateOfOneTokenOnly, {}, "law_03_any"),
    (DetachedState, {}, "law_03_gradients"),
    (RotatesFromZero, {"segment": 16, "rope": True}, "law_04"),
    (ForgetsTheState, {}, "law_04"),
    (KeepsEveryKey, {"width": 11}, "law_05"),
    (KeepsThePromptAlive, {"width": 11}, "law_05"),
    (SaysLinear, {}, "law_06_cost"),
    (MakesASquare, {"width": 11}, "law_06_cost"),
    (RestartsAtChunks, {}, "law_07_block"),
    (WindowOneShort, {"width": 11}, "law_07_any"),
    (CountsPadding, {}, "law_08_padding_before"),
    (ForgetsWhatPaddingChanged, {"segment": 16}, "law_08_padding_after"),
    (ReadsPadding, {}, "law_08_padding_is_not"),
    (GlobalKeyMaximum, {}, "law_09"),
    (SubtractsTheMean, {"segment": 16}, "law_09"),
    (RollsRoundWithoutSaying, {"group": 16, "wrap": True}, "law_09"),
    (DrawsByTheLength, {"block": 4, "num_global": 0, "num_random": 1}, "law_03_any"),
    (CountsTheSlotOnce, {}, "law_02"),
    (SeesItsBatch, {"width": 11}, "law_10"),
    (RoundsToHalf, {}, "law_11_each"),
    (AccumulatesUnderAutocast, {}, "law_11_auto"),
    (BranchesOnData, {}, "law_12_compiles_whole_with_aot"),
    (OwnHash, {}, "law_13"),
    (SumsInHalf, {}, "law_14"),
    (SeesPackedRows, {}, "law_15_packed"),
    (SeesPackedRows, {}, "law_15_no_bit"),
    (SeesPackedRows, {}, "law_15_weights"),
    (SeesPackedRows, {}, "law_15_the_state"),
]


FAILURES = {"law_12_compiles_whole_with_aot": torch._dynamo.exc.TorchDynamoException, "law_13": ValueError}
"""How a law fails where not by an assertion."""


@pytest.mark.parametrize(("planted", "options", "law"), PLANTED, ids=[f"{p.__name__}-{law}" for p, _, law in PLANTED])
def test_the_law_fails(planted: type[Attention], options: dict[str, object], law: str, tmp_path: Path) -> None:
    class Planted(AttentionContract):
        name = planted.name

        def new(self, num_heads: int) -> Attention:
            return planted(planted.Config(dim=self.dim, num_heads=num_heads, **options))

    (method,) = [name for name in dir(Planted) if name.startswith(f"test_{law}")]
    arguments = (tmp_path,) if law == "law_13" else ()
    with pytest.raises(FAILURES.get(law, AssertionError)):
        getattr(Planted(), method)(*arguments)
