"""Memory probes: answers follow from earlier tokens alone, rows from the seed and their number alone."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subquad.data import load_tokenizer
from subquad.data import probes as module
from subquad.data.config import ProbeConfig
from subquad.data.probes import IGNORED, NOTHING, ProbeCorpus, ProbeItems, probe_rows, text_passkey
from subquad.testing import assert_exact
from tests.data.rows import copy, mqar, passkey

CONFIGS = [
    ProbeConfig(name="passkey", digits=3, symbols=5),
    ProbeConfig(name="mqar", pairs=3, symbols=7),
    ProbeConfig(name="copy", symbols=6),
    ProbeConfig(name="copy", symbols=6, shortest=2),
]
every_probe = pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.name}-{config.shortest}")
BYTES = load_tokenizer("bytes")
TEXT = np.frombuffer(b"The tide came in, and the tide went out. " * 40, dtype=np.uint8)


def same(left, right) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


def lists(rows):
    return zip(rows.tokens.tolist(), rows.labels.tolist(), strict=True)


@every_probe
@settings(max_examples=20)
@given(data=st.data())
def test_each_answer_stands_at_its_source_and_before(config, data):
    length = data.draw(st.integers(config.fewest_tokens + 4, 60))
    rows = probe_rows(config, length, data.draw(st.integers(1, 4)), first=data.draw(st.integers(0, 9)), seed=1)
    assert {(part.shape, part.dtype) for part in rows} == {(rows.tokens.shape, np.dtype(np.int64))}
    assert 0 <= rows.tokens.min() <= rows.tokens.max() < config.vocab_size
    assert np.array_equal(rows.asked, rows.source != NOTHING)
    row, place = np.nonzero(rows.asked)
    source = rows.source[row, place]
    assert np.array_equal(rows.tokens[row, source], rows.labels[row, place])
    assert (source < place).all()
    assert rows.asked.any(1).all()
    assert place.min() >= config.first_asked(length)


@settings(max_examples=50)
@given(length=st.integers(10, 60), depth=st.floats(0, 1) | st.none(), seed=st.integers(0, 5))
def test_a_passkey_is_between_its_mark_and_the_question(length, depth, seed):
    for tokens, labels in lists(passkey(length, 2, digits=4, symbols=9, depth=depth, seed=seed)):
        start = tokens.index(module.KEY)
        assert depth is None or start == round(depth * (length - 10))
        assert tokens[-5] == module.ASK
        assert tokens[start + 1 : start + 5] == tokens[-4:] == labels[-4:]
        assert (tokens.count(module.KEY), tokens.count(module.ASK)) == (1, 1)
        assert sum(token < module.KEY for token in tokens) == 8
        assert sum(token >= module.FILLER for token in tokens) == length - 10
        assert set(labels[:-4]) == {IGNORED}


def test_passkeys_without_a_depth_stand_everywhere():
    rows = passkey(16, 200, digits=2, seed=3)
    assert set((rows.tokens == module.KEY).argmax(1)) == set(range(16 - 6 + 1))
    assert set(rows.tokens[:, -1]) == set(range(10))


@settings(max_examples=50)
@given(pairs=st.integers(1, 6), more=st.integers(0, 5), length=st.integers(20, 60), seed=st.integers(0, 5))
def test_mqar_asks_for_each_key_once_among_noise(pairs, more, length, seed):
    for tokens, labels in lists(mqar(length, 2, pairs=pairs, symbols=pairs + more, seed=seed)):
        value_of = dict(zip(tokens[: 2 * pairs : 2], tokens[1 : 2 * pairs : 2], strict=True))
        assert len(value_of) == len(set(value_of.values())) == pairs
        assert max(value_of) < pairs + more <= min(value_of.values())
        later = {place: token for place, token in enumerate(tokens) if place >= 2 * pairs and token in value_of}
        assert sorted(later.values()) == sorted(value_of)
        asked = {place: label for place, label in enumerate(labels) if label != IGNORED}
        assert asked == {place + 1: value_of[key] for place, key in later.items()}


def test_mqar_asks_soon_more_often_than_late_and_does_not_show_the_answer():
    rows = mqar(80, 400, pairs=2, symbols=20, seed=0)
    row, place = np.nonzero(rows.asked)
    counts = np.bincount(place - 5, minlength=75)
    assert counts[:3].sum() > 0.3 * counts.sum() > counts[40:].sum() > 0
    shown = (rows.tokens[row, place] == rows.labels[row, place]).mean()
    assert shown < 4 / 38  # by chance one of 38 tokens of noise


@settings(max_examples=50)
@given(length=st.integers(3, 41), seed=st.integers(0, 5))
def test_a_copy_is_the_string_again(length, seed):
    size = (length - 1) // 2
    for tokens, labels in lists(copy(length, 2, symbols=5, seed=seed)):
        assert tokens[:size] == tokens[size + 1 : 2 * size + 1] == labels[size + 1 : 2 * size + 1]
        assert tokens[size] == module.SEPARATOR
        assert tokens.count(module.SEPARATOR) == length - 2 * size


def test_chance_is_what_a_model_without_memory_gets_and_copies_may_differ_in_length():
    rows = mqar(40, 1000, pairs=5, symbols=8, seed=0)
    row, place = np.nonzero(rows.asked)
    guess = rows.tokens[row, 1 + 2 * np.random.default_rng(0).integers(5, size=len(row))]
    right = guess == rows.labels[row, place]
    assert abs(right.mean() - ProbeConfig(pairs=5, symbols=8).chance) < 4 * np.sqrt(0.2 * 0.8 / len(right))
    assert ProbeConfig(name="passkey", digits=3).chance == 1e-3
    assert ProbeConfig(name="copy", symbols=8).chance == 0.125
    assert set(copy(21, 200, symbols=5, shortest=4, seed=0).asked.sum(1)) == set(range(4, 11))


@every_probe
def test_a_row_depends_on_the_seed_and_its_number_alone(config):
    many, few = probe_rows(config, 30, 9, seed=(4, 2)), probe_rows(config, 30, 3, first=5, seed=(4, 2))
    assert same([part[5:8] for part in many], few)
    assert not same(many, probe_rows(config, 30, 9, seed=(4, 1)))
    assert same(probe_rows(config, 30, 1, seed=(0, 5)), probe_rows(config, 30, 1, first=5, seed=0))  # as Seed says


def test_items_are_rows_and_no_held_out_one_is_in_training():
    config = CONFIGS[2].replace(examples=300, held_out=100, seed=3)
    corpus = ProbeCorpus.of(config, 41)
    rows = probe_rows(config, 41, 1, first=7, seed=(3, module.HELD_OUT))
    for name, values in (("input_ids", rows.tokens), ("labels", rows.labels)):
        assert_exact(corpus.held_out[7][name], torch.from_numpy(values[0]), name)
    parts = [{tuple(item["input_ids"].tolist()) for item in part} for part in (corpus.train, corpus.held_out)]
    assert [len(part) for part in parts] == [300, 100]
    assert not set.intersection(*parts)


def test_the_fingerprint_tells_probes_apart():
    usual = {"name": "copy", "examples": 9}
    changes = [{}, {"examples": 10}, {"held_out": 6}, {"seed": 1}, {"symbols": 9}, {"shortest": 2}]
    made = [ProbeCorpus.of(ProbeConfig(**(usual | change)), 30).fingerprint for change in (*changes, {})]
    assert len({*made, ProbeCorpus.of(ProbeConfig(**usual), 31).fingerprint}) == 7
    assert made[0] == made[-1]


@settings(max_examples=25)
@given(length=st.integers(110, 300), depth=st.floats(0, 1) | st.none(), seed=st.integers(0, 5))
def test_a_key_in_a_text_is_told_and_asked_for(length, depth, seed):
    rows = text_passkey(BYTES, TEXT, length, 2, digits=4, depth=depth, seed=seed)
    for tokens, labels, source in zip(*rows, strict=True):
        text = bytes(tokens.tolist()).decode()
        key = text[-4:]
        told, asked = f"{module.BEFORE} {key}{module.AFTER}", f"{module.QUESTION} {key}"
        assert text.endswith(asked)
        start = text.index(told)
        filler = text.removesuffix(asked).replace(told, "")
        assert filler.encode() in TEXT.tobytes()
        assert depth is None or start == round(depth * len(filler))
        assert len(tokens) == length
        assert bytes(labels[-5:].tolist()).decode() == f" {key}"
        assert (labels[:-5] == IGNORED).all()
        assert np.array_equal(tokens[source[-5:]], labels[-5:])
    assert same(rows, text_passkey(BYTES, TEXT, length, 2, digits=4, depth=depth, seed=seed))


@pytest.mark.parametrize(("make", "message"), [
    (lambda: passkey(9, 1), "passkey with digits=4 needs sequences of at least 10 tokens, got length=9"),
    (lambda: copy(2, 1), "copy with one letter needs sequences of at least 3 tokens, got length=2"),
    (lambda: copy(10, 1, shortest=5), "probe.shortest=5 letters and a copy do not fit in 10 tokens"),
    (lambda: passkey(20, 1, depth=1.5), r"a depth must lie between 0 \(the start\) and 1 \(the end\), got 1.5"),
    (lambda: passkey(20, 1, seed=-1), "a seed and the first row must be at least 0, got seed=-1, first=0"),
    (lambda: mqar(40, 1, first=-2), "must be at least 0, got seed=0, first=-2"),
    (lambda: copy(20, 0), "a probe needs at least one row, got rows=0"),
    (lambda: mqar(20, 1, depth=0.5), "depth is valid only for the probe passkey, got depth=0.5 for mqar"),
    (lambda: ProbeItems(CONFIGS[1], 9, 5), "mqar with pairs=3 needs sequences of at least 10 tokens, got length=9"),
    (lambda: ProbeItems(CONFIGS[0], 30, 5)[5], "example 5 is out of range: there are 5"),
    (lambda: text_passkey(BYTES, TEXT[:99], 300, 1), "the text has 99 tokens, but length=300 needs 214"),
    (lambda: text_passkey(BYTES, TEXT, 300, 1, depth=2), "a depth must lie between 0 .*, got 2"),
])  # fmt: skip
def test_sequences_that_cannot_be_are_refused(make, message):
    with pytest.raises((ValueError, IndexError), match=message):
        make()
