"""Log-probabilities and repeated prompts in answers, whole and in pieces, and the choice of the best answers."""

from functools import partial
from unittest.mock import patch

import pytest
import torch

from subquad.generation import BatchDecoder
from subquad.models.build import build_model
from subquad.serving import ServeConfig
from subquad.serving.answers import ChatCompletion, Completion
from subquad.testing import assert_same_maths
from tests.generation.models import config_of
from tests.generation.test_speculative import Right
from tests.serving.helpers import ScriptedDecoder, served, slow, tiny_model
from tests.serving.test_app import CHAT, COMPLETIONS, HI, choices, complete, streamed
from tests.serving.test_schemas import error_of

LETTERS = {str(byte): -100 for byte in (*range(32), *range(127, 256))}
DRAWN = {"temperature": 1.5, "top_k": 9, "logit_bias": LETTERS, "seed": 3, "max_tokens": 6}
PROMPT = "größe"


@pytest.fixture(scope="module")
def model():
    return tiny_model().double()


@pytest.fixture(scope="module")
def client(model):
    with served(BatchDecoder(model, slots=4, max_context=96), config=ServeConfig(slots=4, max_tokens=32)) as client:
        yield client


def exact(values):
    return torch.tensor(values, dtype=torch.float64)


def bytes_of(token):
    """The byte of a token of the tokenizer `bytes` by its text in an answer."""
    return bytes.fromhex(token.removeprefix("bytes:\\x")) if token.startswith("bytes:") else token.encode()


@torch.no_grad()
def by_hand(model, text):
    """log p of each token after the first, `[T - 1, V]`, in one pass over the bytes of a text."""
    return model(torch.tensor([list(text)]))[0][0, :-1].log_softmax(-1)


def check_completion(model, found, prompt, echo, top):
    """Hold the field `logprobs` to the model: `prompt` are the bytes before the answer's, which `echo` repeats."""
    texts = found["tokens"]
    tokens = [*map(bytes_of, texts)]
    whole = b"".join(tokens) if echo else prompt + b"".join(tokens)
    first = 0 if echo else len(prompt)
    logp_TV = by_hand(model, whole)[max(0, first - 1) :]
    numbers, likely = found["token_logprobs"], found["top_logprobs"]
    if echo:
        assert (numbers[0], likely[0]) == (None, None)
        numbers, likely, tokens, texts = numbers[1:], likely[1:], tokens[1:], texts[1:]
    ids = torch.tensor([token[0] for token in tokens])
    assert_same_maths(exact(numbers), logp_TV.gather(-1, ids[:, None])[:, 0])
    values_TK, places_TK = logp_TV.topk(top, dim=-1)
    for place, (text, number, row) in enumerate(zip(texts, numbers, likely, strict=True)):
        assert row.pop(text) == number
        best = {bytes([b]): float(v) for b, v in zip(places_TK[place], values_TK[place], strict=True)}
        best.pop(bytes_of(text), None)
        assert {bytes_of(other) for other in row} == set(best)
        assert_same_maths(exact(list(row.values())), exact([best[bytes_of(other)] for other in row]))


@pytest.mark.parametrize(("top", "echo"), [(0, False), (3, False), (2, True), (256, True)])
def test_a_completion_has_those_of_the_models_own_distribution(client, model, top, echo):
    answer = complete(client, prompt=[PROMPT, "b"], n=2, logprobs=top, echo=echo, **DRAWN)
    Completion.model_validate(answer)
    assert len(answer["choices"]) == 4
    for choice in answer["choices"]:
        prompt, found = (PROMPT if choice["index"] < 2 else "b"), choice["logprobs"]
        assert len(found["tokens"]) == 6 + echo * len(prompt.encode())
        assert choice["text"].startswith(prompt) == echo
        for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
            assert token.startswith("bytes:") or choice["text"][offset:].startswith(token)
        check_completion(model, found, prompt.encode(), echo, top)
    plain = [choice["text"] for choice in choices(client, prompt=[PROMPT, "b"], n=2, **DRAWN)]
    texts = [choice["text"].removeprefix([PROMPT, "b"][choice["index"] // 2] * echo) for choice in answer["choices"]]
    assert texts == plain, "asking changes no token"


def test_a_chat_has_them_with_the_bytes_of_the_tokens(client, model):
    answer = complete(client, CHAT, messages=HI, logprobs=True, top_logprobs=3, **DRAWN)
    ChatCompletion.model_validate(answer)
    (choice,) = answer["choices"]
    content = choice["logprobs"]["content"]
    logp_TV = by_hand(model, b"user: hi\nassistant:" + bytes(byte for item in content for byte in item["bytes"]))[-6:]
    values, ids = logp_TV.topk(3, dim=-1)
    assert [[item["bytes"][0] for item in one["top_logprobs"]] for one in content] == ids.tolist()
    assert_same_maths(exact([[item["logprob"] for item in one["top_logprobs"]] for one in content]), values)
    own = torch.tensor([item["bytes"] for item in content])
    assert_same_maths(exact([item["logprob"] for item in content]), logp_TV.gather(-1, own)[:, 0])
    assert [bytes_of(item["token"]) for item in content] == [bytes(item["bytes"]) for item in content]
    (choice,) = choices(client, CHAT, messages=HI, logprobs=True, **DRAWN)
    assert [item["top_logprobs"] for item in choice["logprobs"]["content"]] == [[]] * 6
    assert choices(client, CHAT, messages=HI, **DRAWN)[0]["logprobs"] is None


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_the_pieces_of_a_stream_join_to_the_whole_answers(client, path):
    body = {**DRAWN, "n": 2, "max_tokens": 12}
    body |= {"messages": HI, "logprobs": True, "top_logprobs": 2} if path == CHAT else {}
    body |= {"prompt": PROMPT, "logprobs": 2, "echo": True} if path == COMPLETIONS else {}
    whole, joined, texts = choices(client, path, **body), [{}, {}], ["", ""]
    for chunk in streamed(client, path, **body):
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"] if path == COMPLETIONS else choice["delta"].get("content", "")
        for name, values in (choice["logprobs"] or {}).items():
            if name != "refusal":
                joined[choice["index"]].setdefault(name, []).extend(values)
    assert [{k: v for k, v in choice["logprobs"].items() if k != "refusal"} for choice in whole] == joined
    assert [choice.get("text", choice.get("message", {}).get("content")) for choice in whole] == texts


def test_each_token_that_is_counted_has_one_up_to_the_end_of_a_stop_string(client):
    body = {"prompt": "a", **DRAWN, "max_tokens": 20}
    stop = choices(client, **body)[0]["text"][5]
    answer = complete(client, **body, stop=stop, logprobs=0)
    (choice,) = answer["choices"]
    found = choice["logprobs"]
    assert len(found["tokens"]) == answer["usage"]["completion_tokens"] == choice["subquad"]["tokens"] < 20
    assert found["tokens"][-1] == stop
    assert found["text_offset"][-1] == len(choice["text"])


@pytest.mark.parametrize("prompt", [PROMPT, list(PROMPT.encode()), list(PROMPT.encode())[:3], "<b"])
@pytest.mark.parametrize("stream", [False, True])
def test_the_prompt_comes_first_and_may_come_alone(client, prompt, stream):
    def text(**body):
        if stream:
            return "".join(chunk["choices"][0]["text"] for chunk in streamed(client, prompt=prompt, **body))
        return choices(client, prompt=prompt, **body)[0]["text"]

    shown = prompt if isinstance(prompt, str) else bytes(prompt).decode(errors="ignore")
    assert text(echo=True, **DRAWN) == shown + text(**DRAWN)
    if not isinstance(prompt, str):
        shown = bytes(prompt).decode(errors="replace")  # nothing completes the last character
    assert text(echo=True, max_tokens=0) == shown
    answer = complete(client, prompt=prompt, echo=True, max_tokens=0, logprobs=1)
    assert answer["usage"]["completion_tokens"] == 0
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["subquad"]["ended_by"]) == (shown, "length", "tokens")
    size = answer["usage"]["prompt_tokens"]
    assert [len(values) for values in choice["logprobs"].values()] == [size] * 4


@pytest.mark.parametrize("stop", [None, True])
def test_several_tokens_of_a_step_have_their_own(client, model, stop):
    body = {"prompt": "ab", **DRAWN, "temperature": 0, "max_tokens": 20, "logprobs": 1}
    (plain,) = choices(client, **body)
    text = list(b"ab" + plain["text"].encode())
    if stop:
        body["stop"] = plain["text"][9]
        (plain,) = choices(client, **body)
    with served(BatchDecoder(model, slots=1, max_context=96, draft=partial(Right, text))) as guessing:
        (found,) = choices(guessing, **body)
        chunks = [chunk["choices"][0]["logprobs"] for chunk in streamed(guessing, **body)]
    for name in ("tokens", "text_offset"):
        joined = [value for chunk in chunks if chunk for value in chunk[name]]
        assert found["logprobs"][name] == joined == plain["logprobs"][name]
    assert_same_maths(exact(found["logprobs"]["token_logprobs"]), exact(plain["logprobs"]["token_logprobs"]))


def test_the_best_answers_are_those_of_the_highest_mean(client):
    body = {"prompt": ["ab", "cde"], "temperature": 1.5, "seed": 7, "max_tokens": 9, "stop": "\x03"}
    every = complete(client, **body, n=5, logprobs=0)
    answer = complete(client, **body, n=2, best_of=5)
    for prompt in range(2):
        group = every["choices"][5 * prompt : 5 * prompt + 5]
        means = {
            sum(found["token_logprobs"]) / len(found["token_logprobs"]): choice["text"]
            for choice in group
            for found in [choice["logprobs"]]
        }
        best = [means[mean] for mean in sorted(means, reverse=True)[:2]]
        assert [choice["text"] for choice in answer["choices"][2 * prompt : 2 * prompt + 2]] == best
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert {choice["logprobs"] for choice in answer["choices"]} == {None}
    assert answer["usage"] == every["usage"], "all that were generated are counted"
    scored = choices(client, **body, n=2, best_of=5, logprobs=1)
    assert [choice["text"] for choice in scored] == [choice["text"] for choice in answer["choices"]]


def test_answers_of_a_prompt_read_it_once_and_it_is_counted_once(client, model):
    counted = client.app.state.metrics.registry.get_sample_value
    names = ("subquad_prompt_tokens_total", "subquad_generated_tokens_total")
    before = [counted(name) for name in names]
    with patch.object(model, "read", wraps=model.read) as read:
        usage = complete(client, prompt="x" * 40, n=7, max_tokens=3)["usage"]
    assert sum(call.args[0].shape[1] for call in read.call_args_list) == 39
    after = [counted(name) for name in names]
    assert [new - old for new, old in zip(after, before, strict=True)] == [40, 21]
    assert usage == {"prompt_tokens": 40, "completion_tokens": 21, "total_tokens": 61}


def test_a_prompt_that_time_ends_is_repeated_without_them():
    with served(ScriptedDecoder(slots=0, on_step=slow), config=ServeConfig(max_seconds=0.1)) as client:
        (choice,) = choices(client, prompt="ab", echo=True, logprobs=1)
    assert (choice["text"], choice["subquad"]["ended_by"]) == ("ab", "seconds")
    assert choice["logprobs"] == {
        "text_offset": [0, 1], "token_logprobs": [None, None], "tokens": ["a", "b"], "top_logprobs": [None, None],
    }  # fmt: skip


def test_the_prompt_of_a_model_that_predicts_its_last_tokens_alone_is_refused():
    config = config_of("perceiver_ar self exact").replace(vocab_size=256)
    with served(BatchDecoder(build_model(config).eval(), slots=1)) as client:
        error = error_of(client.post(COMPLETIONS, json={"prompt": "abc", "echo": True, "logprobs": 1}), 400)
        assert "predicts only the last 5; ask for those of the generated tokens alone" in error["message"]
        assert complete(client, prompt="abc", echo=True)["choices"][0]["text"].startswith("abc")
        assert len(choices(client, prompt="abc", logprobs=1)[0]["logprobs"]["tokens"]) == 16
