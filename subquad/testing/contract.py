"""The contract that every mechanism keeps: the laws of `subquad.attention.base.LAWS` as tests."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from subquad.attention import Attention, build
from subquad.attention.base import LAWS
from subquad.ops import flops
from subquad.ops.backends import use_backend
from subquad.program import install
from subquad.state import State
from subquad.testing.tools import (
    LINEAR_GROWTH,
    LOW_PRECISION,
    assert_exact,
    assert_in_budget,
    assert_same_maths,
    block_sizes,
    in_pieces,
    largest_allocation,
    mask_with,
    sharpened,
    with_gradients,
)

try:
    import pytest
    from hypothesis import HealthCheck, given, settings
    from hypothesis import strategies as st
except ImportError as error:
    raise ImportError(f"AttentionContract needs {error.name}: {install('subquad[testing]')}") from error

# All subclasses share one test body, whose inputs don't depend on the subclass that runs it. A profile that a project
# loads after this module does not reach its tests, and a first call may take as long as it does.
drawn = partial(settings, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
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


class AttentionContract:
    """Test the laws on the mechanism `name` with `options`: a test class sets these two and inherits every test."""

    name: ClassVar[str]
    """Registered name of the mechanism."""
    options: ClassVar[dict[str, Any]] = {}
    """Options beside `dim` and `num_heads`."""
    laws: ClassVar[Collection[int]] = tuple(LAWS)
    """Laws to test in a quick run. A `conftest.py` may mark the tests of other laws as slow, as subquad's own does."""
    dim: ClassVar[int] = 16
    """Model width D."""
    num_heads: ClassVar[int] = 2
    """Heads H."""
    tokens: ClassVar[int] = 70
    """Tokens T of the short inputs."""
    judged_together: ClassVar[int] = 1
    """Inputs that law 11 judges as one sample; more where a gradient of few numbers may be right by luck in one."""
    fewest_heads: ClassVar[int] = 1
    """Heads for the longest inputs (law 14)."""
    oracle_tokens: ClassVar[int] = 19
    """Tokens of the sequence that the oracle is compared on."""
    with_inductor: ClassVar[bool] = True
    """Whether law 12 also compiles with inductor, which takes seconds; False skips that test."""

    def new(self, num_heads: int) -> Attention:
        """Build the mechanism with the options of this class."""
        return build(self.name, dim=self.dim, num_heads=num_heads, **self.options)

    def make(self, dtype: torch.dtype = torch.float64, num_heads: int | None = None) -> Attention:
        """Build the mechanism in `dtype` and evaluation mode, with the same weights at every call."""
        torch.manual_seed(0)
        return self.new(num_heads or self.num_heads).to(dtype).eval()

    def judged(self, law: int, dtype: torch.dtype = torch.float64, num_heads: int | None = None) -> Attention:
        """Return `make(dtype, num_heads)`; skip the test with the reason if the mechanism is exempt from `law`."""
        layer = self.make(dtype, num_heads)
        if law in layer.exemptions():
            pytest.skip(f"{layer.name}, law {law}: {layer.exemptions()[law]}")
        return layer

    def inputs(self, tokens: int, batch: int = 2, dtype: torch.dtype = torch.float64, seed: int = 1) -> Tensor:
        """Return random inputs `[batch, tokens, dim]`, the same at every call."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(batch, tokens, self.dim, dtype=torch.float64, generator=generator).to(dtype)

    def forward_of(self, layer: Attention) -> Callable[[Tensor], Tensor]:
        """Return `layer` as a function from inputs to outputs, without the state."""
        return lambda x: layer(x)[0]

    def exact(self, dtype: torch.dtype, x: Tensor) -> dict[str, Tensor]:
        """Return the definition's output and gradients in float64, for weights and inputs rounded to `dtype`."""
        layer = self.make(dtype).double()
        return with_gradients(layer, layer.definition, x.double())

    def oracle(self, layer: Attention, x_TD: Tensor) -> Tensor:
        """Return the outputs `[T, D]` of one sequence: the paper's equations token by token, in float64.

        The definition and the fast form come from one function, `mix`, and agree on its mistakes. So an oracle shares
        no code with the mechanism: it reads the layer's parameters and options, and has plain loops.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define oracle(self, layer, x_TD): the outputs [T, D] of one sequence by the "
            "paper's equations, token by token, in plain loops over the layer's parameters"
        )

    def state_of(self, layer: Attention, x: Tensor) -> State:
        """Return the state after `x`."""
        return layer(x)[1]

    @torch.no_grad()
    def test_the_oracle_agrees(self) -> None:
        layer, x = self.make(), self.inputs(self.oracle_tokens, 1)
        for parameter in layer.parameters():  # many begin at zero or one, where they would not count
            parameter.add_(0.3 * torch.randn_like(parameter))
        assert_same_maths(layer(x)[0][0], self.oracle(layer, x[0]), "the oracle")

    def test_law_01_weights_are_causal_and_rows_sum_to_one(self) -> None:
        layer = self.judged(1)
        w_BHTS = layer.weights(self.inputs(self.tokens))
        if layer.causal:
            assert_exact(w_BHTS, w_BHTS.tril(), "weights above the diagonal")
        if layer.is_distribution:
            assert_same_maths(w_BHTS.sum(-1), torch.ones_like(w_BHTS[..., 0]), "sum of each row")

    def test_law_02_forward_is_weights_times_values_with_every_gradient(self) -> None:
        layer = self.judged(2)
        x = self.inputs(self.tokens)
        actual, expected = (with_gradients(layer, f, x) for f in (self.forward_of(layer), layer.definition))
        for name in expected:
            assert_same_maths(actual[name], expected[name], name)

    @drawn(max_examples=10)
    @given(cuts=st.lists(st.integers(0, 70), min_size=1, max_size=4))
    def test_law_03_any_split_gives_the_same_result(self, cuts: list[int]) -> None:
        layer = self.judged(3)
        x = self.inputs(self.tokens)
        assert_same_maths(in_pieces(layer, x, sorted(cuts)), layer(x)[0], f"cut at {sorted(cuts)}")

    def test_law_03_gradients_pass_through_the_state(self) -> None:
        layer = self.judged(3)
        x = self.inputs(self.tokens)
        pieces = with_gradients(layer, lambda x: in_pieces(layer, x, [23, 40]), x)
        for name, expected in with_gradients(layer, self.forward_of(layer), x).items():
            assert_same_maths(pieces[name], expected, name)

    def test_law_04_one_token_at_a_time_gives_the_same_result(self) -> None:
        layer = self.judged(4)
        x = self.inputs(self.tokens)
        assert_same_maths(in_pieces(layer, x, list(range(1, self.tokens))), layer(x)[0], "token by token")

    def test_law_05_the_state_stops_growing(self) -> None:
        layer = self.judged(5, torch.float32)
        states = [self.state_of(layer, self.inputs(n, 1, torch.float32)) for n in (1024, 2048)]
        short, long = (state.nbytes for state in states)
        assert (short < long) if layer.state_grows else (short == long), (short, long)
        assert layer.state_bytes(2048) == long
        for name, entry in states[1].entries.items():
            if isinstance(entry, Tensor):
                assert entry.untyped_storage().nbytes() == entry.nbytes, f"{name} keeps a larger tensor alive"

    def test_law_06_cost_grows_as_the_class_says(self) -> None:
        flops.register()
        layer = self.judged(6, torch.float32)
        counts, largest = [], []
        for tokens in (2048, 4096):
            x = self.inputs(tokens, 1, torch.float32)
            with torch.no_grad():
                with FlopCounterMode(display=False) as counter:
                    layer(x)
                largest.append(largest_allocation(partial(layer, x)))
            cost = layer.cost(tokens)
            counts.append(counter.get_total_flops() - cost.projection_flops)
            assert counts[-1] == cost.mixing_flops
        linear = counts[1] < LINEAR_GROWTH * counts[0]
        assert linear == (layer.cost_order == "linear"), counts
        assert largest[1] < LINEAR_GROWTH * largest[0], largest

    def test_law_07_block_sizes_change_nothing(self) -> None:
        layer = self.judged(7)
        x = self.inputs(self.tokens)
        whole = with_gradients(layer, self.forward_of(layer), x)
        for size in (1, 4, 16, 128):
            with block_sizes(size):
                for name, actual in with_gradients(layer, self.forward_of(layer), x).items():
                    assert_same_maths(actual, whole[name], f"{name} with blocks of {size}")

    def test_law_07_any_number_of_tokens_works(self) -> None:
        layer = self.judged(7)
        for batch, tokens in ((2, 0), (2, 1), (2, 2), (2, 17), (0, 5)):
            x = self.inputs(tokens, batch)
            actual = with_gradients(layer, self.forward_of(layer), x)
            assert actual["output"].shape == actual["gradient of x"].shape == x.shape
            for name, expected in with_gradients(layer, layer.definition, x).items():
                assert_same_maths(actual[name], expected, f"{name} at B={batch}, T={tokens}")

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
            y, state = layer(middle, state, mask=mask)[:2]
            after = layer(last, state)[0]
            for b in range(3):
                whole = layer(torch.cat([first[b], middle[b][mask[b]], last[b]])[None])[0]
                assert_same_maths(torch.cat([y[b][mask[b]], after[b]]), whole[0, before:], f"row {b}")

    @drawn(max_examples=12)
    @given(
        tokens=st.integers(1, 300),
        fraction=st.floats(0, 1),
        dtype=st.sampled_from(LOW_PRECISION),
        sharpness=st.sampled_from((1.0, 1e2, 1e4)),
    )
    def test_law_09_no_bit_depends_on_the_future(
        self, tokens: int, fraction: float, dtype: torch.dtype, sharpness: float
    ) -> None:
        layer = sharpened(self.judged(9), sharpness).to(dtype)
        now = int(fraction * (tokens - 1))
        x = self.inputs(tokens, 1, dtype)
        other = x.clone()
        other[:, now + 1 :] = -3 * self.inputs(tokens, 1, dtype, seed=2)[:, now + 1 :]
        with torch.no_grad():
            y, changed = layer(x)[0], layer(other)[0]
        assert y.isfinite().all(), f"outputs in {dtype} at {tokens} tokens, sharpness {sharpness:g}"
        assert_exact(changed[:, : now + 1], y[:, : now + 1], f"T={tokens}, tokens after {now} changed")

    def test_law_10_a_batch_is_its_rows(self) -> None:
        layer = self.judged(10)
        x = self.inputs(self.tokens, 3)
        assert_same_maths(layer(x)[0], torch.cat([layer(row)[0] for row in x.split(1)]), "batch of three")

    def test_law_11_each_backend_and_dtype_stays_in_budget(self) -> None:
        for dtype in LOW_PRECISION:
            layer = self.judged(11, dtype)
            inputs = [self.inputs(self.tokens, dtype=dtype, seed=1 + n) for n in range(self.judged_together)]

            def sample(f: Callable[[Tensor], dict[str, Tensor]], inputs: list[Tensor] = inputs) -> dict[str, Tensor]:
                found = [f(x) for x in inputs]
                return {name: torch.stack([one[name] for one in found]) for name in found[0]}

            exact, plain = sample(partial(self.exact, dtype)), sample(partial(with_gradients, layer, layer.definition))
            for backend in ("reference", "torch", "sequential"):
                with use_backend(backend):
                    actual = sample(partial(with_gradients, layer, self.forward_of(layer)))
                for name in exact:
                    assert_in_budget(actual[name], plain[name], exact[name], dtype, f"{name} on {backend}")

    def test_law_11_autocast_stays_in_budget(self) -> None:
        layer, x = self.judged(11, torch.float32), self.inputs(self.tokens, dtype=torch.float32)
        exact = self.exact(torch.float32, x)

        def autocast(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
            return torch.autocast("cpu", torch.bfloat16)(lambda x: f(x).float())

        plain = with_gradients(layer, autocast(layer.definition), x)
        actual = with_gradients(layer, autocast(self.forward_of(layer)), x)
        for name in exact:
            assert_in_budget(actual[name], plain[name], exact[name], torch.bfloat16, f"{name} under autocast")

    def compiles(self, backend: str) -> None:
        """Test law 12 with `torch.compile(backend=backend)`."""
        torch._dynamo.reset()
        layer, x = self.judged(12, torch.float32), self.inputs(self.tokens, dtype=torch.float32)
        compiled = torch.compile(self.forward_of(layer), fullgraph=True, backend=backend)
        exact, actual = self.exact(torch.float32, x), with_gradients(layer, compiled, x)

        def compare(plain: dict[str, Tensor]) -> None:
            for name in exact:
                assert_in_budget(actual[name], plain[name], exact[name], torch.float32, f"{name} compiled by {backend}")

        try:
            compare(with_gradients(layer, self.forward_of(layer), x))
        except AssertionError:
            # Inductor sums sequentially where eager sums pairwise, so compare with the plain form compiled alike.
            torch._dynamo.reset()
            compare(with_gradients(layer, torch.compile(layer.definition, backend=backend), x))

    def test_law_12_compiles_whole_with_aot_eager(self) -> None:
        self.compiles("aot_eager")

    def test_law_12_compiles_whole_with_inductor(self) -> None:
        if not self.with_inductor:
            pytest.skip("with_inductor=False")
        if not any(shutil.which(compiler) for compiler in ("c++", "g++", "clang++")):
            pytest.skip("no C++ compiler")
        self.compiles("inductor")

    def test_law_13_weights_and_state_survive_saving(self, tmp_path: Path) -> None:
        layer, x = self.judged(13), self.inputs(self.tokens)
        other = self.new(self.num_heads).to(torch.float64).eval()
        other.load_state_dict(layer.state_dict())
        assert_same_maths(other(x)[0], layer(x)[0], "after save and load")
        if not layer.causal:
            return
        state = self.state_of(layer, x)
        state.save(tmp_path / "state.safetensors")
        loaded = State.load(tmp_path / "state.safetensors", config_hash=other.config_hash)
        assert loaded.entries.keys() == state.entries.keys()
        for name, entry in state.entries.items():
            assert_exact(torch.as_tensor(loaded[name]), torch.as_tensor(entry), name)
        # Not bitwise: a tensor's alignment in memory may change the order of sums in a matmul.
        assert_same_maths(other(x, loaded)[0], layer(x, state)[0], "continuation after save and load")

    def long_inputs(self, dtype: torch.dtype) -> None:
        """Test law 14 in `dtype`."""
        layer = self.judged(14, dtype, num_heads=self.fewest_heads)
        tokens = 32_768 if layer.cost_order == "linear" else 2_048
        values = with_gradients(layer, self.forward_of(layer), self.inputs(tokens, 1, dtype))
        for name, value in values.items():
            assert value.isfinite().all(), f"{name} in {dtype} at {tokens} tokens"

    def test_law_14_long_inputs_in_float16_are_finite(self) -> None:
        self.long_inputs(torch.float16)

    def test_law_14_long_inputs_in_bfloat16_are_finite(self) -> None:
        self.long_inputs(torch.bfloat16)

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
