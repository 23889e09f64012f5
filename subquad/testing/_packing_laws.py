"""Law 15 of the contract: packed documents are as if each were alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from subquad.testing._subject import ContractOf
from subquad.testing.tools import assert_exact, assert_same_maths, with_gradients

DOC_IDS = torch.tensor(
    [[3] * 21 + [-1] * 2 + [3] * 4 + [9] + [3] * 22, [-1] * 3 + [7] * 8 + [0] * 33 + [-1] * 6, [5] * 50]
)
"""Packed rows: an id that comes again, padding inside of a document and at both ends, one token, one whole row."""
DOCUMENTS = (
    (0, [*range(21), *range(23, 27)]),
    (0, [27]),
    (0, [*range(28, 50)]),
    (1, [*range(3, 11)]),
    (1, [*range(11, 44)]),
    (2, [*range(50)]),
)
"""The row and the places of each document there."""
LAST = (2, 4, 5)
"""The last one of each row."""


class PackingLaws(ContractOf):
    """Several documents in a row are sequences of their own."""

    def test_law_15_packed_documents_are_as_if_alone_with_every_gradient(self) -> None:
        layer = self.judged(15)
        x = self.inputs(50, 3)

        def alone(x_BTD: Tensor) -> Tensor:
            y_BTD = torch.zeros_like(x_BTD)
            for b, places in DOCUMENTS:
                y_BTD[b, places] = layer(x_BTD[b : b + 1, places])[0][0]
            return y_BTD

        actual = with_gradients(layer, lambda x: layer(x, doc_ids=DOC_IDS)[0], x)
        for name, expected in with_gradients(layer, alone, x).items():
            assert_same_maths(actual[name], expected, name)

    def test_law_15_no_bit_depends_on_another_document(self) -> None:
        layer = self.judged(15, torch.float32)
        x = self.inputs(50, 3, torch.float32)
        chosen = DOC_IDS == 3
        weight = self.inputs(50, 3, torch.float32, seed=3).masked_fill(~chosen[..., None], 0.0)
        results = []
        for rubbish in (0.0, -2.0, 1e4):
            leaf = x.masked_fill(~chosen[..., None], rubbish).requires_grad_()
            y = layer(leaf, doc_ids=DOC_IDS)[0]
            (gradient,) = torch.autograd.grad((y * weight).sum(), leaf)
            results.append((y[chosen], gradient))
        for y, gradient in results:
            assert_exact(y, results[0][0], "outputs beside other documents")
            assert_exact(gradient, results[0][1], "gradients beside other documents")
            assert_exact(gradient[~chosen], torch.zeros_like(gradient[~chosen]), "gradients to other documents")

    def test_law_15_weights_stay_inside_documents(self) -> None:
        layer = self.judged(15)
        x = self.inputs(50, 3)
        left = layer.weights(x, doc_ids=DOC_IDS)
        for b, places in DOCUMENTS:
            own = torch.tensor(places)
            assert_same_maths(left[b, :, own[:, None], own], layer.weights(x[b : b + 1, own])[0], f"weights in row {b}")
            left[b, :, own[:, None], own] = 0.0
        assert_exact(left, torch.zeros_like(left), "weights between documents")

    def test_law_15_the_state_is_that_of_the_last_documents(self) -> None:
        layer = self.judged(15)
        if not layer.causal:
            pytest.skip(layer.exemptions()[3])
        x, more = self.inputs(50, 3), self.inputs(7, 3, seed=2)
        state = layer(x, doc_ids=DOC_IDS)[1]
        after = layer(more, state)[0]
        for row, number in enumerate(LAST):
            real = x[row : row + 1, DOCUMENTS[number][1]]
            whole = layer(torch.cat([real, more[row : row + 1]], 1))[0]
            assert_same_maths(after[row : row + 1], whole[:, real.shape[1] :], f"continuation of row {row}")
