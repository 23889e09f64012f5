"""Requests that are refused, and the words of the refusals."""

import json

import pytest
from pydantic import ValidationError

from subquad.serving.schemas import ChatRequest, CompletionRequest

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
JSON = "application/json"


def error_of(answer, status):
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == JSON
    assert set(answer.json()) == {"error"}
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    return answer.json()["error"]


@pytest.mark.parametrize(("body", "param", "message"), [
    ({}, "prompt", "prompt must be a text, a list of token ids, or a list of at most 128 texts or lists of token ids"),
    *(({"prompt": prompt}, "prompt", "prompt must be a text, a list of token ids, or a list of at most 128")
      for prompt in (1, None, [], "", [[]], [[1], "a"], [True], [-1], ["a"] * 129)),
    *(({"prompt": prompt}, "prompt", "a prompt may have 64 tokens, but this one has 65")
      for prompt in ("x" * 65, [1] * 65)),
    ({"prompt": [256]}, None, "the prompt's tokens must be between 0 and 255, got 256"),
    ({"promt": "a"}, "promt", "unknown field 'promt'; did you mean 'prompt'? valid: prompt, "),
    ({"prompt": ["a", "b", "c"], "n": 3}, "n", "3 prompts times n=3 exceed the 8 sequences that the server takes"),
    ({"prompt": "a", "max_tokens": 33}, "max_tokens", "max_tokens must be at most 32, got 33"),
    *(({"prompt": "a", field: value}, field, f"{field} should be {rule}") for field, value, rule in (
        ("n", 0, "greater than or equal to 1, got 0"), ("n", True, "a valid integer"),
        ("n", 129, "less than or equal to 128, got 129"), ("max_tokens", "5", "a valid integer"),
        ("max_tokens", -1, "greater than or equal to 0"), ("temperature", 2.1, "less than or equal to 2"),
        ("temperature", -1, "greater than or equal to 0"), ("top_p", 0, "greater than 0"),
        ("top_k", 0, "greater than or equal to 1"), ("min_p", 1.5, "less than or equal to 1"),
        ("repetition_penalty", 0, "greater than or equal to 0.01"), ("stream", "yes", "a valid boolean"),
        ("seed", 1 << 63, "less than 9223372036854775808"), ("presence_penalty", -2.1, "greater than or equal to -2"),
        ("frequency_penalty", 3, "less than or equal to 2"), ("ignore_eos", 1, "a valid boolean"),
        ("min_tokens", -1, "greater than or equal to 0"),
    )),
    *(({"prompt": "a", "stop": stop}, "stop", "stop must be a text of 1 to 1000 characters or a list of at most 4")
      for stop in ("", list("abcde"))),
    ({"prompt": "a", "stream_options": {}}, "stream_options", "stream_options needs stream: true"),
    ({"prompt": "a", "stream": True, "stream_options": {"x": 1}}, "stream_options", "unknown field 'stream_options.x'"),
    ({"prompt": "a", "suffix": "b"}, "suffix", "suffix is not supported in a completion, got 'b'; leave it out"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens", "max_tokens must be at least 1, or 0 with echo, which returns"),
    *(({"prompt": "a", "logprobs": value}, "logprobs", f"logprobs should be {rule}") for value, rule in (
        (-1, "greater than or equal to 0, got -1"), (True, "a valid integer, got True"), ("1", "a valid integer"),
    )),
    ({"prompt": "a", "logprobs": 257}, "logprobs", "logprobs must be at most 256, the number of the model's tokens, g"),
    ({"prompt": ["a"] * 8, "logprobs": 256, "max_tokens": 32, "echo": True}, "logprobs",
     "logprobs=256 for up to 264 tokens are 67848 log-probabilities, and an answer may have 10000; ask for fewer, "),
    ({"prompt": "a", "echo": 0}, "echo", "echo should be a valid boolean"),
    ({"prompt": "a", "best_of": 2, "n": 3}, "best_of", "best_of must be at least n=3, got 2"),
    ({"prompt": "a", "best_of": 0}, "best_of", "best_of should be greater than or equal to 1"),
    ({"prompt": "a", "best_of": 3, "n": 2, "stream": True}, "best_of",
     "best_of=3 cannot be streamed with n=2: which answers are best is known at their end; leave out stream or best_"),
    ({"prompt": ["a", "b", "c"], "best_of": 3}, "best_of", "3 prompts times best_of=3 exceed the 8 sequences that the"),
    *(({"prompt": "a", "logit_bias": bias}, "logit_bias", "logit_bias must map token ids, such as \"50256\", to ")
      for bias in ([1], {"a": 1}, {"-1": 1}, {"5": 101}, {"5": True}, {"5": None}, {str(i): "x" for i in range(999)})),
    ({"prompt": "a", "logit_bias": {"256": 1}}, None, "logit_bias has token 256; valid: 0 to 255"),
    ({"prompt": "a", "max_tokens": 5, "min_tokens": 6}, "min_tokens", "min_tokens must be at most the 5 of max_tokens"),
    ({"prompt": "a", "stop_token_ids": [-1]}, "stop_token_ids", "stop_token_ids.0 should be greater than or equal"),
])  # fmt: skip
def test_a_wrong_completion_names_its_field(client, body, param, message):
    error = error_of(client.post(COMPLETIONS, json=body), 400)
    assert message in error["message"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")


SAID = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(("body", "param", "message"), [
    ({}, "messages", "messages is missing"),
    *(({"messages": messages}, "messages", message) for messages, message in (
        ([], "messages List should have at least 1 item"),
        ([{"role": "user"}], "messages.0.content is missing"),
        ([{"role": "robot", "content": "a"}], "messages.0.role should be 'system', 'developer'"),
        ([{"role": "user", "content": "a", "x": 1}], "unknown field 'messages.0.x'"),
        ([{"role": "user", "content": "x" * 80}], "a prompt may have 64 tokens, but this one "),
        *(([*SAID, {"role": "user", "content": content}], "messages.1.content must be a text or a list of at most 128")
          for content in (None, 3, [{"type": "image_url"}], [{"type": "text", "text": ""}] * 129)),
    )),
    ({"messages": SAID, "prompt": "b"}, "prompt", "unknown field 'prompt'; "),
    *(({"messages": SAID, field: value}, field, f"{field} is not supported in a chat, got {value!r}; leave it out")
      for field, value in (("tools", [{}]), ("echo", True), ("best_of", 2))),
    ({"messages": SAID, "logprobs": 2}, "logprobs", "logprobs should be a valid boolean"),
    ({"messages": SAID, "top_logprobs": 2}, "top_logprobs", "top_logprobs=2 needs logprobs: true"),
    ({"messages": SAID, "logprobs": True, "top_logprobs": -1}, "top_logprobs", "top_logprobs should be greater"),
    ({"messages": SAID, "logprobs": True, "top_logprobs": 300}, "top_logprobs",
     "top_logprobs must be at most 256, the number of the model's tokens, got 300"),
    ({"messages": SAID, "n": 9}, "n", "1 prompts times n=9 exceed the 8 sequences that the server takes at once"),
    ({"messages": SAID, "max_tokens": 3, "max_completion_tokens": 4}, "max_tokens",
     "max_tokens and max_completion_tokens are the same limit; give only one"),
])  # fmt: skip
def test_a_wrong_chat_names_its_field(client, body, param, message):
    error = error_of(client.post(CHAT, json=body), 400)
    assert message in error["message"]
    assert error["param"] == param


PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
TAKES = (
    'must be a text or a list of at most 128 parts like {"type": "text", "text": "hi"}; no pictures, sound or files '
    "are read"
)


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
@pytest.mark.parametrize("content", [None, [PICTURE], [{"type": "text", "text": "a"}, PICTURE], [None], {}])
def test_content_that_is_no_text_is_answered_by_what_is_read(client, path, content):
    answer = client.post(path, json={"messages": [*SAID, {"role": "user", "content": content}]})
    error = error_of(answer, 400)
    assert (error["message"], error["param"]) == (f"messages.1.content {TAKES}", "messages")


@pytest.mark.parametrize(("path", "body", "message"), [
    *(("/tokenize", body, "give either prompt, a text, or messages, those of a chat")
      for body in ({}, {"prompt": None}, {"prompt": "a", "messages": SAID})),
    ("/tokenize", {"prompt": [1]}, "prompt should be a valid string"),
    ("/tokenize", {"prompt": ""}, "prompt String should have at least 1 character"),
    ("/tokenize", {"prompt": "a", "x": 1}, "unknown field 'x'"),
    ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens should be a valid boolean"),
    *((path, {"prompt": "x" * 1025}, "a prompt may have 64 tokens, but this one has 1025 characters")
      for path in ("/tokenize", COMPLETIONS)),
    ("/detokenize", {}, "tokens is missing"),
    ("/detokenize", {"tokens": "a"}, "tokens should be a valid list"),
    *(("/detokenize", {"tokens": [0, token]}, "tokens.1 should be ") for token in (-1, 1.5, True, "a", None)),
    *(("/detokenize", {"tokens": [token]}, f"tokens must be below 256, got {token}") for token in (256, 1 << 70)),
])  # fmt: skip
def test_a_wrong_text_or_token_names_its_field(client, path, body, message):
    assert message in error_of(client.post(path, json=body), 400)["message"]


@pytest.mark.parametrize(("body", "message"), [
    (b"{", "the body is not valid JSON: Expecting property name"),
    (b'{"prompt": "a', "the body is not valid JSON: Unterminated string starting at character 11"),
    (b"[]", "the body must be a JSON object, sent as Content-Type: application/json"),
    (b"", "the body must be a JSON object"),
    *((body, "the body must be UTF-8") for body in (
        b'{"prompt": "\xff"}',
        b'{"prompt": "\xed\xa0\x80"}',
        '{"prompt": "\ud800"}'.encode("utf-16", "surrogatepass"),
        '{"prompt": "\ud800"}'.encode("utf-32-be", "surrogatepass"),
        '{"prompt": "a"}'.encode("utf-16-le"),
    )),
    (b"[" * 10_000, "the body is not valid JSON"),
    (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "the body is not valid JSON"),
    (b'{"prompt": "a", "temperature": NaN}', "temperature should be a finite number"),
    (b'{"prompt": "a", "temperature": 1e999}', "temperature should be a finite number"),
    (rb'{"prompt": "\ud800"}', "the body must be Unicode text, but it spells half a surrogate pair"),
    (rb'{"prompt": "a", "\uDFFF": 1}', "half a surrogate pair"),
    (rb'{"prompt": "\ud83d"', "the body is not valid JSON"),
])  # fmt: skip
def test_a_body_that_cannot_be_read_is_refused(client, body, message):
    answer = client.post(COMPLETIONS, content=body, headers={"Content-Type": JSON})
    assert message in error_of(answer, 400)["message"]


def test_a_body_of_another_type_is_refused(client):
    answer = client.post(COMPLETIONS, content=b'{"prompt": "a"}', headers={"Content-Type": "text/plain"})
    assert "sent as Content-Type: application/json" in error_of(answer, 400)["message"]


MANY = 2000
FIELDS = {str(i): i for i in range(MANY)}


@pytest.mark.parametrize("body", [
    *({"messages": [{"role": "user", "content": content}]} for content in (
        [1] * MANY, [[1] * MANY], [{"type": "text"}] * MANY, [FIELDS],
    )),
    {"messages": [{"role": "user", "content": [1] * 400}] * 400},
    {"messages": [1] * MANY},
    {"messages": [{"role": "user", "content": "a", **FIELDS}]},
    FIELDS,
    *({"prompt": prompt} for prompt in (
        [-1] * MANY, [True] * MANY, [""] * MANY, [["a"] * MANY], [["a"] * 1000] * 128, [[]] * MANY, [1, *([-1] * MANY)],
    )),
    {"prompt": "a", "stop": [1] * MANY},
    {"prompt": "a", "stream_options": FIELDS},
], ids=range(17))  # fmt: skip
def test_a_large_wrong_body_makes_few_errors(body):
    with pytest.raises(ValidationError) as caught:
        (CompletionRequest if "prompt" in body else ChatRequest).model_validate(body)
    assert caught.value.error_count() <= 5


@pytest.mark.parametrize(("body", "status"), [
    ({"prompt": "a", "x" * 15_000: 1}, 400),
    ({"prompt": "a", "stream": True, "stream_options": {"x" * 15_000: 1}}, 400),
    ({"prompt": "a", "model": "x" * 15_000}, 404),
])  # fmt: skip
def test_an_error_repeats_little_of_what_was_sent(client, body, status):
    answer = client.post(COMPLETIONS, json=body)
    assert "x" * 50 in error_of(answer, status)["message"]
    assert len(answer.text) < 1000
    assert len(client.get("/" + "x" * 15_000).text) < 1000
    assert len(client.request("X" * 15_000, "/health").text) < 1000


def test_a_whole_surrogate_pair_is_a_character(client):
    answer = client.post(COMPLETIONS, content=rb'{"prompt": "\ud83d\ude00"}', headers={"Content-Type": JSON})
    assert answer.status_code == 200
    assert answer.json()["usage"]["prompt_tokens"] == 4


@pytest.mark.parametrize("extra", [
    {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "logprobs": None, "echo": False, "best_of": 1},
    {"logprobs": None, "echo": None, "best_of": None},
    {"suffix": None, "user": "me", "stop": None, "n": None, "stream": None, "temperature": None, "top_p": None},
    {"max_tokens": None, "seed": None, "stop": [], "stream_options": None, "model": None, "top_k": None},
])  # fmt: skip
def test_fields_that_ask_for_nothing_are_accepted(client, extra):
    answer = client.post(COMPLETIONS, json={"prompt": "a", **extra})
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 16


def test_every_error_of_the_document_is_described(client):
    document = client.get("/openapi.json").json()
    assert "HTTPValidationError" not in document["components"]["schemas"]
    responses = document["paths"][COMPLETIONS]["post"]["responses"]
    assert set(responses) == {"200", "400", "401", "404", "408", "413", "429", "500", "503"}
    assert "422" not in json.dumps(document)
    assert document["components"]["schemas"]["CompletionRequest"]["additionalProperties"] is False
