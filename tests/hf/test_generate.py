import copy

import pytest
import torch

from subquad.attention import mechanism, names
from subquad.hf import SubquadCache, SubquadConfig, SubquadForCausalLM
from subquad.testing import assert_exact, assert_same_maths

VOCABULARY = 23
NEW = {"max_new_tokens": 9, "eos_token_id": None}
every_mechanism = pytest.mark.parametrize("name", [name for name in names() if "causal" in mechanism(name).forms])


def tiny(name="llp", **fields):
    """Float64, so that another order of the sums picks no other token."""
    shape = {
        "vocab_size": VOCABULARY,
        "dim": 16,
        "num_layers": 2,
        "num_heads": 2,
        "options": {"llp": {"segment": 6}, "window": {"width": 4}},
        "position": "rope" if mechanism(name).rotates else "sinusoidal",
        "init_std": 1.0,
        "pad_token_id": 0,
    }
    torch.manual_seed(0)
    return SubquadForCausalLM(SubquadConfig(attention=name, **(shape | fields))).double().eval()


def prompt():
    return torch.randint(1, VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(1))


def left_padded():
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, :3] = 0
    return {"inputs": prompt() * mask, "attention_mask": mask}


def plain():
    return {"inputs": prompt(), "attention_mask": torch.ones(2, 8, dtype=torch.long)}


@every_mechanism
@pytest.mark.parametrize("prompts", [plain, left_padded])
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"num_beams": 3, "num_return_sequences": 2},
        {"do_sample": True, "num_return_sequences": 3, "top_k": 5},
        {"num_beams": 2, "do_sample": True},
    ],
    ids=["greedy", "beam", "sample", "beam-sample"],
)
def test_with_a_cache_the_same_tokens_come(name, prompts, how):
    model, tokens = tiny(name), []
    for use_cache in (True, False):
        torch.manual_seed(5)
        tokens.append(model.generate(**prompts(), **NEW, **how, use_cache=use_cache))
    assert_exact(*tokens)
    assert tokens[0][:, 8:].unique().numel() > 2


def test_default_positions_may_be_given_and_others_not():
    model, mask = tiny(), left_padded()["attention_mask"]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    assert_exact(model.generate(**left_padded(), **NEW, position_ids=positions), model.generate(**left_padded(), **NEW))
    with pytest.raises(ValueError, match=r"position_ids must count the row.s real tokens"):
        model.generate(**left_padded(), **NEW, position_ids=positions + 2)


@every_mechanism
def test_a_left_padded_prompt_gives_what_it_gives_alone(name):
    model = tiny(name)
    together = model.generate(**left_padded(), **NEW)
    alone = model.generate(prompt()[1:, 3:], **NEW)
    assert_exact(together[1, 3:], alone[0])


@every_mechanism
def test_logits_with_a_cache_are_the_same_mathematics(name):
    model, tokens = tiny(name), torch.cat([left_padded()["inputs"], prompt()], 1)
    mask = torch.cat([left_padded()["attention_mask"], torch.ones(2, 8, dtype=torch.long)], 1)
    whole, cache = model(tokens, attention_mask=mask).logits, SubquadCache()
    for start, stop in ((0, 5), (5, 8), *((t, t + 1) for t in range(8, 16))):
        part = model(tokens[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache).logits
        assert_same_maths(part, whole[:, start:stop])


@every_mechanism
def test_the_prompt_may_be_read_in_chunks(name):
    model, cache = tiny(name), SubquadCache()
    whole = model.generate(**left_padded(), **NEW)
    chunked = model.generate(**left_padded(), **NEW, prefill_chunk_size=3, past_key_values=cache)
    assert_exact(whole, chunked)
    assert cache.get_seq_length() == 8 + 9 - 1


@every_mechanism
def test_a_cache_goes_on_in_the_next_call(name):
    model, cache = tiny(name), SubquadCache()
    whole = model.generate(**left_padded(), **NEW)
    first = model.generate(**left_padded(), max_new_tokens=4, past_key_values=cache)
    mask = torch.cat([left_padded()["attention_mask"], torch.ones(2, 4, dtype=torch.long)], 1)
    second = model.generate(first, attention_mask=mask, max_new_tokens=5, past_key_values=cache)
    assert_exact(second, whole)


def test_a_cache_is_made_moved_and_left_as_asked():
    model, tokens = tiny(), prompt()
    cache = model(tokens).past_key_values
    assert isinstance(cache, SubquadCache)
    assert cache.get_seq_length() == 8
    assert model(tokens, use_cache=False).past_key_values is None
    assert tiny(use_cache=False)(tokens).past_key_values is None
    after = model(tokens, past_key_values=cache, use_cache=False).logits
    assert cache.get_seq_length() == 8
    assert_exact(model(tokens, past_key_values=cache).logits, after)
    assert cache.get_seq_length() == 16
    assert_same_maths(after, model(torch.cat([tokens, tokens], 1)).logits[:, 8:])
    cache.reset()
    assert cache.state is None
    assert cache.get_seq_length() == 0


@every_mechanism
def test_rows_are_reordered_repeated_and_selected(name):
    model, tokens = tiny(name), left_padded()
    nxt = torch.tensor([[3], [4]])

    def after(change, rows):
        cache = model(tokens["inputs"], attention_mask=tokens["attention_mask"]).past_key_values
        change(cache)
        return model(nxt[rows], past_key_values=cache).logits

    usual = after(lambda cache: None, [0, 1])
    order = torch.tensor([1, 1])
    assert_same_maths(after(lambda cache: cache.reorder_cache(order), [1, 1]), usual[[1, 1]])
    assert_same_maths(after(lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1]), usual[[0, 0, 1, 1]])
    assert_same_maths(after(lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]), usual[[1]])
    kept = torch.tensor([False, True])
    assert_same_maths(after(lambda cache: cache.batch_select_indices(kept), [1]), usual[[1]])
    assert_same_maths(after(lambda cache: cache.offload(0), [0, 1]), usual)


def test_the_cache_says_what_it_is_to_transformers():
    cache = SubquadCache()
    assert not cache.is_compileable
    assert not cache.is_initialized
    assert cache.get_mask_sizes(3, 0) == (3, 0)
    assert cache.layers[0].get_max_length() == cache.layers[0].get_max_cache_shape() == -1
    cache.reorder_cache(torch.tensor([0]))
    tiny()(prompt(), past_key_values=cache)
    assert cache.get_mask_sizes(1, 0) == (9, 0)


def test_a_copy_of_a_cache_is_a_way_back():
    model, tokens = tiny(), prompt()
    with torch.no_grad():
        cache = model(tokens).past_key_values
        copied = copy.deepcopy(cache)
        expected = model(tokens, past_key_values=cache).logits
        assert_exact(model(tokens, past_key_values=copied).logits, expected)


def test_what_needs_an_earlier_state_is_refused():
    model, cache = tiny(), SubquadCache()
    model(prompt(), past_key_values=cache)
    with pytest.raises(ValueError, match=r"cannot be cropped, got crop\(2\): a state"):
        cache.crop(2)
    with pytest.raises(TypeError, match=r"cannot store another model.s keys"):
        cache.update(torch.zeros(1), torch.zeros(1), 0)
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
        model.generate(prompt(), assistant_model=tiny(), max_new_tokens=2)


def test_a_cache_of_another_model_is_refused():
    cache = tiny("full")(prompt()).past_key_values
    with pytest.raises(ValueError, match="the state was made by configuration"):
        tiny("llp")(prompt(), past_key_values=cache)


def test_an_end_token_stops_a_row():
    model = tiny()
    free = model.generate(**plain(), **NEW)
    end = int(free[0, 10])
    stopped = model.generate(**plain(), max_new_tokens=9, eos_token_id=end)
    position = 8 + (free[0, 8:] == end).nonzero()[0].item()
    assert_exact(stopped[0, : position + 1], free[0, : position + 1])
    assert not stopped[0, position + 1 :].any()
