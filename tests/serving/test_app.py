"""The answers of the two routes, whole and in pieces, and of the other paths."""

import re

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from subquad.data import load_tokenizer
from subquad.generation import BatchDecoder, Generation, SamplingConfig, TextStream
from subquad.generation.speculative import NgramDraft
from subquad.serving import ServeConfig
from subquad.serving.answers import ChatCompletion, Completion, Detokenized, Tokenized
from subquad.serving.engine import Event
from subquad.serving.replies import Choice
from subquad.serving.schemas import CompletionRequest
from subquad.serving.texts import Template, Texts
from tests.cli.folders import word_tokenizer
from tests.serving.helpers import ScriptedDecoder, events, served, slow, tiny_model
from tests.serving.test_schemas import error_of

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


def alone(model, prompt, **sampling):
    """The text that the model's own generation makes of a prompt."""
    tokens = list(Generation(model, list(prompt.encode()), SamplingConfig(**sampling)))
    return load_tokenizer("bytes").decode(tokens)


def complete(client, path=COMPLETIONS, **body):
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def choices(client, path=COMPLETIONS, **body):
    return complete(client, path, **body)["choices"]


def streamed(client, path=COMPLETIONS, **body):
    answer = client.post(path, json={**body, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    return events(answer.text)


@pytest.mark.parametrize("tokens", [1, 20])
def test_a_completion_is_what_the_model_generates(client, model, tokens):
    answer = complete(client, prompt="hello", temperature=0, max_tokens=tokens)
    Completion.model_validate(answer)
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": tokens, "total_tokens": 5 + tokens}
    (choice,) = answer["choices"]
    assert choice["text"] == alone(model, "hello", temperature=0, max_tokens=tokens)
    stats = choice["subquad"]
    assert (choice["finish_reason"], stats["ended_by"], stats["tokens"]) == ("length", "tokens", tokens)
    assert stats["state_bytes"] == BatchDecoder(model, slots=1).state_bytes
    assert stats["tokens_per_s"] is None if tokens == 1 else stats["tokens_per_s"] > 0


@pytest.mark.parametrize("stream", [False, True])
def test_guesses_change_no_answer(model, stream):
    asked = {"prompt": ["aba aba aba", "no", "aba aba"], "temperature": 0.7, "seed": 5, "max_tokens": 20, "n": 2}
    with served(BatchDecoder(model, slots=4)) as plain, served(BatchDecoder(model, slots=4, draft=NgramDraft)) as ours:
        if stream:
            pieces = [streamed(client, **asked) for client in (plain, ours)]
            said = [[(c["index"], c["text"]) for piece in each for c in piece["choices"]] for each in pieces]
            found = [["".join(text for i, text in each if i == index) for index in range(6)] for each in said]
        else:
            found = [[choice["text"] for choice in choices(client, **asked)] for client in (plain, ours)]
    assert found[0] == found[1]


def test_a_prompt_that_begins_as_an_earlier_one_is_not_read_again(model):
    decoder = BatchDecoder(model, slots=2, prefill_chunk=8, prefix_bytes=1 << 20)
    with served(decoder) as client:
        for prompt in ("a shared beginning", "a shared beginning, and more", "short"):
            (choice,) = choices(client, prompt=prompt, temperature=0, max_tokens=6)
            assert choice["text"] == alone(model, prompt, temperature=0, max_tokens=6)
        text = client.get("/metrics").text
    for line in ("hits_total 1", "misses_total 1", "tokens_total 16", "evictions_total 0"):
        assert f"\nsubquad_prefix_{line}.0\n" in text
    assert f"\nsubquad_prefix_bytes {float(decoder.prefixes.nbytes)}\n" in text


@pytest.mark.parametrize("sampling", [
    {"temperature": 0.7, "seed": 5}, {"temperature": 1.5, "seed": 5, "top_k": 3}, {"seed": 5, "top_p": 0.3},
    {"seed": 5, "min_p": 0.5}, {"temperature": 0, "repetition_penalty": 3.0},
    {"temperature": 0, "presence_penalty": 2.0, "frequency_penalty": 0.5},
])  # fmt: skip
def test_every_way_to_sample_reaches_the_decoder(client, model, sampling):
    (choice,) = choices(client, prompt="hello", max_tokens=30, **sampling)
    assert choice["text"] == alone(model, "hello", max_tokens=30, **sampling)


def test_each_prompt_has_n_answers_in_order_and_their_pieces_join_to_them(client, model):
    body = {"prompt": ["ab", "cde"], "n": 2, "seed": 7, "max_tokens": 6}
    whole = complete(client, **body)
    wanted = [alone(model, prompt, max_tokens=6, seed=7 + j) for j, prompt in enumerate(["ab", "ab", "cde", "cde"])]
    assert [(choice["index"], choice["text"]) for choice in whole["choices"]] == list(enumerate(wanted))
    assert whole["usage"] == {"prompt_tokens": 5, "completion_tokens": 24, "total_tokens": 29}
    *chunks, last = streamed(client, **body, stream_options={"include_usage": True})
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    texts, ends = [""] * 4, [None] * 4
    for chunk in chunks:
        (choice,) = chunk["choices"]
        assert (chunk["object"], chunk["usage"], chunk["id"]) == ("text_completion", None, last["id"])
        assert ends[choice["index"]] is None
        texts[choice["index"]] += choice["text"]
        ends[choice["index"]] = choice["finish_reason"]
        assert ("subquad" in choice) == (choice["finish_reason"] is not None)
    assert (texts, ends) == (wanted, ["length"] * 4)


def test_a_prompt_may_be_token_ids(client):
    texts = [
        choice["text"]
        for prompt in ("hi!", list(b"hi!"), [list(b"hi!")] * 2)
        for choice in choices(client, prompt=prompt, temperature=0)
    ]
    assert texts == texts[:1] * 4


def test_statistics_come_with_each_piece_if_asked_for(client):
    chunks = streamed(client, prompt="ab", seed=1, max_tokens=20, stream_options={"include_stats": True})
    found = [chunk["choices"][0]["subquad"] for chunk in chunks]
    counts = [stats["tokens"] for stats in found]
    assert counts == sorted(counts)
    assert (counts[-1], len(counts) > 5, "usage" in chunks[0]) == (20, True, False)
    assert len({stats["state_bytes"] for stats in found} - {0}) == 1


@pytest.mark.parametrize(("stop", "tokens", "shown", "ends"), [
    (["never", "hij"], 20, "bcdefg", ("stop", "stop_string")), ("hiX", 9, "bcdefghij", ("length", "tokens")),
])  # fmt: skip
def test_a_text_ends_before_a_stop_string_of_several_tokens(stop, tokens, shown, ends):
    body = {"prompt": "a", "max_tokens": tokens, "stop": stop}
    with served(ScriptedDecoder()) as client:  # counts up from the prompt: b c d e f ...
        (whole,), chunks = choices(client, **body), streamed(client, **body)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["text"] == shown
    assert (whole["finish_reason"], whole["subquad"]["ended_by"]) == ends


def test_an_answer_at_its_stop_string_frees_its_slot_while_others_go_on():
    running = []

    def look():
        running.append(len(decoder.requests))
        slow()

    decoder = ScriptedDecoder(on_step=look)
    with served(decoder) as client:  # "d" comes after 3 and after 35 tokens
        found = choices(client, prompt=["a", "A"], max_tokens=2000, stop="d")
    assert [(choice["finish_reason"], choice["subquad"]["tokens"]) for choice in found] == [("stop", 3), ("stop", 35)]
    assert running[0] == 2
    assert running.count(1) > 5


def test_a_chat_without_a_template_is_lines_of_roles(client, model):
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": parts}]
    answer = complete(client, CHAT, messages=messages, temperature=0, max_completion_tokens=12)
    ChatCompletion.model_validate(answer)
    prompt = "system: be\nuser: hi\nassistant:"
    wanted = alone(model, prompt, temperature=0, max_tokens=12).partition("\nuser:")[0]
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": wanted}
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    assert complete(client, CHAT, messages=HI, temperature=0)["usage"]["completion_tokens"] == 32, "max_tokens"


def test_a_chat_ends_before_the_users_next_turn():
    turn = "ok\nuser: more"

    class Talking(ScriptedDecoder):
        def step(self):
            made = [(request, ord(turn[len(request.tokens)])) for request in self.requests]
            for request, token in made:
                request.tokens.append(token)
            return made

    with served(Talking()) as client:
        (choice,) = choices(client, CHAT, messages=HI)
    assert (choice["message"]["content"], choice["finish_reason"]) == ("ok", "stop")


def test_a_streamed_chat_begins_with_the_role(client):
    body = {"messages": HI, "seed": 1, "max_tokens": 10}
    (whole,), chunks = choices(client, CHAT, **body), streamed(client, CHAT, **body)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert (deltas[0], deltas[-1]) == ({"role": "assistant", "content": ""}, {})
    assert "".join(delta.get("content", "") for delta in deltas) == whole["message"]["content"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_a_chat_template_makes_the_prompt_and_may_refuse():
    source = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[go]{% endif %}"
    )
    prompts = []
    with served(ScriptedDecoder(on_add=prompts.append), template=Template(source, {"bos_token": "^"})) as client:
        complete(client, CHAT, messages=HI, max_tokens=2)
        assert bytes(prompts[0]).decode() == "^[user]hi[go]"
        answer = client.post(CHAT, json={"messages": [{"role": "system", "content": "a"}]})
        message = "the model's chat template refuses these messages: no system"
        assert error_of(answer, 400)["message"] == message
        assert client.get("/v1/models").json()["data"][0]["subquad"]["chat_template"] is True


def test_a_stop_token_ends_a_text_and_is_not_shown():
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "</s>": 2}, unk_token="a"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Whitespace(), decoders.Fuse()
    choice = Choice(0, TextStream(tokenizer, [0]))
    assert [choice.take(event) for event in (Event(0, 1, 10, 1.0), Event(0, 2, 10, 2.0, "stop"))] == ["b", ""]
    assert (choice.finish, choice.stats()["ended_by"]) == ("stop", "stop_token")


def test_a_text_ends_at_the_tokens_of_the_model_and_of_the_request_but_not_too_early():
    def counted(**body):  # the decoder counts up from the prompt: b c d e f ...
        (choice,) = choices(client, prompt="a", max_tokens=20, **body)
        return choice["text"], choice["subquad"]["ended_by"]

    tokenizer = load_tokenizer("bytes")
    tokenizer.add_special_tokens(["f"])
    with served(ScriptedDecoder(), texts=Texts(tokenizer, end_tokens=frozenset([ord("d")]))) as client:
        assert counted() == ("bc", "stop_token")
        assert counted(stop_token_ids=[ord("c")]) == ("b", "stop_token")
        assert counted(ignore_eos=True, stop="f") == ("bcde", "stop_token"), "a special token has no text to be found"
        assert counted(ignore_eos=True, stop="hi") == ("bcdeg", "stop_string")


def test_bias_and_fewest_tokens_reach_the_decoder(model):
    texts = Texts(load_tokenizer("bytes"), end_tokens=frozenset([ord("x")]))
    with served(BatchDecoder(model, slots=2), texts=texts) as client:
        always = {"prompt": "a", "max_tokens": 9, "temperature": 0, "logit_bias": {str(ord("x")): 100}}
        assert [choice["text"] for choice in choices(client, **always)] == [""]
        (choice,) = choices(client, **always, min_tokens=4)
        assert choice["subquad"]["tokens"] == 5
        assert [choice["text"] for choice in choices(client, **always, ignore_eos=True)] == ["x" * 9]


def test_prompts_and_chats_become_tokens_and_tokens_text():
    tokenizer = word_tokenizer({"<unk>": 0, "<s>": 1, "user": 2, "hi": 3, "assistant": 4, "</s>": 9}, ["<s>"])
    with served(ScriptedDecoder(), texts=Texts(tokenizer)) as client:
        found = complete(client, "/tokenize", prompt="<s> hi there", return_token_strs=True)
        Tokenized.model_validate(found)
        words = ["<s>", "hi", "<unk>"]
        assert found == {
            "count": 3,
            "max_model_len": ServeConfig().max_context,
            "tokens": [1, 3, 0],
            "token_strs": words,
        }
        assert complete(client, "/tokenize", prompt="hi", model="tiny")["token_strs"] is None
        chat = complete(client, "/tokenize", messages=HI, return_token_strs=True)
        assert chat["tokens"] == list(Texts(tokenizer).encode(Texts(tokenizer).chat(HI)[0]))
        found = complete(client, "/detokenize", tokens=[1, 3, 9, 8])  # no token is 8
        Detokenized.model_validate(found)
        assert found == {"prompt": "<s> hi </s>"}
        assert complete(client, "/detokenize", tokens=[]) == {"prompt": ""}
        message = "tokens must be below 10, got 10"
        assert error_of(client.post("/detokenize", json={"tokens": [1, 10]}), 400)["message"] == message
        for path, body in (("/tokenize", {"prompt": "hi"}), ("/detokenize", {"tokens": [1]})):
            assert error_of(client.post(path, json={**body, "model": "x"}), 404)["code"] == "model_not_found"


def test_the_default_number_of_tokens_fits_the_table_of_positions():
    decoder = BatchDecoder(tiny_model(position="learned", max_positions=12), slots=1, max_context=96)
    with served(decoder, config=ServeConfig(slots=1, max_prompt=64, max_tokens=32)) as client:
        assert complete(client, prompt="hello", temperature=0)["usage"]["completion_tokens"] == 8
        assert complete(client, "/tokenize", prompt="hello")["max_model_len"] == 13
        message = error_of(client.post(COMPLETIONS, json={"prompt": "hello", "max_tokens": 9}), 400)["message"]
    assert re.match(r"a sequence may have 13 tokens \(max_positions=12 of .*, but this one asks for 14", message)


def test_the_model_its_health_and_its_numbers_are_told(client):
    complete(client, prompt="abc", max_tokens=4)
    health = client.get("/health").json()
    assert (health["status"], health["model"]) == ("ok", "tiny")
    (model,) = client.get("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["subquad"]["parameters"]) == ("tiny", "model", 123)
    assert client.get("/v1/models/tiny").json() == model
    metrics = client.get("/metrics")
    assert metrics.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    lines = [line.rpartition(" ") for line in metrics.text.splitlines() if not line.startswith("#")]
    values = {name.removeprefix("subquad_"): float(value) for name, _, value in lines}
    assert (values["slots"], values["slots_free"], values["sequences_running"]) == (4, 4, 0)
    assert values['requests_total{method="POST",route="/v1/completions",status="200"}'] >= 1
    first, later = (values[f"time_{name}_seconds_count"] for name in ("to_first_token", "per_token"))
    assert first + later == values["generated_tokens_total"] >= 4
    assert min(values["prompt_tokens_total"], values["state_bytes"]) >= 3


def test_another_model_is_not_found(client):
    error = error_of(client.post(COMPLETIONS, json={"prompt": "a", "model": "gpt"}), 404)
    assert (error["message"], error["param"]) == ("unknown model 'gpt'; valid: tiny", "model")
    assert error["code"] == error_of(client.get("/v1/models/gpt"), 404)["code"] == "model_not_found"


@pytest.mark.parametrize("path", ["/", "/health"])
def test_load_balancers_may_ask_with_head(client, path):
    answer, other = client.head(path), client.post(path)
    assert (answer.status_code, other.status_code, other.headers["allow"]) == (200, 405, "GET, HEAD")
    assert answer.headers["content-type"] == client.get(path).headers["content-type"]
    assert set(client.get("/openapi.json").json()["paths"][path]) == {"get", "head"}


def test_the_page_is_one_file_that_asks_no_other_host_and_its_form_asks_what_the_server_accepts(client):
    answer = client.get("/")
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "connect-src 'self'" in answer.headers["content-security-policy"]
    assert not any(part in answer.text for part in ("src=", "@import", "url(", "//cdn", "https://"))
    fields = re.findall(r'id="(\w+)" type="number" min="([^"]+)"(?: max="([^"]+)")?', answer.text)
    assert len(fields) == 3
    for name, *limits in fields:
        for value in filter(None, limits):
            field = {"tokens": "max_tokens"}.get(name, name)
            CompletionRequest.model_validate({"prompt": "a", field: float(value) if "." in value else int(value)})
