"""What ends a sequence, and what an error ends: one request, or all."""

import asyncio
import json
import threading

import pytest

from subquad.generation import SamplingConfig
from subquad.serving import ServeConfig
from subquad.serving.engine import DownError, Engine
from subquad.serving.metrics import Metrics
from tests.serving.helpers import ScriptedDecoder, events, make, served, slow, until

PATH = "/v1/completions"


def counts(prompt=(1,), tokens=5):
    return list(prompt), SamplingConfig(max_tokens=tokens)


LONG = counts(tokens=2000)


def run(decoder, body, **limits):
    """Run a coroutine function with a running engine, which must hold nothing afterwards."""

    async def main():
        engine = Engine(decoder, ServeConfig(**limits), Metrics())
        engine.start()
        try:
            return await asyncio.wait_for(body(engine), 20)
        finally:
            await engine.stop()
            assert engine.sequences == 0

    return asyncio.run(main())


async def events_of(job, ends=1):
    """The events of a job until so many of its sequences have ended."""
    found = []
    while sum(event.end is not None for event in found) < ends:
        found.append(await job.events.get())
    return found


def test_tokens_and_the_end_arrive_in_order():
    async def body(engine):
        job = await engine.submit([counts((1,), 3), counts((10,), 2)])
        found = await events_of(job, 2)
        assert [(event.index, event.token) for event in found] == [(0, 2), (1, 11), (0, 3), (1, 12), (0, 4)]
        assert [(event.end, event.limit) for event in found] == [(None, None)] * 3 + [("length", "tokens")] * 2
        assert [event.state_bytes for event in found] == [100, 100, 200, 200, 300]
        assert engine.sequences == 0

    run(ScriptedDecoder(), body)


def test_a_cancelled_sequence_leaves_the_decoder_and_the_rest_continues():
    decoder = ScriptedDecoder(on_step=slow)

    async def body(engine):
        job = await engine.submit([LONG, counts(tokens=20)])
        await job.events.get()
        engine.cancel(job, 0)
        assert engine.sequences == 1
        last = (await events_of(job))[-1]
        assert (last.index, last.end) == (1, "length")
        await asyncio.to_thread(until, lambda: engine.load.free == 4)
        assert not decoder.requests

    run(decoder, body)
    assert decoder.cancelled == 1


def test_a_token_that_is_made_while_its_sequence_is_cancelled_is_dropped():
    steps, go_on, begun = [], threading.Event(), threading.Event()

    def hold():
        steps.append(0)
        if len(steps) == 2:
            begun.set()
            go_on.wait(10)

    async def body(engine):
        job = await engine.submit([counts(tokens=3), counts(tokens=3)])
        await asyncio.to_thread(begun.wait, 10)
        engine.cancel(job, 0)
        go_on.set()
        assert [event.index for event in await events_of(job)] == [0, 1, 1, 1]

    run(ScriptedDecoder(on_step=hold), body)


def test_a_refused_prompt_leaves_nothing_of_its_request():
    def refuse(prompt):
        if prompt == [9]:
            raise ValueError("no nines")

    decoder = ScriptedDecoder(on_add=refuse, on_step=slow)

    async def body(engine):
        other = await engine.submit([counts(tokens=50)])
        with pytest.raises(ValueError, match="no nines"):
            await engine.submit([LONG, counts((9,), 2000)])
        assert engine.sequences == 1
        assert (await events_of(other))[-1].end == "length"
        assert decoder.cancelled == 1

    run(decoder, body)


def test_time_ends_a_sequence_that_runs_and_one_that_waits():
    async def body(engine):
        found = await events_of(await engine.submit([LONG, LONG]), 2)
        ends = {event.index: (event.end, event.limit) for event in found if event.end}
        assert ends == {0: ("length", "seconds"), 1: ("length", "seconds")}

    run(ScriptedDecoder(slots=1, on_step=slow), body, max_seconds=0.1)


def test_a_stopping_server_lets_running_sequences_end_for_a_while():
    async def body(engine):
        jobs = [await engine.submit([counts(tokens=10)]), await engine.submit([LONG])]
        engine.drain_soon()
        await asyncio.sleep(0)
        with pytest.raises(DownError, match="the server is stopping"):
            await engine.submit([counts()])
        ends = [(await events_of(job))[-1] for job in jobs]
        assert [(event.end, event.limit) for event in ends] == [("length", "tokens"), ("length", "shutdown")]

    run(ScriptedDecoder(on_step=slow), body, grace_seconds=0.3)


def test_an_error_of_a_request_is_answered_and_the_server_goes_on():
    def refuse(prompt):
        raise (RuntimeError if prompt[0] == ord("!") else ValueError)("refused here")

    with served(ScriptedDecoder(on_add=refuse)) as client:
        answer = client.post(PATH, json={"prompt": "a"})
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, "refused here")
        answer = client.post(PATH, json={"prompt": "!"})
        assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
        assert client.get("/health").status_code == 200


def test_an_error_of_a_sequence_is_answered_and_the_server_goes_on():
    with served(ScriptedDecoder(broken=ord("!"))) as client:
        answer = client.post(PATH, json={"prompt": ["a", "!"]})
        assert answer.status_code == 500
        assert "this sequence could not be decoded: the model's logits" in answer.json()["error"]["message"]
        answer = client.post(PATH, json={"prompt": "!", "stream": True})
        assert answer.status_code == 200
        (chunk,) = events(answer.text)
        assert chunk["error"]["type"] == "server_error"
        assert client.post(PATH, json={"prompt": "a"}).status_code == 200


def test_a_failed_decoder_makes_the_server_unhealthy(caplog):
    def fail():
        raise RuntimeError("out of memory")

    with served(ScriptedDecoder(on_step=fail)) as client:
        (chunk,) = events(client.post(PATH, json={"prompt": ["a", "b"], "stream": True}).text)
        assert "the decoder has failed" in chunk["error"]["message"]
        for answer in (client.get("/health"), client.post(PATH, json={"prompt": "a"})):
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
            assert "the decoder has failed and the server must be restarted: out of memory" in answer.text
        assert client.get("/metrics").status_code == 200
    assert "the decoder has failed; the server answers 503 from now on" in caplog.text


async def ask(app, body, leave=None, on_send=None):
    """Post `body` and return what the application sends; the client disconnects when `leave` is set."""
    content, sent = json.dumps(body).encode(), []
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(content)), (b"host", b"test")]
    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "POST",
        "path": PATH, "raw_path": PATH.encode(), "root_path": "", "scheme": "http", "query_string": b"",
        "headers": headers, "client": ("test", 1), "server": ("test", 80),
    }  # fmt: skip
    messages = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive():
        if messages:
            return messages.pop()
        await (leave or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)
        if on_send is not None:
            await on_send(len(sent))

    await asyncio.wait_for(app(scope, receive, send), 10)
    return sent


def test_above_the_most_sequences_clients_are_told_to_come_back():
    app = make(ScriptedDecoder(on_step=slow), config=ServeConfig(max_requests=3))

    async def main():
        async with app.router.lifespan_context(app):
            job = await app.state.engine.submit([LONG, LONG])
            start, body = await ask(app, {"prompt": ["a", "b"]})
            assert start["status"] == 429
            assert (b"retry-after", b"1") in start["headers"]
            error = json.loads(body["body"])["error"]
            assert (error["type"], error["message"][:42]) == (
                "rate_limit_error",
                "2 of at most 3 sequences run or wait; try ",
            )
            app.state.engine.close(job)
            assert (await ask(app, {"prompt": ["a", "b"]}))[0]["status"] == 200

    asyncio.run(main())


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_disconnects_frees_its_slot(stream):
    decoder = ScriptedDecoder(slots=1, on_step=slow)
    app = make(decoder)
    counted = app.state.metrics.registry.get_sample_value

    async def main():
        async with app.router.lifespan_context(app):
            leave = asyncio.Event()

            async def leave_soon(count):
                if count == 3:
                    leave.set()

            if not stream:
                asyncio.get_running_loop().call_later(0.1, leave.set)
            sent = await ask(app, {"prompt": "a", "max_tokens": 2000, "stream": stream}, leave, leave_soon)
            assert app.state.engine.sequences == 0
            await asyncio.to_thread(until, lambda: decoder.cancelled == 1)
            assert counted("subquad_sequences_ended_total", {"reason": "cancelled"}) == 1
            assert len(sent) < 100
            if not stream:
                assert json.loads(sent[1]["body"])["error"]["message"] == "the client has disconnected"
            assert (await ask(app, {"prompt": "a", "max_tokens": 2}))[0]["status"] == 200, "the slot is free"

    asyncio.run(main())
    if not stream:
        labels = {"route": PATH, "method": "POST", "status": "499"}
        assert counted("subquad_requests_total", labels) == 1


def test_a_client_that_accepts_no_data_is_given_up(caplog):
    app = make(ScriptedDecoder(on_step=slow), config=ServeConfig(client_seconds=0.1))

    async def stuck(count):
        if count > 3:
            await asyncio.Event().wait()

    async def main():
        async with app.router.lifespan_context(app):
            await ask(app, {"prompt": "a", "max_tokens": 2000, "stream": True}, on_send=stuck)
            assert app.state.engine.sequences == 0

    asyncio.run(main())
    assert "a client accepted no data for 0.1 s" in caplog.text
