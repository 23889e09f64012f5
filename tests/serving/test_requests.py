"""What is refused, and how it is said."""

import json

import pytest
from pydantic import ValidationError

from subquad.serving.schemas import ChatRequest, CompletionRequest

ERROR_KEYS = {"message", "type", "param", "code"}


def error_of(answer, status):
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert set(answer.json()) == {"error"}
    assert set(answer.json()["error"]) == ERROR_KEYS
    return answer.json()["error"]


@pytest.mark.parametrize(("body", "param", "message"), [
    ({}, "prompt", "prompt must be a text, a list of token ids, or a list of at most 128 texts or lists of token ids"),
    ({"prompt": 1}, "prompt", "prompt must be a text"),
    ({"prompt": None}, "prompt", "prompt must be a text"),
    ({"prompt": []}, "prompt", "none may be empty"),
    ({"prompt": [[]]}, "prompt", "none may be empty"),
    ({"prompt": [[1], "a"]}, "prompt", "prompt must be a text"),
    ({"prompt": [True]}, "prompt", "prompt must be a text"),
    ({"prompt": ["a"] * 129}, "prompt", "at most 128 texts"),
    ({"prompt": ""}, "prompt", "none may be empty"),
    ({"prompt": "x" * 65}, "prompt", "a prompt may have 64 tokens, and this one has 65"),
    ({"prompt": [1] * 65}, "prompt", "a prompt may have 64 tokens, and this one has 65"),
    ({"prompt": [256]}, None, "the prompt's tokens must be between 0 and 255, got 256"),
    ({"prompt": [-1]}, "prompt", "prompt must be a text"),
    ({"promt": "a"}, "promt", "unknown field 'promt'; did you mean 'prompt'? valid: max_tokens, min_p, model, n, "),
    ({"prompt": "a", "n": 9}, "n", "1 prompts times n=9 are more than the 8 sequences that the server takes at once"),
    ({"prompt": ["a", "b", "c"], "n": 3}, "n", "3 prompts times n=3 are more than the 8 sequences"),
    ({"prompt": "a", "n": 0}, "n", "n should be greater than or equal to 1"),
    ({"prompt": "a", "n": True}, "n", "n should be a valid integer"),
    ({"prompt": "a", "max_tokens": 33}, "max_tokens", "max_tokens must be at most 32, got 33"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens", "max_tokens should be greater than or equal to 1"),
    ({"prompt": "a", "max_tokens": "5"}, "max_tokens", "max_tokens should be a valid integer"),
    ({"prompt": "a", "temperature": 2.1}, "temperature", "temperature should be less than or equal to 2"),
    ({"prompt": "a", "temperature": -1}, "temperature", "temperature should be greater than or equal to 0"),
    ({"prompt": "a", "top_p": 0}, "top_p", "top_p should be greater than 0"),
    ({"prompt": "a", "top_k": 0}, "top_k", "top_k should be greater than or equal to 1"),
    ({"prompt": "a", "min_p": 1.5}, "min_p", "min_p should be less than or equal to 1"),
    ({"prompt": "a", "repetition_penalty": 0}, "repetition_penalty", "greater than or equal to 0.01"),
    ({"prompt": "a", "seed": 1 << 63}, "seed", "seed should be less than 9223372036854775808"),
    ({"prompt": "a", "stop": ""}, "stop", "stop must be a text of 1 to 1000 characters or a list of at most 4 of them"),
    ({"prompt": "a", "stop": list("abcde")}, "stop", "a list of at most 4 of them"),
    ({"prompt": "a", "stream": "yes"}, "stream", "stream should be a valid boolean"),
    ({"prompt": "a", "stream_options": {}}, "stream_options", "stream_options needs stream: true"),
    ({"prompt": "a", "stream": True, "stream_options": {"x": 1}}, "stream_options", "unknown field 'stream_options.x'"),
    ({"prompt": "a", "logprobs": 0}, "logprobs", "logprobs is not supported by this server; leave it out"),
    ({"prompt": "a", "echo": 0}, "echo", "echo is not supported by this server"),
    ({"prompt": "a", "presence_penalty": False}, "presence_penalty", "presence_penalty is not supported"),
    ({"prompt": "a", "echo": True}, "echo", "echo is not supported by this server"),
    ({"prompt": "a", "best_of": 2}, "best_of", "best_of is not supported by this server"),
    ({"prompt": "a", "suffix": "b"}, "suffix", "suffix is not supported by this server"),
    ({"prompt": "a", "frequency_penalty": 0.1}, "frequency_penalty", "frequency_penalty is not supported"),
    ({"prompt": "a", "presence_penalty": -1}, "presence_penalty", "presence_penalty is not supported"),
    ({"prompt": "a", "logit_bias": {"5": 1}}, "logit_bias", "logit_bias is not supported"),
])  # fmt: skip
def test_a_completion_that_is_wrong_says_what(client, body, param, message):
    error = error_of(client.post("/v1/completions", json=body), 400)
    assert message in error["message"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(("body", "param", "message"), [
    ({}, "messages", "messages is missing"),
    ({"messages": []}, "messages", "messages List should have at least 1 item"),
    ({"messages": [{"role": "user"}]}, "messages", "messages.0.content is missing"),
    ({"messages": [{"role": "robot", "content": "a"}]}, "messages", "messages.0.role should be 'system', 'developer'"),
    ({"messages": [{"role": "user", "content": "a", "x": 1}]}, "messages", "unknown field 'messages.0.x'"),
    ({"messages": [{"role": "user", "content": "a"}], "prompt": "b"}, "prompt", "unknown field 'prompt'; "),
    ({"messages": [{"role": "user", "content": "x" * 80}]}, "messages", "a prompt may have 64 tokens, and this one "),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "messages.0.content"),
    ({"messages": [{"role": "user", "content": "a"}], "tools": [{}]}, "tools", "tools is not supported"),
    ({"messages": [{"role": "user", "content": "a"}], "logprobs": True}, "logprobs", "logprobs is not supported"),
    ({"messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "max_completion_tokens": 4}, "max_tokens",
     "max_tokens and max_completion_tokens are the same limit; give one of them"),
])  # fmt: skip
def test_a_chat_that_is_wrong_says_what(client, body, param, message):
    error = error_of(client.post("/v1/chat/completions", json=body), 400)
    assert message in error["message"]
    assert error["param"] == param


@pytest.mark.parametrize(("body", "kind", "message"), [
    (b"{", "application/json", "the body is not valid JSON: Expecting property name"),
    (b"", "application/json", "the body must be a JSON object"),
    (b"[]", "application/json", "the body must be a JSON object, sent as Content-Type: application/json"),
    (b'{"prompt": "a"}', "text/plain", "the body must be a JSON object, sent as Content-Type: application/json"),
    (b'{"prompt": "\xff"}', "application/json", "the body must be UTF-8"),
    (b'{"prompt": "\xed\xa0\x80"}', "application/json", "the body must be UTF-8"),
    (b'{"prompt": "a", "\xed\xa0\x80": 1}', "application/json", "the body must be UTF-8"),
    ('{"prompt": "\ud800"}'.encode("utf-16", "surrogatepass"), "application/json", "the body must be UTF-8"),
    ('{"prompt": "\ud800\x80"}'.encode("utf-16-le", "surrogatepass"), "application/json", "the body must be UTF-8"),
    ('{"prompt": "\ud800"}'.encode("utf-32-be", "surrogatepass"), "application/json", "the body must be UTF-8"),
    ('{"prompt": "a"}'.encode("utf-16-le"), "application/json", "the body must be UTF-8"),
    (b"[" * 10_000, "application/json", "the body is not valid JSON"),
    (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "application/json", "the body is not valid JSON"),
    (b'{"prompt": "a", "temperature": NaN}', "application/json", "temperature should be a finite number"),
    (b'{"prompt": "a", "temperature": 1e999}', "application/json", "temperature should be a finite number"),
    (rb'{"prompt": "\ud800"}', "application/json", "the body must be Unicode text, and it spells half a surrogate"),
    (rb'{"prompt": "a", "\uDFFF": 1}', "application/json", "half a surrogate pair"),
    (rb'{"prompt": "a", "stream": true, "stream_options": {"\ud800": 1}}', "application/json", "half a surrogate"),
    (rb'{"prompt": "\ud83d"', "application/json", "the body is not valid JSON"),
])  # fmt: skip
def test_a_body_that_cannot_be_read_says_so(client, body, kind, message):
    answer = client.post("/v1/completions", content=body, headers={"Content-Type": kind})
    assert message in error_of(answer, 400)["message"]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-32"])
def test_half_a_pair_in_a_chat_is_refused_in_every_encoding(client, encoding):
    body = '{"messages": [{"role": "user", "content": "\ud800"}]}'.encode(encoding, "surrogatepass")
    answer = client.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
    assert error_of(answer, 400)["message"] == "the body must be UTF-8"


MANY = 200_000
"""Items of a wrong body of about a megabyte."""


@pytest.mark.parametrize(("kind", "body"), [
    (ChatRequest, {"messages": [{"role": "user", "content": [1] * MANY}]}),
    (ChatRequest, {"messages": [{"role": "user", "content": [[1] * MANY]}]}),
    (ChatRequest, {"messages": [{"role": "user", "content": [{"type": "text"}] * MANY}]}),
    (ChatRequest, {"messages": [{"role": "user", "content": [1] * 4000}] * 4000}),
    (ChatRequest, {"messages": [1] * MANY}),
    (ChatRequest, {"messages": [{"role": "user", "content": "a", **{str(i): i for i in range(MANY)}}]}),
    (ChatRequest, {"messages": [{"role": "user", "content": [{str(i): i for i in range(MANY)}]}]}),
    (ChatRequest, {str(i): i for i in range(MANY)}),
    (CompletionRequest, {"prompt": [-1] * MANY}),
    (CompletionRequest, {"prompt": [True] * MANY}),
    (CompletionRequest, {"prompt": [""] * MANY}),
    (CompletionRequest, {"prompt": [["a"] * MANY]}),
    (CompletionRequest, {"prompt": [["a"] * 1000] * 128}),
    (CompletionRequest, {"prompt": [[]] * MANY}),
    (CompletionRequest, {"prompt": [1, *([-1] * MANY)]}),
    (CompletionRequest, {"prompt": "a", "stop": [1] * MANY}),
    (CompletionRequest, {"prompt": "a", "stream_options": {str(i): i for i in range(MANY)}}),
])  # fmt: skip
def test_a_large_wrong_body_makes_few_errors(kind, body):
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    assert caught.value.error_count() <= 5


def test_a_message_has_a_limited_number_of_parts():
    part = {"type": "text", "text": "a"}
    ChatRequest.model_validate({"messages": [{"role": "user", "content": [part] * 128}]})
    with pytest.raises(ValidationError, match="at most 128 items"):
        ChatRequest.model_validate({"messages": [{"role": "user", "content": [part] * 129}]})


@pytest.mark.parametrize(("body", "status"), [
    ({"prompt": "a", "x" * 15_000: 1}, 400),
    ({"prompt": "a", "stream": True, "stream_options": {"x" * 15_000: 1}}, 400),
    ({"prompt": "a", "model": "x" * 15_000}, 404),
])  # fmt: skip
def test_an_error_repeats_little_of_what_was_sent(client, body, status):
    answer = client.post("/v1/completions", json=body)
    error = error_of(answer, status)
    assert "x" * 50 in error["message"]
    assert len(answer.text) < 1000


def test_an_error_repeats_little_of_a_path_and_a_method(client):
    assert len(client.get("/" + "x" * 15_000).text) < 1000
    assert len(client.request("X" * 15_000, "/health").text) < 1000


def test_a_whole_surrogate_pair_is_a_character(client):
    answer = client.post(
        "/v1/completions", content=rb'{"prompt": "\ud83d\ude00"}', headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 200
    assert answer.json()["usage"]["prompt_tokens"] == 4


@pytest.mark.parametrize("extra", [
    {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "logprobs": None, "echo": False, "best_of": 1},
    {"suffix": None, "user": "me", "stop": None, "n": None, "stream": None, "temperature": None, "top_p": None},
    {"max_tokens": None, "seed": None, "stop": [], "stream_options": None, "model": None, "top_k": None},
])  # fmt: skip
def test_fields_that_ask_for_nothing_are_taken(client, extra):
    answer = client.post("/v1/completions", json={"prompt": "a", **extra})
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 16


def test_another_model_is_not_found(client):
    error = error_of(client.post("/v1/completions", json={"prompt": "a", "model": "gpt"}), 404)
    assert error["message"] == "there is no model 'gpt'; valid: tiny"
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert error_of(client.get("/v1/models/gpt"), 404)["code"] == "model_not_found"


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "HEAD"])
def test_a_method_that_a_path_does_not_take(client, method):
    answer = client.request(method, "/v1/completions")
    assert answer.status_code == 405
    assert answer.headers["allow"] == "POST"
    if method != "HEAD":
        assert error_of(answer, 405)["message"] == f"/v1/completions does not take {method}"


@pytest.mark.parametrize("path", ["/nothing", "/v1", "/v1/completions/", "/docs", "/%00", "/v1/%ff"])
def test_a_path_that_is_not_there(client, path):
    error = error_of(client.get(path), 404)
    assert error["message"].startswith("there is nothing at ")
    assert "/v1/chat/completions, /v1/completions, /v1/models" in error["message"]


def test_every_error_of_the_document_is_described(client):
    document = client.get("/openapi.json").json()
    assert "HTTPValidationError" not in document["components"]["schemas"]
    responses = document["paths"]["/v1/completions"]["post"]["responses"]
    assert set(responses) == {"200", "400", "401", "404", "408", "413", "429", "500", "503"}
    assert "422" not in json.dumps(document)
    assert document["components"]["schemas"]["CompletionRequest"]["additionalProperties"] is False
