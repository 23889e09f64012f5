"""What a request passes before its route: the key, the size of its body, its origin, its path."""

import asyncio

import pytest

from subquad.serving import ServeConfig
from subquad.serving.gate import BODIES, Body, Count
from subquad.serving.metrics import Load, Metrics
from tests.serving.helpers import ScriptedDecoder, served
from tests.serving.test_schemas import error_of


def test_without_the_key_nothing_of_the_model_is_told():
    wrong = [{}, {"Authorization": "Bearer é".encode("latin-1")}]
    wrong += [{"Authorization": key} for key in ("Bearer wrong", "s3cret", "Basic s3cret", "Bearer s3cret2")]
    with served(ScriptedDecoder(), api_key="s3cret") as client:
        for path in ("/v1/models", "/metrics", "/v1/nothing", "/tokenize", "/detokenize"):
            for headers in wrong:
                answer = client.get(path, headers=headers)
                assert error_of(answer, 401)["code"] == "invalid_api_key"
                assert answer.headers["www-authenticate"] == "Bearer"
        assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 401
        assert {client.get(path).status_code for path in ("/", "/health", "/openapi.json")} == {200}
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
    error, message = error_of(answer, 413), "a request may have 20000 bytes, but this one has more"
    assert (error["code"], error["message"]) == ("request_too_large", message)


@pytest.mark.anyio
@pytest.mark.parametrize(("length", "gone", "status", "message"), [
    (b"5", False, 408, b"the body took more than 0.05 s"),
    (b"11", False, 413, b"a request may have 10 bytes, but this one has more"),
    (b"5", True, None, b""),
], ids=["late", "announced as too large", "gone"])  # fmt: skip
async def test_a_body_that_does_not_come_is_given_up(length, gone, status, message):
    async def receive():
        await asyncio.sleep(0 if gone else 10)
        return {"type": "http.disconnect"}

    async def send(part):
        sent.append(part)

    sent, scope = [], {"type": "http", "method": "POST", "headers": [(b"content-length", length)]}
    await Body(None, most=10, seconds=5.0 if gone else 0.05)(scope, receive, send)
    assert [part["status"] for part in sent[:1]] == ([] if gone else [status])
    assert all(message in part["body"] for part in sent[1:])


async def ask(app, body, *, route="/v1/completions", gone=False):
    """Post `body` to an application, by a client that may leave in the middle of it; what is sent back."""
    parts, sent = [body], []

    async def receive():
        await asyncio.sleep(0)
        return (
            {"type": "http.request", "body": parts.pop(), "more_body": gone} if parts else {"type": "http.disconnect"}
        )

    async def send(part):
        sent.append(part)

    await app({"type": "http", "method": "POST", "path": route, "headers": []}, receive, send)
    return sent


@pytest.mark.anyio
async def test_a_client_that_leaves_in_its_body_is_counted_as_gone_and_an_error_of_ours_is_not():
    async def broken(scope, receive, send):
        raise RuntimeError("a bug")

    metrics = Metrics()
    app = Count(Body(broken, most=10, seconds=5.0), metrics, ["/v1/completions"], 5.0)
    assert await ask(app, b"12345", gone=True) == []
    with pytest.raises(RuntimeError, match="a bug"):
        await ask(app, b"12345")
    text = metrics.text(Load(0, 0, 0, 0), 0)
    for status in (499, 500):
        assert f'method="POST",route="/v1/completions",status="{status}"}} 1' in text


@pytest.mark.anyio
async def test_the_bodies_of_all_requests_are_bounded_together_until_they_are_answered():
    async def waiting(scope, receive, send):
        await answered.wait()

    answered, body = asyncio.Event(), Body(waiting, most=10, seconds=5.0)
    held = [asyncio.create_task(ask(body, b"0123456789")) for _ in range(BODIES)]
    await asyncio.sleep(0.01)
    start, end = await ask(body, b"0")
    assert start["status"] == 429
    assert (b"retry-after", b"1") in start["headers"]
    assert b"the server holds 80 bytes of requests and takes no more; try again later" in end["body"]
    assert (await ask(body, b"0", gone=True))[0]["status"] == 429
    answered.set()
    assert await asyncio.gather(*held) == [[]] * BODIES
    for size in (10, 11, 10):  # one that is too large, or whose client leaves, holds nothing afterwards
        sent = await ask(body, b"0" * size, gone=size == 10)
        assert [part["status"] for part in sent[:1]] == ([413] if size == 11 else [])
    answered.clear()
    held = [asyncio.create_task(ask(body, b"0123456789")) for _ in range(BODIES)]
    await asyncio.sleep(0.01)
    answered.set()
    assert await asyncio.gather(*held) == [[]] * BODIES


def test_only_named_origins_may_ask():
    asking = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    with served(ScriptedDecoder()) as client:
        assert "access-control-allow-origin" not in client.get("/health", headers=asking).headers
        assert client.options("/v1/completions", headers=asking).status_code == 405
    config = ServeConfig(cors="https://c.example, https://a.example")
    with served(ScriptedDecoder(), config=config, api_key="s3cret") as client:
        answer = client.options("/v1/completions", headers=asking)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://a.example"
        others = {**asking, "Origin": "https://b.example"}
        assert "access-control-allow-origin" not in client.get("/health", headers=others).headers


@pytest.mark.parametrize("method", ["GET", "PUT", "HEAD"])
def test_the_methods_of_a_path_are_named(client, method):
    answer = client.request(method, "/v1/completions")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    if method != "HEAD":
        assert error_of(answer, 405)["message"] == f"/v1/completions does not take {method}"


@pytest.mark.parametrize("path", ["/nothing", "/v1", "/v1/completions/", "/docs", "/%00", "/v1/%ff"])
def test_an_unknown_path_is_answered_with_the_known_ones(client, path):
    error = error_of(client.get(path), 404)
    assert error["message"].startswith("there is nothing at ")
    assert "/v1/chat/completions, /v1/completions, /v1/models" in error["message"]


def test_unknown_paths_and_methods_share_a_label(client):
    client.request("METHOD1", "/v1/path1")
    text = client.get("/metrics").text
    assert 'method="other",route="other",status="404"' in text
    assert "path1" not in text
    assert "METHOD1" not in text
