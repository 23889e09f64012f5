"""What ends a sequence, and what an error ends: one request, or all."""

import asyncio
import json
import threading
from contextlib import asynccontextmanager

import pytest

from subquad.generation import SamplingConfig
from subquad.serving import ServeConfig
from subquad.serving.engine import DownError, Engine
from subquad.serving.metrics import Metrics
from tests.serving.helpers import ScriptedDecoder, events, make, served, slow, until
from tests.training.helpers import raising

pytestmark = pytest.mark.anyio
PATH = "/v1/completions"


def counts(prompt=(1,), tokens=5):
    return list(prompt), [SamplingConfig(max_tokens=tokens)]


LONG = counts(tokens=2000)


@asynccontextmanager
async def running(decoder, **limits):
    """An engine that runs, and must hold nothing at the end."""
    engine = Engine(decoder, ServeConfig(**limits), Metrics())
    engine.start()
    try:
        yield engine
    finally:
        await engine.stop()
    assert engine.sequences == 0


async def events_of(job, ends=1):
    """The events of a job until so many of its sequences have ended."""
    found = []
    while sum(event.end is not None for event in found) < ends:
        found.append(await asyncio.wait_for(job.events.get(), 20))
    assert job.open or job.timer.cancelled(), "a timer would hold the job for max_seconds"
    return found


async def test_a_token_that_is_made_while_its_sequence_is_cancelled_is_dropped():
    steps, go_on, begun = [], threading.Event(), threading.Event()

    def hold():
        steps.append(0)
        if len(steps) == 2:
            begun.set()
            go_on.wait(10)

    decoder = ScriptedDecoder(on_step=hold)
    async with running(decoder) as engine:
        job = await engine.submit([counts(tokens=3), counts(tokens=3)])
        await asyncio.to_thread(begun.wait, 10)
        engine.cancel(job, 0)
        assert engine.sequences == 1
        go_on.set()
        found = await events_of(job)
        assert [(event.index, event.token) for event in found] == [(0, 2), (1, 2), (1, 3), (1, 4)]
        assert [(event.end, event.limit) for event in found] == [(None, None)] * 3 + [("length", "tokens")]
        assert [event.state_bytes for event in found] == [100, 100, 200, 300]
        await asyncio.to_thread(until, lambda: engine.load.free == 4)
    assert (decoder.requests, decoder.cancelled) == ([], 1)


async def test_a_refused_prompt_leaves_nothing_of_its_request():
    def refuse(prompt):
        if prompt == [9]:
            raise ValueError("no nines")

    decoder = ScriptedDecoder(on_add=refuse, on_step=slow)
    async with running(decoder) as engine:
        other = await engine.submit([counts(tokens=50)])
        with pytest.raises(ValueError, match="no nines"):
            await engine.submit([LONG, counts((9,), 2000)])
        assert engine.sequences == 1
        assert (await events_of(other))[-1].end == "length"
        assert decoder.cancelled == 1


async def test_a_submission_that_is_cancelled_while_it_waits_leaves_nothing():
    added, go_on = threading.Event(), threading.Event()

    def hold(prompt):
        added.set()
        go_on.wait(10)

    decoder = ScriptedDecoder(on_add=hold, on_step=slow)
    async with running(decoder) as engine:
        asked = asyncio.create_task(engine.submit([LONG]))
        await asyncio.to_thread(added.wait, 10)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert engine.sequences == 0
        go_on.set()
        await asyncio.to_thread(until, lambda: decoder.cancelled == 1)


async def test_time_ends_a_sequence_that_runs_and_one_that_waits():
    async with running(ScriptedDecoder(slots=1, on_step=slow), max_seconds=0.1) as engine:
        found = await events_of(await engine.submit([LONG, LONG]), 2)
        ends = {event.index: (event.end, event.limit) for event in found if event.end}
        assert ends == {0: ("length", "seconds"), 1: ("length", "seconds")}


async def test_a_stopping_server_lets_running_sequences_end_for_a_while():
    async with running(ScriptedDecoder(on_step=slow), grace_seconds=0.3) as engine:
        jobs = [await engine.submit([counts(tokens=10)]), await engine.submit([LONG])]
        engine.drain_soon()
        await asyncio.sleep(0)
        with pytest.raises(DownError, match="the server is stopping"):
            await engine.submit([counts()])
        ends = [(await events_of(job))[-1] for job in jobs]
        assert [(event.end, event.limit) for event in ends] == [("length", "tokens"), ("length", "shutdown")]


def test_an_error_of_a_request_or_a_sequence_is_answered_and_the_server_goes_on():
    def refuse(prompt):
        raise (RuntimeError if prompt[0] == ord("!") else ValueError)("refused here")

    with served(ScriptedDecoder(on_add=refuse)) as client:
        answer = client.post(PATH, json={"prompt": "a"})
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, "refused here")
        answer = client.post(PATH, json={"prompt": "!"})
        assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
        assert client.get("/health").status_code == 200
    with served(ScriptedDecoder(broken=ord("!"))) as client:
        answer = client.post(PATH, json={"prompt": ["a", "!"]})
        assert answer.status_code == 500
        assert "this sequence could not be decoded: the model's logits" in answer.json()["error"]["message"]
        (chunk,) = events(client.post(PATH, json={"prompt": "!", "stream": True}).text)
        assert chunk["error"]["type"] == "server_error"
        assert client.post(PATH, json={"prompt": "a"}).status_code == 200


def test_a_failed_decoder_makes_the_server_unhealthy(caplog):
    with served(ScriptedDecoder(on_step=raising(RuntimeError("out of memory")))) as client:
        (chunk,) = events(client.post(PATH, json={"prompt": ["a", "b"], "stream": True}).text)
        assert "the decoder has failed" in chunk["error"]["message"]
        for answer in (client.get("/health"), client.post(PATH, json={"prompt": "a"})):
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
            assert "the decoder has failed and the server must be restarted: out of memory" in answer.text
        numbers = client.get("/metrics").text
        assert "\nsubquad_slots_free 0.0\n" in numbers
        assert "\nsubquad_prefix_hits_total 3.0\n" in numbers, "a counter never falls"
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


async def test_above_the_most_sequences_clients_are_told_to_come_back():
    app = make(ScriptedDecoder(on_step=slow), config=ServeConfig(max_requests=3))
    async with app.router.lifespan_context(app):
        job = await app.state.engine.submit([LONG, LONG])
        start, body = await ask(app, {"prompt": ["a", "b"]})
        assert start["status"] == 429
        assert (b"retry-after", b"1") in start["headers"]
        error = json.loads(body["body"])["error"]
        assert error["type"] == "rate_limit_error"
        assert error["message"] == "2 of at most 3 sequences run or wait; try again later"
        app.state.engine.close(job)
        app.state.engine.close(job)
        assert (await ask(app, {"prompt": ["a", "b"]}))[0]["status"] == 200


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_disconnects_frees_its_slot(stream):
    async def leave_soon(count):
        if count == 3:
            leave.set()

    decoder, leave = ScriptedDecoder(slots=1, on_step=slow), asyncio.Event()
    app = make(decoder)
    counted = app.state.metrics.registry.get_sample_value
    async with app.router.lifespan_context(app):
        if not stream:
            asyncio.get_running_loop().call_later(0.1, leave.set)
        sent = await ask(app, {"prompt": "a", "max_tokens": 2000, "stream": stream}, leave, leave_soon)
        assert app.state.engine.sequences == 0
        await asyncio.to_thread(until, lambda: decoder.cancelled == 1)
        assert counted("subquad_sequences_ended_total", {"reason": "cancelled"}) == 1
        assert len(sent) < 100
        assert (await ask(app, {"prompt": "a", "max_tokens": 2}))[0]["status"] == 200, "the slot is free"
    if not stream:
        assert json.loads(sent[1]["body"])["error"]["message"] == "the client has disconnected"
        labels = {"route": PATH, "method": "POST", "status": "499"}
        assert counted("subquad_requests_total", labels) == 1


async def test_a_client_that_accepts_no_data_is_given_up(caplog):
    async def stuck(count):
        if count > 3:
            await asyncio.Event().wait()

    app = make(ScriptedDecoder(on_step=slow), config=ServeConfig(client_seconds=0.1))
    async with app.router.lifespan_context(app):
        await ask(app, {"prompt": "a", "max_tokens": 2000, "stream": True}, on_send=stuck)
        assert app.state.engine.sequences == 0
    assert "a client accepted no data for 0.1 s" in caplog.text
