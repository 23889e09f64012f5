import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from subquad.ops import linear_cross_entropy, loss
from subquad.testing import assert_exact, assert_in_budget, assert_same_maths

N, D, V = 23, 6, 11
WHOLE, CHUNKED = loss.CHUNK_ENTRIES, 3 * V
paths = pytest.mark.parametrize("entries", [WHOLE, CHUNKED, 1], ids=["whole", "chunks", "row_by_row"])


@pytest.fixture
def path(monkeypatch, entries):
    monkeypatch.setattr(loss, "CHUNK_ENTRIES", entries)


def labels(ignored=(2, 7, 22), ignore_index=-100):
    y_N = torch.arange(N) * 5 % V
    y_N[list(ignored)] = ignore_index
    return y_N


def plain(h, weight, y, bias=None, ignore_index=-100, reduction="mean"):
    logits = F.linear(h, weight, bias)
    return F.cross_entropy(
        logits.to(torch.promote_types(logits.dtype, torch.float32)), y, ignore_index=ignore_index, reduction=reduction
    )


@paths
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.usefixtures("path")
def test_it_is_torchs_cross_entropy_with_every_gradient(random, differentiated, with_bias, reduction):
    inputs = [random(N, D), random(V, D, seed=1)] + ([random(V, seed=2)] if with_bias else [])
    y = labels()
    actual = differentiated(
        lambda h, w, bias=None: (linear_cross_entropy(h, w, y, bias=bias, reduction=reduction),), inputs
    )
    expected = differentiated(lambda h, w, bias=None: (plain(h, w, y, bias, reduction=reduction),), inputs)
    for a, e in zip(actual, expected, strict=True):
        assert_same_maths(a, e)


@paths
@pytest.mark.usefixtures("path")
def test_another_ignore_index(random, differentiated):
    y = labels(ignore_index=3)
    inputs = [random(N, D), random(V, D, seed=1)]
    actual = differentiated(lambda h, w: (linear_cross_entropy(h, w, y, ignore_index=3),), inputs)
    expected = differentiated(lambda h, w: (plain(h, w, y, ignore_index=3),), inputs)
    for a, e in zip(actual, expected, strict=True):
        assert_same_maths(a, e)


@paths
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.usefixtures("path")
def test_all_ignored_gives_zero_and_zero_gradients(random, differentiated, reduction):
    y = labels(range(N))
    results = differentiated(
        lambda h, w, b: (linear_cross_entropy(h, w, y, bias=b, reduction=reduction),),
        [random(N, D), random(V, D, seed=1), random(V, seed=2)],
    )
    for result in results:
        assert_exact(result, torch.zeros_like(result))


@paths
@pytest.mark.usefixtures("path")
def test_no_tokens_give_zero(random):
    h, w, y = random(0, D), random(V, D), torch.zeros(0, dtype=torch.long)
    assert_exact(linear_cross_entropy(h, w, y), torch.zeros((), dtype=torch.float64))
    assert linear_cross_entropy(h, w, y, reduction="none").shape == (0,)


@paths
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.usefixtures("path")
def test_low_precision_stays_in_budget(random, differentiated, dtype):
    # Not where the plain form's sum over 20 tokens happens to have no rounding error at all.
    inputs = [random(N, D, seed=12, dtype=dtype), random(V, D, seed=13, dtype=dtype), random(V, seed=14, dtype=dtype)]
    y = labels()
    exact = differentiated(lambda h, w, b: (plain(h, w, y, b),), [x.double() for x in inputs])
    expected = differentiated(lambda h, w, b: (plain(h, w, y, b),), inputs)
    actual = differentiated(lambda h, w, b: (linear_cross_entropy(h, w, y, bias=b),), inputs)
    assert actual[0].dtype == torch.float32
    for a, p, e in zip(actual, expected, exact, strict=True):
        assert a.isfinite().all()
        assert_in_budget(a, p, e, dtype)


@paths
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.usefixtures("path")
def test_autocast_stays_in_budget(random, differentiated, with_bias):
    inputs = [random(N, D, dtype=torch.float32), random(V, D, seed=1, dtype=torch.float32)]
    inputs += [random(V, seed=2, dtype=torch.float32)] if with_bias else []
    y = labels()

    def autocast(f):
        def run(h, w, bias=None):
            with torch.autocast("cpu", torch.bfloat16):
                return (f(h, w, bias),)

        return run

    exact = differentiated(lambda h, w, b=None: (plain(h, w, y, b),), [x.double() for x in inputs])
    expected = differentiated(autocast(lambda h, w, b: plain(h, w, y, b)), inputs)
    actual = differentiated(autocast(lambda h, w, b: linear_cross_entropy(h, w, y, bias=b)), inputs)
    for a, p, e in zip(actual, expected, exact, strict=True):
        assert a.dtype == torch.float32
        assert_in_budget(a, p, e, torch.bfloat16)


@paths
@pytest.mark.usefixtures("path")
def test_extreme_logits_are_finite(random, differentiated):
    inputs = [1e4 * random(N, D, dtype=torch.float32).sign(), random(V, D, seed=1, dtype=torch.float32).sign()]
    for result in differentiated(lambda h, w: (linear_cross_entropy(h, w, labels()),), inputs):
        assert result.isfinite().all()


def test_it_never_holds_all_logits(random, monkeypatch, largest_allocation):
    tokens, words = 256, 1024
    h, y = random(tokens, D, dtype=torch.float32).requires_grad_(), torch.arange(tokens)
    w = random(words, D, seed=1, dtype=torch.float32).requires_grad_()

    def run():
        linear_cross_entropy(h, w, y).backward()

    run()
    logits = tokens * words * 4
    assert largest_allocation(run) >= logits, "in one piece it holds them, and the measure sees that"
    monkeypatch.setattr(loss, "CHUNK_ENTRIES", 16 * words)
    assert largest_allocation(run) <= logits // 16


def test_the_choice_of_path_depends_on_shapes_only(random, monkeypatch):
    monkeypatch.setattr(loss, "CHUNK_ENTRIES", N * V)

    def operations(tokens):
        with FlopCounterMode(display=False) as counter:
            linear_cross_entropy(random(tokens, D), random(V, D), torch.zeros(tokens, dtype=torch.long))
        return [str(op) for op in counter.get_flop_counts().get("Global", {})]

    assert operations(N) == ["aten.mm"]
    assert operations(N + 1) == [], "beyond the limit it is one custom operation"


@pytest.mark.parametrize("with_bias", [False, True])
def test_the_operation_keeps_torchs_rules(random, with_bias):
    bias = random(V, seed=2).requires_grad_() if with_bias else None
    h, w = random(N, D).requires_grad_(), random(V, D, seed=1).requires_grad_()
    torch.library.opcheck(loss._loss, (h, w, labels(), bias, -100))
    losses, lse = loss._loss(h.detach(), w.detach(), labels(), bias, -100)
    bias = None if bias is None else bias.detach()
    torch.library.opcheck(
        loss._loss_backward, (torch.ones_like(losses), h.detach(), w.detach(), labels(), bias, lse, -100)
    )


@pytest.mark.parametrize(
    ("shapes"),
    [
        ((N, D, 1), (V, D), (N,)),
        ((N, D), (V,), (N,)),
        ((N, D), (V, D + 1), (N,)),
        ((N, D), (V, D), (N + 1,)),
        ((N, D), (V, D), (N, 1)),
    ],
)
def test_shapes_that_do_not_agree_are_refused(shapes):
    h, w, y = (torch.zeros(shape) for shape in shapes)
    with pytest.raises(ValueError, match=r"h \[N, D\], weight \[V, D\] and labels \[N\] must agree, got \("):
        linear_cross_entropy(h, w, y.long())


def test_an_unknown_reduction_is_refused(random):
    with pytest.raises(ValueError, match="unknown reduction 'avg'; valid: mean, none, sum"):
        linear_cross_entropy(random(N, D), random(V, D), labels(), reduction="avg")


@paths
@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("label", [V, -1])
def test_a_label_outside_the_vocabulary_is_refused(random, label):
    y = labels()
    y[4] = label
    with pytest.raises(IndexError, match=f"Target {label} is out of bounds"):
        linear_cross_entropy(random(N, D), random(V, D), y)
