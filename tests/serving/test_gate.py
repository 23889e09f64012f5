"""The key, the size of a body, and other origins."""

import asyncio
import json
import re

import pytest

from subquad.serving import ServeConfig
from subquad.serving.gate import Body
from subquad.serving.schemas import CompletionRequest


def test_without_the_key_nothing_of_the_model_is_told(scripted, served):
    with served(scripted(), api_key="s3cret") as client:
        for path in ("/v1/models", "/metrics", "/v1/nothing"):
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "s3cret"},
                            {"Authorization": "Basic s3cret"}, {"Authorization": "Bearer s3cret2"},
                            {"Authorization": "Bearer é".encode("latin-1")}):  # fmt: skip
                answer = client.get(path, headers=headers)
                assert answer.status_code == 401
                assert answer.headers["www-authenticate"] == "Bearer"
                assert answer.json()["error"]["code"] == "invalid_api_key"
        assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 401
        for path in ("/", "/health", "/openapi.json"):
            assert client.get(path).status_code == 200
        for header in ("Bearer s3cret", "bearer s3cret", "Bearer  s3cret"):
            assert client.get("/v1/models", headers={"Authorization": header}).status_code == 200
        document = client.get("/openapi.json").json()
        assert document["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}
        assert document["paths"]["/v1/completions"]["post"]["security"] == [{"key": []}]
        assert "security" not in document["paths"]["/health"]["get"]


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_large_is_refused(client, chunked):
    body = b'{"prompt": "' + b"a" * 20_000 + b'"}'
    content = iter([body[:5000], body[5000:]]) if chunked else body
    answer = client.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "request_too_large"
    assert answer.json()["error"]["message"] == "a request may have 20000 bytes, and this one has more"


def test_a_body_that_does_not_come_is_given_up():
    sent = []

    async def send(message):
        sent.append(message)

    async def receive():
        await asyncio.Event().wait()

    scope = {"type": "http", "method": "POST", "headers": []}
    asyncio.run(Body(None, most=10, seconds=0.05)(scope, receive, send))
    assert sent[0]["status"] == 408
    assert b"the body took more than 0.05 s" in sent[1]["body"]


def test_a_client_that_goes_before_its_body_came_gets_no_answer():
    async def receive():
        return {"type": "http.disconnect"}

    scope = {"type": "http", "method": "POST", "headers": []}
    asyncio.run(Body(None, most=10, seconds=5.0)(scope, receive, None))


def test_other_origins_may_ask_only_where_they_are_named(scripted, served):
    asking = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    with served(scripted()) as client:
        assert "access-control-allow-origin" not in client.get("/health", headers=asking).headers
        assert client.options("/v1/completions", headers=asking).status_code == 405
    config = ServeConfig(cors="https://c.example, https://a.example")
    with served(scripted(), config=config, api_key="s3cret") as client:
        answer = client.options("/v1/completions", headers=asking)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://a.example"
        others = {**asking, "Origin": "https://b.example"}
        assert "access-control-allow-origin" not in client.get("/health", headers=others).headers


def test_the_page_is_one_file_that_asks_nobody_else(client):
    answer = client.get("/")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "connect-src 'self'" in answer.headers["content-security-policy"]
    for name, minimum, maximum in re.findall(r'id="(\w+)" type="number" min="([^"]+)"(?: max="([^"]+)")?', answer.text):
        for value in filter(None, (minimum, maximum)):  # what the form takes, the server does
            CompletionRequest.model_validate(
                {"prompt": "a", {"tokens": "max_tokens"}.get(name, name): json.loads(value)}
            )
    for part in ("src=", "@import", "url(", "//cdn", "https://"):
        assert part not in answer.text
