"""Which backend engine B chooses without a request, by device, dtype, pattern and options."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from subquad.ops import attend
from subquad.ops.patterns import Blocks, Causal, Dilated, Globals, Random, Segments, Shifted, Strided, Window
from subquad.ops.patterns.sparse import Columns

KERNELS = [Causal(), Window(width=4), Segments(size=4), Shifted(size=4, shift=2), Blocks(size=4)]
NO_KERNELS = [Globals(count=1, back=1, ahead_blocks=1), Random(size=8, index=1, of=2, skip=1, back=0)]
FOLDED = [Dilated(width=4, dilation=3), Strided(stride=5), Columns(size=8, last=3)]


def default(pattern, device="cuda", dtype=torch.bfloat16, channels=64, training=True, dropout_p=0.0):
    with FakeTensorMode():  # a GPU that need not be there
        q, k, v = (torch.empty(1, 2, 8, channels, dtype=dtype, device=device) for _ in range(3))
        return attend._default(q.requires_grad_(training), k, v, pattern, dropout_p)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("pattern", KERNELS, ids=repr)
def test_on_a_gpu_it_is_the_kernels_where_they_have_the_pattern(pattern, dtype, training):
    assert default(pattern, dtype=dtype, training=training) == "triton"


@pytest.mark.parametrize("pattern", NO_KERNELS, ids=repr)
def test_else_flex_attention_in_training(pattern):
    assert default(pattern) == "flex"
    assert default(pattern, training=False) == "torch", "shapes change, and each would be compiled"


@pytest.mark.parametrize("pattern", KERNELS, ids=repr)
def test_without_triton_flex_attention_trains_all(pattern, monkeypatch):
    monkeypatch.setattr(attend, "HAS_TRITON", False)
    assert default(pattern) == "flex"
    assert default(pattern, training=False) == "torch"


@pytest.mark.parametrize("pattern", FOLDED, ids=repr)
def test_patterns_that_fold_to_dense_ones_are_folded(pattern):
    assert default(pattern) == "torch"


@pytest.mark.parametrize("pattern", [*KERNELS, *NO_KERNELS], ids=repr)
@pytest.mark.parametrize(
    "option", [{"device": "cpu"}, {"dropout_p": 0.1}, {"dtype": torch.float64}, {"channels": 300}], ids=str
)
def test_what_the_others_do_not_take_runs_on_torch(pattern, option):
    assert default(pattern, **option) == "torch"
