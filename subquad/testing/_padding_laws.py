"""Law 8 of the contract: padding may stand anywhere and does not exist."""

from __future__ import annotations

import pytest
import torch

from subquad.testing._subject import ContractOf
from subquad.testing.tools import assert_exact, assert_same_maths, mask_with


class PaddingLaws(ContractOf):
    """What stands in padding is not seen, and the real tokens are treated as if it were not there."""

    def test_law_08_padding_is_not_seen(self) -> None:
        layer = self.judged(8, torch.float32)
        mask = mask_with([(9, 41, 0), (0, 33, 17), (50, 0, 0)])
        x = self.inputs(50, 3, torch.float32)
        results = []
        for rubbish in (0.0, 1e4, float("nan"), float("inf")):
            leaf = x.masked_fill(~mask[..., None], rubbish).requires_grad_()
            y = layer(leaf, mask=mask)[0]
            (gradient,) = torch.autograd.grad(y.square().sum(), leaf)
            results.append((y, gradient))
        for y, gradient in results:
            assert_exact(y, results[0][0], "outputs with other padding")
            assert_exact(gradient, results[0][1], "gradients with other padding")
            assert_exact(y[~mask], torch.zeros_like(y[~mask]), "outputs at padding")
            assert_exact(gradient[~mask], torch.zeros_like(gradient[~mask]), "gradients at padding")

    def test_law_08_padding_is_as_if_removed(self) -> None:
        layer = self.judged(8)
        mask = mask_with([(9, 41, 0), (0, 33, 17), (50, 0, 0)])
        x = self.inputs(50, 3)
        y, w_BHTS = layer(x, mask=mask)[0], layer.weights(x, mask)
        for b in range(3):
            assert_same_maths(y[b : b + 1, mask[b]], layer(x[b : b + 1, mask[b]])[0], f"row {b}")
            assert_exact(w_BHTS[b][:, ~mask[b]], torch.zeros_like(w_BHTS[b][:, ~mask[b]]), "weights at padding")

    def test_law_08_padding_before_a_state_is_as_if_removed(self) -> None:
        layer = self.judged(8)
        if not layer.causal:
            pytest.skip(layer.exemptions()[3])
        mask = mask_with([(9, 41, 0), (0, 33, 17), (50, 0, 0)])
        x, more = self.inputs(50, 3), self.inputs(7, 3, seed=2)
        y, state = layer(x, mask=mask)[:2]
        after = layer(more, state)[0]
        first, middle = layer(x[:, :30], mask=mask[:, :30])[:2]
        assert_same_maths(
            torch.cat([first, layer(x[:, 30:], middle, mask=mask[:, 30:])[0]], 1), y, "split with padding"
        )
        for b in range(3):
            real = x[b : b + 1, mask[b]]
            whole = layer(torch.cat([real, more[b : b + 1]], 1))[0]
            assert_same_maths(after[b : b + 1], whole[:, real.shape[1] :], f"continuation of row {b}")

    def test_law_08_padding_after_a_state_is_as_if_removed(self) -> None:
        layer = self.judged(8)
        if not layer.causal:
            pytest.skip(layer.exemptions()[3])
        for before in (3, 20):
            first, middle, last = self.inputs(before, 3), self.inputs(12, 3, seed=2), self.inputs(5, 3, seed=3)
            mask = mask_with([(3, 9, 0), (0, 8, 4), (0, 12, 0)])
            state = self.state_of(layer, first)
            y, state = layer(middle, state, mask=mask)
            after = layer(last, state)[0]
            for b in range(3):
                whole = layer(torch.cat([first[b], middle[b][mask[b]], last[b]])[None])[0]
                assert_same_maths(torch.cat([y[b][mask[b]], after[b]]), whole[0, before:], f"row {b}")
