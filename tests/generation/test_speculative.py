"""Guesses change no text: each token is the one that the model and the sampler choose without them."""

from functools import partial
from itertools import product

import pytest
import torch

from subquad.generation import BatchDecoder, SamplingConfig, generate
from subquad.generation.speculative import GUESSES, ModelDraft, NgramDraft, SpeculativeBatchState
from subquad.generation.static_speculation import PASS, StaticSpeculativeBatchState
from subquad.models.rollback import Rollback
from tests.generation.models import make, numbers, with_models

TEXT = numbers(9) * 2
GREEDY = {"max_new_tokens": 14, "temperature": 0}
SAMPLED = GREEDY | {
    "temperature": 0.6, "seed": 3, "repetition_penalty": 1.2, "min_tokens": 3, "stop_tokens": [7], "top_p": 0.95,
}  # fmt: skip


class Wrong:
    """Guesses tokens that are seldom right, also for the end of the text."""

    def guess(self, tokens, most, /):
        return numbers(most, seed=len(tokens)) if most > 0 else []


class Right:
    """Knows the text."""

    def __init__(self, text):
        self.text = text

    def guess(self, tokens, most, /):
        return self.text[len(tokens) :][: max(0, most)]


@with_models((
    "linear", "latte", "gated_delta_net", "window", "full", "luna", "hybrid", "loops", "perceiver_ar cross exact",
))  # fmt: skip
def test_guesses_change_no_token(name):
    model = make(name)
    for options, record in product((GREEDY, SAMPLED), (False, True)):
        expected = list(generate(model, TEXT, **options))
        for draft in (partial(Right, TEXT + expected), Wrong):
            found = generate(model, TEXT, **options, draft=draft, record=record)
            assert list(found) == expected
            right, made = found.guesses
            assert made > 0
            # A guess that ends the text is not counted: the text's last token is never read.
            assert right <= made / 2 if draft is Wrong else right >= made - 1


@pytest.mark.parametrize("record", [False, True])
@pytest.mark.parametrize("draft", [Wrong, Right])
def test_a_text_is_left_after_any_token(draft, record):
    model = make("gated_delta_net")
    expected = list(generate(model, TEXT, **GREEDY))
    for count in range(1, 7):
        made = Wrong if draft is Wrong else partial(Right, TEXT + expected)
        begun = generate(model, TEXT, **GREEDY, draft=made, record=record)
        first = [next(begun) for _ in range(count)]
        assert first == expected[:count]
        assert begun.state.seen == len(TEXT) + count - 1
        state = begun.read_all()
        assert state.seen == len(TEXT) + count
        again = {"max_new_tokens": 3, "temperature": 0}
        assert list(generate(model, [1], state=state, **again)) == list(generate(model, [*TEXT, *first, 1], **again))
        assert list(begun) == []


@pytest.mark.parametrize("record", [False, True])
@pytest.mark.parametrize("planted", ["one too few", "one too many", "a token unchecked"])
def test_planted_bugs_change_the_text(planted, record, monkeypatch):
    model = make("gated_delta_net")
    expected = list(generate(model, TEXT, **GREEDY))
    if planted == "a token unchecked":
        monkeypatch.setattr("subquad.generation.requests.Request.choose", unchecked)
    else:
        shift = 1 if planted == "one too many" else -1
        taken, folded = Rollback.back, StaticSpeculativeBatchState._folded
        monkeypatch.setattr(Rollback, "back", lambda self, n: taken(self, max(0, n + shift)))
        monkeypatch.setattr(
            StaticSpeculativeBatchState, "_folded", lambda self, kept_B: folded(self, (kept_B - shift).clamp(0, PASS))
        )
    assert list(generate(model, TEXT, **GREEDY, draft=Wrong, record=record)) != expected


def unchecked(self, guesses, logits_KV, likeliest, finite):
    for token in [*guesses[:1], likeliest[min(1, len(guesses))]]:
        self._add(token)
        if self.finished:
            break
    return self.tokens[-1 - len(guesses[:1]) :]


@pytest.mark.parametrize("record", [False, True])
def test_rows_have_drafts_of_their_own_and_come_and_go(record):
    model = make("window")
    asked = [(numbers(n, seed=n), SamplingConfig(max_tokens=8 + n, temperature=t, seed=n)) for n, t in
             ((9, 0), (1, 0.5), (4, 0.7), (2, 0), (12, 0.5))]  # fmt: skip
    plain = BatchDecoder(model, slots=3)
    guessing = BatchDecoder(model, slots=3, draft=NgramDraft, record=record)
    empty = guessing.state_bytes
    assert (empty > 0) == record
    requests = [[decoder.add(*each, keep_state=True) for each in asked] for decoder in (plain, guessing)]
    for decoder in (plain, guessing):
        decoder.run()
    for found, expected in zip(*requests, strict=True):
        assert found.tokens == expected.tokens
        assert found.state.seen == expected.state.seen
    assert guessing.guesses[1] > guessing.guesses[0] > 0
    assert plain.guesses == (0, 0)
    assert guessing.state_bytes == empty, "nothing of the texts is left"


def test_what_is_sampled_has_the_models_distribution():
    """The first two tokens of 1,000 texts, by Pearson's test: the bound is passed by chance once in 10,000 times."""
    model, texts = make("linear"), 1000
    sampling = [SamplingConfig(max_tokens=2, temperature=1.5, top_k=4, seed=i) for i in range(texts)]
    decoder = BatchDecoder(model, slots=100, draft=lambda: Right([1, 2, 3, 5, 5]))
    requests = [decoder.add([1, 2, 3], each) for each in sampling]
    decoder.run()
    with torch.no_grad():
        logits_V = model(torch.tensor([[1, 2, 3]]))[0][0, -1]
        first_V = top(logits_V)
        pairs = {}
        for a in first_V.nonzero().flatten().tolist():
            second_V = top(model(torch.tensor([[1, 2, 3, a]]))[0][0, -1])
            pairs |= {(a, b): float(first_V[a] * second_V[b]) for b in second_V.nonzero().flatten().tolist()}
    counts = dict.fromkeys(pairs, 0)
    for request in requests:
        counts[tuple(request.tokens)] += 1
    statistic = sum((counts[pair] - texts * p) ** 2 / (texts * p) for pair, p in pairs.items())
    # Wilson and Hilferty: the cube root of a chi-square over its degrees of freedom is nearly normal.
    freedom = len(pairs) - 1
    deviation = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / (2 / (9 * freedom)) ** 0.5
    assert deviation < 3.72


def top(logits_V):
    return torch.full_like(logits_V, -torch.inf).scatter(0, *logits_V.topk(4)[::-1]).div(1.5).softmax(0)


def test_ngrams_guess_what_followed():
    draft = NgramDraft()
    assert draft.guess([1, 2, 3], 8) == []
    assert draft.guess([1, 2, 3, 9, 2, 3], 3) == [9, 2, 3]
    assert draft.guess([1, 2, 3, 9, 2, 3], 8) == [9, 2, 3, 9, 2, 3, 9, 2], "the text has a period of three"
    assert draft.guess([1, 2, 3, 9, 2, 3, 4, 5, 1, 2, 3], 2) == [9, 2]
    assert draft.guess([1, 2, 3, 9, 2, 3, 4, 5, 1, 2, 3, 4], 0) == []
    assert NgramDraft().guess([5], 8) == []


@pytest.mark.parametrize("name", ["latte", "gated_delta_net", "perceiver_ar cross exact"])
def test_a_model_guesses_its_own_text(name):
    model = make(name)
    expected = list(generate(model, TEXT, **GREEDY))
    found = generate(model, TEXT, **GREEDY, draft=partial(ModelDraft, model))
    assert list(found) == expected
    right, made = found.guesses
    assert made - 1 <= right > 0
    assert ModelDraft(make("learned")).guess([1] * 62, GUESSES) == []  # its positions end


def test_a_draft_is_not_compiled():
    with pytest.raises(ValueError, match="with a draft they read guesses: set compile=False"):
        BatchDecoder(make("latte"), compile=True, draft=NgramDraft)
    assert SpeculativeBatchState(make("latte"), 1, NgramDraft).nbytes == 0
