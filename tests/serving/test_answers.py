"""What the two routes answer, whole and in pieces, with a real model behind them."""

import time

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from subquad.data import load_tokenizer
from subquad.generation import BatchDecoder, Generation, SamplingConfig
from subquad.serving import ServeConfig
from subquad.serving.engine import Event
from subquad.serving.replies import Choice
from subquad.serving.schemas import ChatCompletion, Completion
from subquad.serving.texts import Template, Texts


def alone(model, prompt, **sampling):
    """What the model's own generation makes of a prompt."""
    tokens = list(Generation(model, list(prompt.encode()), SamplingConfig(**sampling)))
    return load_tokenizer("bytes").decode(tokens)


def complete(client, **body):
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_completion_is_what_the_model_generates(client, model):
    answer = complete(client, prompt="hello", temperature=0, max_tokens=20)
    Completion.model_validate(answer)
    (choice,) = answer["choices"]
    assert choice["text"] == alone(model, "hello", temperature=0, max_tokens=20)
    assert choice["finish_reason"] == "length"
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 20, "total_tokens": 25}
    assert choice["subquad"]["ended_by"] == "tokens"
    assert choice["subquad"]["tokens"] == 20
    assert choice["subquad"]["state_bytes"] == BatchDecoder(model, slots=1).state_bytes
    assert choice["subquad"]["tokens_per_s"] > 0


@pytest.mark.parametrize("sampling", [
    {"temperature": 0.7, "seed": 5}, {"temperature": 1.5, "seed": 5, "top_k": 3}, {"seed": 5, "top_p": 0.3},
    {"seed": 5, "min_p": 0.5}, {"temperature": 0, "repetition_penalty": 3.0},
])  # fmt: skip
def test_every_way_to_sample_reaches_the_decoder(client, model, sampling):
    (choice,) = complete(client, prompt="hello", max_tokens=30, **sampling)["choices"]
    assert choice["text"] == alone(model, "hello", max_tokens=30, **sampling)


def test_many_prompts_have_n_answers_each_in_their_order(client, model):
    answer = complete(client, prompt=["ab", "cde"], n=2, seed=7, max_tokens=6)
    wanted = [
        alone(model, prompt, max_tokens=6, seed=7 + j)
        for prompt, seeds in (("ab", (0, 1)), ("cde", (2, 3)))
        for j in seeds
    ]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in answer["choices"]] == wanted
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 24, "total_tokens": 29}


def test_a_prompt_may_be_token_ids(client):
    text = complete(client, prompt="hi!", temperature=0)["choices"][0]["text"]
    assert complete(client, prompt=list(b"hi!"), temperature=0)["choices"][0]["text"] == text
    both = complete(client, prompt=[list(b"hi!"), list(b"hi!")], temperature=0)["choices"]
    assert [choice["text"] for choice in both] == [text, text]


def test_pieces_joined_are_the_whole(client, events):
    body = {"prompt": ["ab", "c"], "n": 2, "seed": 3, "max_tokens": 25}
    whole = complete(client, **body)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    answer = client.post("/v1/completions", json={**body, **options})
    assert answer.headers["content-type"].startswith("text/event-stream")
    *chunks, last = events(answer.text)
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    texts, ends = [""] * 4, [None] * 4
    for chunk in chunks:
        (choice,) = chunk["choices"]
        assert chunk["object"] == "text_completion"
        assert chunk["usage"] is None
        assert chunk["id"] == last["id"]
        assert ends[choice["index"]] is None
        texts[choice["index"]] += choice["text"]
        ends[choice["index"]] = choice["finish_reason"]
        assert ("subquad" in choice) == (choice["finish_reason"] is not None)
    assert texts == [choice["text"] for choice in whole["choices"]]
    assert ends == ["length"] * 4


def test_statistics_come_with_each_piece_where_they_are_asked_for(client, events):
    options = {"stream": True, "stream_options": {"include_stats": True}}
    answer = client.post("/v1/completions", json={"prompt": "ab", "seed": 1, "max_tokens": 20, **options})
    found = [chunk["choices"][0]["subquad"] for chunk in events(answer.text)]
    counts = [stats["tokens"] for stats in found]
    assert counts == sorted(counts)
    assert counts[-1] == 20
    assert len(counts) > 5
    assert {stats["state_bytes"] for stats in found} == {found[0]["state_bytes"]}
    assert found[0]["state_bytes"] > 0
    assert "usage" not in events(answer.text)[0]


@pytest.mark.parametrize("tokens", [1, 2, 17])
def test_the_state_has_a_size_however_few_tokens_there_are(client, model, tokens):
    (choice,) = complete(client, prompt="hello", max_tokens=tokens)["choices"]
    assert choice["subquad"]["state_bytes"] == BatchDecoder(model, slots=1).state_bytes


def test_a_stop_string_ends_the_text_before_it(client, model):
    text = alone(model, "hello", temperature=0, max_tokens=30)
    stop = text[3:6]
    body = {"prompt": "hello", "temperature": 0, "max_tokens": 30, "stop": ["never", stop]}
    answer = complete(client, **body)
    (choice,) = answer["choices"]
    assert choice["text"] == text[: text.index(stop)]
    assert choice["finish_reason"] == "stop"
    assert choice["subquad"]["ended_by"] == "stop_string"
    assert answer["usage"]["completion_tokens"] <= 30


def test_a_stop_string_over_several_tokens_is_never_half_shown(make, scripted, served, events):
    body = {"prompt": "a", "max_tokens": 20, "stream": True, "stop": "hij"}
    with served(scripted()) as client:  # counts up from the prompt: b c d e f ...
        chunks = events(client.post("/v1/completions", json=body).text)
        texts = [chunk["choices"][0]["text"] for chunk in chunks]
        assert "".join(texts) == "bcdefg"
        assert not any(set("hij") & set(text) for text in texts)
        # What was the beginning of a stop string and is none after all is shown.
        body = {**body, "stop": "hiX", "max_tokens": 9}
        chunks = events(client.post("/v1/completions", json=body).text)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "bcdefghij"


def test_an_answer_that_has_met_a_stop_string_frees_its_slot_while_others_go_on(scripted, served):
    running = []

    def look():
        running.append(len(decoder.requests))
        time.sleep(0.002)

    decoder = scripted(on_step=look)
    with served(decoder) as client:
        body = {"prompt": ["a", "A"], "max_tokens": 2000, "stop": "d"}  # after 3 and after 35 tokens
        choices = client.post("/v1/completions", json=body).json()["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["stop", "stop"]
    assert [choice["subquad"]["tokens"] for choice in choices] == [3, 35]
    assert running[0] == 2
    assert running.count(1) > 5


def test_a_chat_without_a_template_is_lines_of_roles(client, model):
    messages = [
        {"role": "system", "content": "be"},
        {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]},
    ]
    body = {"messages": messages, "temperature": 0, "max_completion_tokens": 12}
    answer = client.post("/v1/chat/completions", json=body).json()
    ChatCompletion.model_validate(answer)
    prompt = "system: be\nuser: hi\nassistant:"
    wanted = alone(model, prompt, temperature=0, max_tokens=12).partition("\nuser:")[0]
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": wanted}
    assert answer["usage"]["prompt_tokens"] == len(prompt)


def test_a_chat_without_a_number_of_tokens_takes_what_there_is(client):
    body = {"messages": [{"role": "user", "content": "a"}], "temperature": 0}
    assert client.post("/v1/chat/completions", json=body).json()["usage"]["completion_tokens"] == 32


def test_a_chat_ends_before_the_users_next_turn(scripted, served):
    turn = "ok\nuser: more"

    class Talking(scripted):
        def step(self):
            made = [(request, ord(turn[len(request.tokens)])) for request in self.requests]
            for request, token in made:
                request.tokens.append(token)
            return made

    with served(Talking()) as client:
        body = {"messages": [{"role": "user", "content": "a"}]}
        choice = client.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert choice["message"]["content"] == "ok"
    assert choice["finish_reason"] == "stop"


def test_a_streamed_chat_begins_with_the_role(client, events):
    body = {"messages": [{"role": "user", "content": "hi"}], "seed": 1, "max_tokens": 10}
    whole = client.post("/v1/chat/completions", json=body).json()
    chunks = events(client.post("/v1/chat/completions", json={**body, "stream": True}).text)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[-1] == {}
    assert "".join(delta.get("content", "") for delta in deltas) == whole["choices"][0]["message"]["content"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_a_chat_template_makes_the_prompt_and_may_refuse(scripted, served):
    source = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[go]{% endif %}"
    )
    prompts = []
    template = Template(source, {"bos_token": "^"})
    with served(scripted(on_add=prompts.append), template=template) as client:
        body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
        assert client.post("/v1/chat/completions", json=body).status_code == 200
        assert bytes(prompts[0]).decode() == "^[user]a[go]"
        body["messages"] = [{"role": "system", "content": "a"}]
        answer = client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == "the model's chat template refuses these messages: no system"
        assert client.get("/v1/models").json()["data"][0]["subquad"]["chat_template"] is True


def test_a_stop_token_ends_a_text_and_is_not_shown(scripted):
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "</s>": 2}, unk_token="a"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Whitespace(), decoders.Fuse()
    texts = Texts(tokenizer)
    assert texts.stop_tokens == {2}
    choice = Choice(0, texts.stream([0], []))
    events = (Event(0, 1, 10, 1.0), Event(0, 2, 10, 2.0, "stop"))
    assert [choice.take(event) for event in events] == ["b", ""]
    assert (choice.finish, choice.stats()["ended_by"]) == ("stop", "stop_token")


def test_a_default_number_of_tokens_leaves_place_in_the_table_of_positions(tiny_model, served):
    model = tiny_model(position="learned", max_positions=12)
    config = ServeConfig(slots=1, max_prompt=64, max_tokens=32)
    with served(BatchDecoder(model, slots=1, max_context=96), config=config) as client:
        assert complete(client, prompt="hello", temperature=0)["usage"]["completion_tokens"] == 8
        answer = client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 9})
        assert answer.status_code == 400
        message = answer.json()["error"]["message"]
        assert message.startswith("a sequence may have 13 tokens (max_positions=12 of the model")
        assert "and this one asks for 14" in message


def test_the_model_the_health_and_the_numbers(client):
    complete(client, prompt="abc", max_tokens=4)
    health = client.get("/health")
    assert health.json()["status"] == "ok"
    assert health.json()["model"] == "tiny"
    (model,) = client.get("/v1/models").json()["data"]
    assert (model["id"], model["object"]) == ("tiny", "model")
    assert model["subquad"]["parameters"] == 123
    assert client.get("/v1/models/tiny").json() == model
    metrics = client.get("/metrics")
    assert metrics.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    lines = metrics.text.splitlines()
    assert "subquad_slots 4.0" in lines
    assert "subquad_slots_free 4.0" in lines
    assert "subquad_sequences_running 0.0" in lines
    assert any(
        line.startswith('subquad_requests_total{method="POST",route="/v1/completions",status="200"} ') for line in lines
    )
    values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}
    assert values["subquad_generated_tokens_total"] >= 4
    assert values["subquad_prompt_tokens_total"] >= 3
    assert values["subquad_state_bytes"] > 0
    first, later = (values[f"subquad_time_{name}_seconds_count"] for name in ("to_first_token", "per_token"))
    assert first + later == values["subquad_generated_tokens_total"]
    assert values["subquad_time_per_token_seconds_sum"] > 0


@pytest.mark.parametrize("path", ["/", "/health"])
def test_load_balancers_may_ask_with_head(client, path):
    answer = client.head(path)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == client.get(path).headers["content-type"]
    answer = client.post(path)
    assert answer.status_code == 405
    assert answer.headers["allow"] == "GET, HEAD"
    assert set(client.get("/openapi.json").json()["paths"][path]) == {"get", "head"}


def test_paths_that_clients_make_up_have_no_labels(client):
    for i in range(20):
        client.request(f"METHOD{i}", f"/v1/path{i}")
    text = client.get("/metrics").text
    assert 'method="other",route="other",status="404"' in text
    assert "path1" not in text
    assert "METHOD1" not in text
