"""The laws that every mechanism keeps (`subquad.attention.laws.Law`) as tests, which need torch alone."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import SkipTest

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from subquad.attention.laws import Law
from subquad.config import suggest
from subquad.ops import flops
from subquad.ops.backends import use_backend
from subquad.testing.states import LawsOfStates
from subquad.testing.tools import (
    GROWTH,
    LINEAR_GROWTH,
    LOW_PRECISION,
    assert_exact,
    assert_in_budget,
    assert_same_maths,
    block_sizes,
    largest_allocation,
    mask_with,
    sharpened,
    with_gradients,
)

DOC_IDS = torch.tensor(
    [[3] * 21 + [-1] * 2 + [3] * 4 + [9] + [3] * 22, [-1] * 3 + [7] * 8 + [0] * 33 + [-1] * 6, [5] * 50]
)
"""Packed rows: an id used twice, padding inside a document and at both ends, a document of one token, a whole row."""
DOCUMENTS = (
    (0, [*range(21), *range(23, 27)]),
    (0, [27]),
    (0, [*range(28, 50)]),
    (1, [*range(3, 11)]),
    (1, [*range(11, 44)]),
    (2, [*range(50)]),
)
"""The row and the slots of each document in `DOC_IDS`."""
LAST = (2, 4, 5)
"""Index in `DOCUMENTS` of the last document of each row."""


class Laws(LawsOfStates):
    """Test the laws on the mechanism `name` with `options`."""

    @staticmethod
    def law_of(test: str) -> Law | None:
        """Return the law that a test of this class, given by name, is of; None for other tests."""
        words = test.replace("_", " ") if hasattr(Laws, test) else ""
        return next((law for law in Law if words.startswith(f"test {law} ")), None)

    @torch.no_grad()
    def test_the_oracle_agrees(self) -> None:
        layer, x = self.make(), self.inputs(self.oracle_tokens, 1)
        for parameter in layer.parameters():  # many begin at zero or one, where they would not count
            parameter.add_(0.3 * torch.randn_like(parameter))
        assert_same_maths(layer(x)[0][0], self.oracle(layer, x[0]), "the oracle")

    def test_weights_are_causal_and_rows_sum_to_one(self) -> None:
        with self.judging(Law.WEIGHTS) as layer:
            w_BHTS = layer.weights(self.inputs(self.tokens))
            if layer.causal:
                assert_exact(w_BHTS, w_BHTS.tril(), "weights above the diagonal")
            if layer.is_distribution:
                assert_same_maths(w_BHTS.sum(-1), torch.ones_like(w_BHTS[..., 0]), "sum of each row")

    def test_definition_is_what_forward_computes_with_every_gradient(self) -> None:
        with self.judging(Law.DEFINITION) as layer:
            x = self.inputs(self.tokens)
            actual, expected = (with_gradients(layer, f, x) for f in (self.forward_of(layer), layer.definition))
            for name in expected:
                assert_same_maths(actual[name], expected[name], name)

    def test_cost_grows_as_the_class_says(self) -> None:
        flops.register()
        with self.judging(Law.COST, torch.float32) as layer:
            counts, largest = [layer.cost(1024).mixing_flops], []
            for tokens in (2048, 4096):
                x = self.inputs(tokens, 1, torch.float32)
                with torch.no_grad():
                    with FlopCounterMode(display=False) as counter:
                        layer(x)
                    largest.append(largest_allocation(partial(layer, x)))
                cost = layer.cost(tokens)
                counts.append(counter.get_total_flops() - cost.projection_flops)
                assert counts[-1] == cost.mixing_flops, f"FLOPs: {cost.mixing_flops} by cost, {counts[-1]} counted"
            first, second = counts[1] - counts[0], counts[2] - counts[1]
            least, most = GROWTH[layer.cost_order]
            allowed = f"cost_order={layer.cost_order!r} allows {least} to {most} times as many"
            added = f"FLOPs: {first} more for tokens 1025 to 2048, {second} more for tokens 2049 to 4096; {allowed}"
            assert least * first <= second <= most * first, added
            kept = f"largest tensor: {largest[0]} bytes for 2048 tokens, {largest[1]} for 4096; {LINEAR_GROWTH} times"
            assert largest[1] < LINEAR_GROWTH * largest[0], f"{kept} as many is the limit"

    def test_block_sizes_change_nothing(self) -> None:
        with self.judging(Law.BLOCK_SIZES) as layer:
            x = self.inputs(self.tokens)
            whole = with_gradients(layer, self.forward_of(layer), x)
            for size in (1, 4, 16, 128):
                with block_sizes(size):
                    for name, actual in with_gradients(layer, self.forward_of(layer), x).items():
                        assert_same_maths(actual, whole[name], f"{name} with blocks of {size}")

    def test_block_sizes_fit_any_number_of_tokens(self) -> None:
        with self.judging(Law.BLOCK_SIZES) as layer:
            for batch, tokens in ((2, 0), (2, 1), (2, 2), (2, 17), (0, 5)):
                x = self.inputs(tokens, batch)
                actual = with_gradients(layer, self.forward_of(layer), x)
                shapes = tuple(actual["output"].shape), tuple(actual["gradient of x"].shape)
                assert shapes == (x.shape, x.shape), f"shapes at B={batch}, T={tokens}: {shapes}"
                for name, expected in with_gradients(layer, layer.definition, x).items():
                    assert_same_maths(actual[name], expected, f"{name} at B={batch}, T={tokens}")

    def test_padding_is_not_seen(self) -> None:
        with self.judging(Law.PADDING, torch.float32) as layer:
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

    def test_padding_is_as_if_removed(self) -> None:
        with self.judging(Law.PADDING) as layer:
            mask = mask_with([(9, 41, 0), (0, 33, 17), (50, 0, 0)])
            x = self.inputs(50, 3)
            y, w_BHTS = layer(x, mask=mask)[0], layer.weights(x, mask)
            for b in range(3):
                assert_same_maths(y[b : b + 1, mask[b]], layer(x[b : b + 1, mask[b]])[0], f"outputs of row {b}")
                assert_exact(w_BHTS[b][:, ~mask[b]], torch.zeros_like(w_BHTS[b][:, ~mask[b]]), "weights at padding")

    def test_padding_before_a_state_is_as_if_removed(self) -> None:
        with self.judging(Law.PADDING) as layer:
            if not layer.causal:
                raise SkipTest(layer.exemptions()[Law.SPLIT])
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

    def test_padding_after_a_state_is_as_if_removed(self) -> None:
        with self.judging(Law.PADDING) as layer:
            if not layer.causal:
                raise SkipTest(layer.exemptions()[Law.SPLIT])
            for before in (3, 20):
                first, middle, last = self.inputs(before, 3), self.inputs(12, 3, seed=2), self.inputs(5, 3, seed=3)
                mask = mask_with([(3, 9, 0), (0, 8, 4), (0, 12, 0)])
                state = self.state_of(layer, first)
                y, state = layer(middle, state, mask=mask)[:2]
                after = layer(last, state)[0]
                for b in range(3):
                    whole = layer(torch.cat([first[b], middle[b][mask[b]], last[b]])[None])[0]
                    assert_same_maths(torch.cat([y[b][mask[b]], after[b]]), whole[0, before:], f"outputs of row {b}")

    def test_no_future_token_changes_a_bit(
        self, tokens: int = 150, fraction: float = 0.5, dtype: torch.dtype = torch.float32, sharpness: float = 1e2
    ) -> None:
        with self.judging(Law.NO_FUTURE) as layer, torch.no_grad():
            layer = sharpened(layer, sharpness).to(dtype)
            now = int(fraction * (tokens - 1))
            x = self.inputs(tokens, 1, dtype)
            other = x.clone()
            other[:, now + 1 :] = -3 * self.inputs(tokens, 1, dtype, seed=2)[:, now + 1 :]
            y, changed = layer(x)[0], layer(other)[0]
            assert y.isfinite().all(), f"outputs are not finite, sharpness {sharpness:g}"
            what = f"outputs before and at token {now}, later ones changed, sharpness {sharpness:g}"
            assert_exact(changed[:, : now + 1], y[:, : now + 1], what)

    def test_batch_is_its_rows(self) -> None:
        with self.judging(Law.BATCH) as layer:
            x = self.inputs(self.tokens, 3)
            assert_same_maths(
                layer(x)[0], torch.cat([layer(row)[0] for row in x.split(1)]), "outputs of a batch of three"
            )

    def test_precision_of_each_backend_and_dtype_stays_in_budget(self) -> None:
        for dtype in LOW_PRECISION:
            with self.judging(Law.PRECISION, dtype) as layer:
                inputs = [self.inputs(self.tokens, dtype=dtype, seed=1 + n) for n in range(self.judged_together)]

                def sample(
                    f: Callable[[Tensor], dict[str, Tensor]], inputs: list[Tensor] = inputs
                ) -> dict[str, Tensor]:
                    found = [f(x) for x in inputs]
                    return {name: torch.stack([one[name] for one in found]) for name in found[0]}

                exact = sample(partial(self.exact, dtype))
                plain = sample(partial(with_gradients, layer, layer.definition))
                for backend in ("reference", "torch", "sequential"):
                    with use_backend(backend):
                        actual = sample(partial(with_gradients, layer, self.forward_of(layer)))
                    for name in exact:
                        assert_in_budget(actual[name], plain[name], exact[name], dtype, f"{name} on {backend}")

    def test_precision_under_autocast_stays_in_budget(self) -> None:
        def autocast(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
            return torch.autocast("cpu", torch.bfloat16)(lambda x: f(x).float())

        with self.judging(Law.PRECISION, torch.float32) as layer:
            x = self.inputs(self.tokens, dtype=torch.float32)
            exact = self.exact(torch.float32, x)
            plain = with_gradients(layer, autocast(layer.definition), x)
            actual = with_gradients(layer, autocast(self.forward_of(layer)), x)
            for name in exact:
                assert_in_budget(actual[name], plain[name], exact[name], torch.bfloat16, f"{name} under autocast")

    def compiles(self, backend: str) -> None:
        """Test the law of compiling with `torch.compile(backend=backend)`."""
        torch._dynamo.reset()
        with self.judging(Law.COMPILED, torch.float32) as layer:
            x = self.inputs(self.tokens, dtype=torch.float32)
            compiled = torch.compile(self.forward_of(layer), fullgraph=True, backend=backend)
            exact, actual = self.exact(torch.float32, x), with_gradients(layer, compiled, x)

            def compare(plain: dict[str, Tensor]) -> None:
                for name in exact:
                    what = f"{name} compiled by {backend}"
                    assert_in_budget(actual[name], plain[name], exact[name], torch.float32, what)

            try:
                compare(with_gradients(layer, self.forward_of(layer), x))
            except AssertionError:
                # Inductor sums sequentially where eager sums pairwise, so compare with the plain form compiled alike.
                torch._dynamo.reset()
                compare(with_gradients(layer, torch.compile(layer.definition, backend=backend), x))

    def test_compiled_whole_with_aot_eager(self) -> None:
        self.compiles("aot_eager")

    def test_compiled_whole_with_inductor(self) -> None:
        if not self.with_inductor:
            raise SkipTest("with_inductor=False")
        if not any(shutil.which(compiler) for compiler in ("c++", "g++", "clang++")):
            raise SkipTest("no C++ compiler")
        self.compiles("inductor")

    def long_inputs(self, dtype: torch.dtype) -> None:
        """Test the law of long inputs in `dtype`."""
        with self.judging(Law.LONG, dtype, num_heads=self.fewest_heads) as layer:
            tokens = 2_048 if layer.cost_order == "quadratic" else 32_768
            values = with_gradients(layer, self.forward_of(layer), self.inputs(tokens, 1, dtype))
            for name, value in values.items():
                assert value.isfinite().all(), f"{name} is not finite"

    def test_long_inputs_in_float16_are_finite(self) -> None:
        self.long_inputs(torch.float16)

    def test_long_inputs_in_bfloat16_are_finite(self) -> None:
        self.long_inputs(torch.bfloat16)

    def test_documents_packed_are_as_if_alone_with_every_gradient(self) -> None:
        with self.judging(Law.DOCUMENTS) as layer:
            x = self.inputs(50, 3)

            def alone(x_BTD: Tensor) -> Tensor:
                y_BTD = torch.zeros_like(x_BTD)
                for b, places in DOCUMENTS:
                    y_BTD[b, places] = layer(x_BTD[b : b + 1, places])[0][0]
                return y_BTD

            actual = with_gradients(layer, lambda x: layer(x, doc_ids=DOC_IDS)[0], x)
            for name, expected in with_gradients(layer, alone, x).items():
                assert_same_maths(actual[name], expected, name)

    def test_documents_change_no_bit_of_another(self) -> None:
        with self.judging(Law.DOCUMENTS, torch.float32) as layer:
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

    def test_documents_keep_weights_inside(self) -> None:
        with self.judging(Law.DOCUMENTS) as layer:
            x = self.inputs(50, 3)
            left = layer.weights(x, doc_ids=DOC_IDS)
            for b, places in DOCUMENTS:
                own = torch.tensor(places)
                assert_same_maths(
                    left[b, :, own[:, None], own], layer.weights(x[b : b + 1, own])[0], f"weights in row {b}"
                )
                left[b, :, own[:, None], own] = 0.0
            assert_exact(left, torch.zeros_like(left), "weights between documents")

    def test_documents_leave_the_state_of_the_last(self) -> None:
        with self.judging(Law.DOCUMENTS) as layer:
            if not layer.causal:
                raise SkipTest(layer.exemptions()[Law.SPLIT])
            x, more = self.inputs(50, 3), self.inputs(7, 3, seed=2)
            state = layer(x, doc_ids=DOC_IDS)[1]
            after = layer(more, state)[0]
            for row, number in enumerate(LAST):
                real = x[row : row + 1, DOCUMENTS[number][1]]
                whole = layer(torch.cat([real, more[row : row + 1]], 1))[0]
                assert_same_maths(after[row : row + 1], whole[:, real.shape[1] :], f"continuation of row {row}")


def check_law(law: Law | str, name: str, /, **options: Any) -> list[str]:
    """Judge the mechanism `name`, with `options` beside `dim` and `num_heads`, by one law; it needs no pytest.

    The tests are those of `AttentionContract`, with one input where that draws several. Returns why tests were skipped,
    such as the reason of an exemption. Raises `AssertionError` where the law is broken, and `ValueError` for an unknown
    law or mechanism, `TypeError` for a layer or class in place of the name.
    """
    words = [each.value for each in Law]
    if law not in words:
        raise ValueError(f"unknown law {law!r}; {suggest(law, words)}")
    given: Any = name
    if not isinstance(given, str):
        own, got = getattr(given, "name", "latte"), given if isinstance(given, type) else type(given)
        raise TypeError(
            "check_law builds layers itself: give the mechanism's name and its options, such as "
            f"check_law({str(law)!r}, {own!r}, ...), got {got}"
        )
    judged = type("Given", (Laws,), {"name": name, "options": options})()
    skipped = []
    for test in dir(Laws):
        if Laws.law_of(test) == law:
            try:
                getattr(judged, test)()
            except SkipTest as reason:
                skipped.append(str(reason))
    return list(dict.fromkeys(skipped))
