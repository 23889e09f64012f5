"""Prompts that begin as earlier ones: what is read, that nothing else changes, and what is kept."""

import weakref
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from subquad.generation import BatchDecoder, Generation, SamplingConfig
from subquad.generation.prefix_cache import PrefixCache, PrefixCounts, default_bytes, prefix_keys
from subquad.generation.reading import Reading
from subquad.generation.speculative import NgramDraft
from subquad.hf import from_transformers
from subquad.inference import inference
from subquad.models import Decoder
from subquad.state import State
from subquad.testing import assert_exact
from tests.generation.models import config_of, make, numbers
from tests.hf.hybrids import theirs

PIECE, MANY = 4, 1 << 20
GREEDY = SamplingConfig(max_tokens=5, temperature=0)
FIRST, SECOND = numbers(15), [*numbers(9), *numbers(7, seed=1)]
"""The second prompt begins as the first one for two pieces and a token."""


def in_float32(name):
    """Rounding differs with the pieces, the strides and the neighbours in memory."""
    if name == "Qwen3.5":
        return from_transformers(theirs(name)).eval().decoder
    torch.manual_seed(1)
    return Decoder(config_of(name)).eval()


def read(model, prompt, prefixes=None, piece=PIECE, **options):
    """The state after all but the last token of a prompt, and how many tokens were read."""
    reading = Reading(model, prompt, piece=piece, prefixes=prefixes, **options)
    count = 0
    with inference(model):
        while n := reading.read():
            count += n
    assert reading.done
    return reading.state, count


def assert_same_state(found, expected):
    assert list(found) == list(expected)
    for name, entry in expected.entries.items():
        if isinstance(entry, State):
            assert_same_state(found[name], entry)
        elif isinstance(entry, Tensor):
            assert_exact(found[name], entry)
        else:
            assert found[name] == entry


def next_logits(model, prompt, state):
    with inference(model):
        return model(torch.tensor([prompt[-1:]]), state)[0]


NAMES = ["latte", "window", "gated_delta_net", "full", "hybrid", "gated", "loops", "luna", "learned", "Qwen3.5"]


def check_reuse(model, prefixes):
    """Read prompts with and without reuse: the tokens that are read, the states, and the next logits."""
    other = [*numbers(4, seed=2), *FIRST[4:]]  # its second and third pieces are those of the first prompt
    for prompt, tokens in (
        (FIRST, 14), (FIRST, 2), (SECOND, 7), (SECOND[:9], 0), (SECOND[:8], 3), (SECOND[:3], 2), (SECOND, 3),
        (other, 14), (other, 2),
    ):  # fmt: skip
        expected, whole = read(model, prompt)
        found, count = read(model, prompt, prefixes)
        assert (count, whole) == (tokens, len(prompt) - 1)
        assert_same_state(found, expected)
        assert_exact(next_logits(model, prompt, found), next_logits(model, prompt, expected))


@pytest.mark.parametrize("name", NAMES)
def test_states_and_logits_are_bitwise_those_without_reuse(name):
    prefixes = PrefixCache(MANY)
    check_reuse(in_float32(name), prefixes)
    assert prefixes.counts[:4] == (6, 2, 12 + 8 + 8 + 4 + 12 + 12, 0)


def last_piece_alone(tokens, piece):
    return [bytes(tokens[end - piece : end]) for end in range(piece, len(tokens) + 1, piece)]


def without_order(tokens, piece):
    return [bytes(sorted(tokens[:end])) for end in range(piece, len(tokens) + 1, piece)]


def changing_in_place(self, tokens_BT, state=None, read=Decoder.read):
    after = read(self, tokens_BT, state)
    for tensor in () if state is None else state.tensors():
        tensor.zero_()
    return after


def one_too_many(self, keys, find=PrefixCache.find):
    """The state after the pieces before the last known one, for all known ones."""
    state = find(self, keys)
    return None if state is None else State({**find(self, keys[:1]).entries, "seen": state.seen}, state.config_hash)


@pytest.mark.parametrize(("place", "fault"), [
    ("subquad.generation.reading.prefix_keys", last_piece_alone),
    ("subquad.models.Decoder.read", changing_in_place),
    ("subquad.generation.prefix_cache.PrefixCache.find", one_too_many),
])  # fmt: skip
def test_planted_bugs_are_caught(place, fault, monkeypatch):
    monkeypatch.setattr(place, fault)
    with pytest.raises(AssertionError):
        check_reuse(in_float32("latte"), PrefixCache(MANY))


def test_a_key_is_of_all_tokens_before_it_in_their_order():
    keys = prefix_keys([*FIRST[:7], FIRST[7]], PIECE)
    assert len(keys) == 2
    for changed in range(8):
        tokens = FIRST[:8]
        tokens[changed] += 1
        again = prefix_keys(tokens, PIECE)
        assert (again[0] == keys[0], again[1] == keys[1]) == (changed >= 4, False)
    assert prefix_keys([1, 2, 3, 4], 4) != prefix_keys([2, 1, 3, 4], 4)
    assert prefix_keys([1, 256], 2) != prefix_keys([257, 0], 2)
    assert prefix_keys(FIRST[:3], PIECE) == []


def state_of(numbers_, seen):
    return State({"seen": seen, "x": torch.zeros(1, numbers_)})


def test_the_least_recently_used_leaf_makes_room():
    prefixes = PrefixCache(4 * 40)
    a, b, c = (prefix_keys([token] * 12, PIECE) for token in (1, 2, 3))
    for keys, count in ((a, 2), (b, 2)):
        for pieces in range(1, count + 1):
            prefixes.keep(keys[:pieces], state_of(10, pieces * PIECE))
    assert prefixes.counts == PrefixCounts(evictions=0, nbytes=160)
    assert prefixes.find(a[:1]).seen == PIECE  # the root of a is used, but not its leaf, which is now the oldest
    prefixes.keep(c[:1], state_of(10, PIECE))
    assert prefixes.counts == PrefixCounts(1, 0, PIECE, evictions=1, nbytes=160)
    assert [prefixes.find(keys).seen // PIECE for keys in (b, a, c)] == [2, 1, 1]
    prefixes.keep(c[:2], state_of(20, 2 * PIECE))  # twice the bytes: those of b, the leaf before the root
    assert [None if (state := prefixes.find(keys)) is None else state.seen for keys in (a, b, c)] == [4, None, 8]
    assert prefixes.counts[3:] == (3, 160)
    prefixes.keep(a[:2], state_of(1000, 2 * PIECE))
    assert prefixes.counts[3:] == (6, 40)  # more than all bytes: it is evicted itself, as the leaf before its root
    prefixes.keep(a, state_of(1, 3 * PIECE))
    assert prefixes.counts.nbytes == 40  # nothing could find it, as its parent was evicted


def test_a_state_that_is_kept_again_counts_once_and_what_is_evicted_is_freed():
    prefixes, keys = PrefixCache(100), prefix_keys(FIRST, PIECE)
    state = state_of(10, PIECE)
    freed = weakref.ref(state.tensor("x"))
    prefixes.keep(keys[:1], state)
    prefixes.keep(keys[:1], state_of(10, PIECE))
    del state
    assert (prefixes.counts.nbytes, freed() is None) == (40, False)
    prefixes.keep(prefix_keys([5] * 4, PIECE), state_of(20, PIECE))
    assert (prefixes.counts.nbytes, freed()) == (80, None)


@pytest.mark.parametrize("name", ["window", "full", "gated_delta_net"])
def test_the_bytes_are_those_that_are_held(name):
    kept = []
    with patch.object(PrefixCache, "keep", lambda self, keys, state: kept.append(state)):
        read(in_float32(name), FIRST, PrefixCache(MANY))
    assert [state.seen for state in kept] == [4, 8, 12]
    for state in kept:
        held = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in state.tensors()}
        assert sum(held.values()) == state.nbytes > 0


def pieces_of(model, act):
    """The sizes of what the model reads while `act` runs."""
    with patch.object(model, "read", wraps=model.read) as calls:
        act()
    return [call.args[0].shape[1] for call in calls.call_args_list]


def test_a_prompt_is_cut_at_the_same_places_whatever_else_waits():
    model = make("latte")
    decoder = BatchDecoder(model, slots=3, prefill_chunk=PIECE)
    for prompt in (FIRST[:4], FIRST[:4], FIRST):
        decoder.add(prompt, GREEDY)
    steps = [pieces_of(model, decoder.step) for _ in range(5)]
    assert steps == [[3, 3], [4], [4], [4], [2]]  # so many tokens a step, and less than a piece more
    begun, _ = read(model, FIRST[:3])
    continued = BatchDecoder(model, slots=1, prefill_chunk=PIECE, prefix_bytes=MANY)
    continued.add(FIRST[2:], GREEDY, state=begun)
    assert pieces_of(model, continued.run) == [2, 4, 4, 2]  # cut at 4, 8 and 12
    assert continued.prefixes == PrefixCounts()  # the tokens before are not known


def run(decoder, prompts, sampling=GREEDY, **options):
    """Run prompts one after another; their requests."""
    requests = []
    for prompt in prompts:
        requests.append(decoder.add(prompt, sampling, **options))
        decoder.run()
    return requests


def test_a_chat_reads_its_last_answer_and_its_new_tokens():
    model = make("window")
    decoder = BatchDecoder(model, slots=2, prefill_chunk=PIECE, prefix_bytes=MANY)
    (first,) = run(decoder, [FIRST])
    turn = [*FIRST, *first.tokens, *numbers(6, seed=3)]
    again = []
    assert sum(pieces_of(model, lambda: again.extend(run(decoder, [turn])))) == len(turn) - 1 - 12
    assert again[0].tokens == run(BatchDecoder(model, slots=2), [turn])[0].tokens


@pytest.mark.parametrize("name", ["latte", "full"])
@pytest.mark.parametrize("draft", [None, NgramDraft])
def test_reuse_works_with_guesses_samples_and_log_probabilities(name, draft):
    model, prompts = make(name), [FIRST * 2, FIRST * 2, [*FIRST, *SECOND], SECOND]
    drawn = [GREEDY.replace(max_tokens=9, temperature=0.7, seed=seed) for seed in range(3)]
    found, tokens = [], []
    for prefix_bytes in (0, MANY):
        decoder = BatchDecoder(model, slots=2, max_context=64, prefill_chunk=PIECE, prefix_bytes=prefix_bytes)
        assert decoder.prefixes == PrefixCounts()
        guessing = BatchDecoder(
            model, slots=2, max_context=64, prefill_chunk=PIECE, prefix_bytes=prefix_bytes, draft=draft
        )
        requests = [request for prompt in prompts for request in guessing.add_samples(prompt, drawn, logprobs=1)]
        guessing.run()
        scored = run(decoder, prompts, prompt_logprobs=2)
        found.append([(request.tokens, request.logprobs) for request in requests])
        tokens.append([request.prompt_logprobs for request in scored])
    assert [each for each, _ in found[0]] == [each for each, _ in found[1]]
    assert tokens[0] == tokens[1]
    assert guessing.prefixes[:3] == (3, 1, 28 + 24 + 8)
    assert decoder.prefixes[:3] == (0, 0, 0)  # log-probabilities of all tokens need all of them
    assert decoder.prefixes.nbytes == guessing.prefixes.nbytes > 0


@pytest.mark.parametrize(("options", "match"), [
    ({"prefix_bytes": -1}, "prefix_bytes must be at least 0, got -1"),
    ({"prefix_bytes": 1 << 62}, f"at most the host's memory, [0-9]+ bytes, got {1 << 62}; 0 keeps no states"),
])  # fmt: skip
def test_sizes_out_of_range_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        BatchDecoder(make("latte"), **options)


def test_a_model_that_reads_a_prompt_in_one_piece_keeps_nothing(monkeypatch):
    model = make("perceiver_ar self exact")
    match = "prefix_bytes=5 needs prompts that are read in pieces, but perceiver_ar reads them in one: set prefix_bytes"
    with pytest.raises(ValueError, match=match):
        BatchDecoder(model, prefix_bytes=5)
    assert default_bytes(model) == 0
    for memory, expected in ((None, 1 << 30), (1 << 40, 1 << 30), (1 << 32, 1 << 29)):
        monkeypatch.setattr("subquad.generation.prefix_cache.total_bytes", lambda device, memory=memory: memory)
        assert default_bytes(make("latte")) == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", ["latte", "window", "gated_delta_net", "full", "gated", "Qwen3.5"])
def test_a_second_call_after_a_long_prompt_reads_less_than_a_piece(name):
    model, prompt = in_float32(name), numbers(8192)
    prefixes = PrefixCache(1 << 30)
    expected, count = read(model, prompt, piece=256)
    assert count == 8191
    for tokens in (8191, 255):
        found, count = read(model, prompt, prefixes, piece=256)
        assert count == tokens
        assert_same_state(found, expected)
        assert_exact(next_logits(model, prompt, found), next_logits(model, prompt, expected))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["latte", "window", "gated_delta_net", "full", "hybrid", "gated"])
def test_under_many_streams_each_is_as_if_alone(name):
    model = make(name)
    asked = []
    for i in range(256):
        sampling = SamplingConfig(max_tokens=3 + i % 11, temperature=0.8, seed=i)
        asked.append(([*numbers(21 + 5 * (i % 4), seed=i % 4), *numbers(1 + i % 13, seed=i)], sampling))
    room = 32 * read(model, numbers(30))[0].nbytes  # less than all of them need
    decoder = BatchDecoder(model, slots=64, max_context=80, prefill_chunk=PIECE, prefix_bytes=room)
    requests = []
    for i, (prompt, sampling) in enumerate(asked):
        requests.append(decoder.add(prompt, sampling))
        if i >= 64:
            decoder.step()
    decoder.run()
    for request, (prompt, sampling) in zip(requests, asked, strict=True):
        assert request.tokens == list(Generation(model, prompt, sampling))
    hits, misses, tokens, evictions, nbytes = decoder.prefixes
    assert hits + misses == 256
    assert hits > 200
    assert tokens > 256 * 15
    assert evictions > 0
    assert 0 < nbytes <= room
