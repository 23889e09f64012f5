"""Generation with Perceiver AR: a prompt is read in one piece, and every mode goes on as it says."""

import pytest
import torch
from tokenizers import Tokenizer, models

from subquad.generation import Generation, SamplingConfig, TextStream, generate
from subquad.models import DecoderConfig, PerceiverAR

VOCABULARY, LATENTS = 23, 5


def tiny(history="self", **options):
    torch.manual_seed(0)
    rows = {"projected": 2} if history == "compressed" else {}
    options = {"latents": LATENTS, "history": history, "history_tokens": 6, **rows, **options}
    config = DecoderConfig(
        vocab_size=VOCABULARY, dim=16, num_layers=2, num_heads=2, attention="perceiver_ar", init_std=0.5,
        options={"perceiver_ar": options},
    )  # fmt: skip
    return PerceiverAR(config).double()


@pytest.mark.parametrize("history", ["cross", "self", "segments", "compressed"])
@pytest.mark.parametrize("prompt", [1, 3, 12])
@pytest.mark.parametrize("chunk", [2, 4096])
def test_exact_takes_the_likeliest_token_of_the_whole_text(history, prompt, chunk):
    model = tiny(history).eval()
    text = list(range(1, prompt + 1))
    for token in generate(model, text[:], temperature=0, max_tokens=8, prefill_chunk=chunk):
        logits, _ = model(torch.tensor([text]))
        assert token == int(logits[0, -1].argmax())
        text.append(token)


def test_the_prompt_is_read_once_and_without_a_pass_where_every_token_is_one():
    model = tiny().eval()
    passes = []
    model.norm.register_forward_hook(lambda *_: passes.append(1))
    generation = Generation(model, list(range(20)), SamplingConfig(max_tokens=2, prefill_chunk=3))
    generation.prefill()
    assert not passes
    list(generation)
    assert len(passes) == 2


def test_a_refilling_model_goes_on_from_the_state_of_a_generation():
    model = tiny(decode="refill").eval()
    whole = list(generate(model, range(9), temperature=0, max_tokens=9))
    first = generate(model, range(9), temperature=0, max_tokens=4)
    begun = list(first)
    second = generate(model, begun[-1:], state=first.state, temperature=0, max_tokens=5)
    assert [*begun, *second] == whole


def test_a_frozen_model_ends_with_an_error_after_as_many_tokens_as_it_says():
    model = tiny(decode="frozen").eval()
    most = model.most_new_tokens(9)
    generation = generate(model, range(9), temperature=0, max_tokens=most + 1)
    tokens = [next(generation) for _ in range(most)]
    logits, _ = model(torch.tensor([[*range(9), *tokens[:-1]]]))
    assert tokens == logits[0, -most:].argmax(-1).tolist()
    with pytest.raises(ValueError, match="decode='frozen' has used all 5 latents"):
        next(generation)


def test_the_text_streams():
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    stream = TextStream(tokenizer, [1, 2])
    tokens = list(generate(tiny(), [1, 2], max_tokens=7, seed=0))
    pieces = [stream.push(token) for token in tokens]
    assert "".join([*pieces, stream.finish()]).split() == [f"w{token}" for token in tokens]
