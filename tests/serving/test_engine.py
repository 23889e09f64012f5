"""What ends a sequence, and what an error ends: one request, or all."""

import asyncio
import json
import threading
import time

import pytest

from subquad.generation import SamplingConfig, batch
from subquad.serving import ServeConfig
from subquad.serving.engine import BusyError, DownError, Engine
from subquad.serving.metrics import Metrics


def counts(prompt=(1,), tokens=5):
    return list(prompt), SamplingConfig(max_tokens=tokens)


def run(decoder, body, **limits):
    """Run a coroutine function with an engine that runs; what it did must leave nothing behind."""

    async def main():
        engine = Engine(decoder, ServeConfig(**limits), Metrics())
        engine.start()
        try:
            return await asyncio.wait_for(body(engine), 20)
        finally:
            await engine.stop()
            assert engine.sequences == 0

    return asyncio.run(main())


def counted(app, name, **labels):
    return app.state.metrics.registry.get_sample_value(name, labels)


def slow():
    time.sleep(0.002)


def test_tokens_and_the_end_arrive_in_order(scripted):
    async def body(engine):
        job = await engine.submit([counts((1,), 3), counts((10,), 2)])
        events = [await job.events.get() for _ in range(5)]
        assert [(event.index, event.token) for event in events] == [(0, 2), (1, 11), (0, 3), (1, 12), (0, 4)]
        assert [event.end for event in events] == [None, None, None, "length", "length"]
        assert [event.limit for event in events[3:]] == ["tokens", "tokens"]
        assert [event.state_bytes for event in events] == [100, 100, 200, 200, 300]
        assert engine.sequences == 0
        engine.close(job)

    run(scripted(), body)


def test_what_is_cancelled_leaves_the_decoder_and_the_rest_goes_on(scripted, until):
    decoder = scripted(on_step=slow)

    async def body(engine):
        job = await engine.submit([counts(tokens=2000), counts(tokens=20)])
        await job.events.get()
        engine.cancel(job, 0)
        assert engine.sequences == 1
        ends = []
        while not ends:
            event = await job.events.get()
            ends += [event] if event.end else []
        assert (ends[0].index, ends[0].end) == (1, "length")
        await asyncio.to_thread(until, lambda: engine.load.free == 4)
        assert not decoder.requests

    run(decoder, body)
    assert decoder.cancelled == 1


def test_a_token_that_was_being_made_when_its_sequence_was_cancelled_is_dropped(scripted):
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
        events = [await job.events.get() for _ in range(4)]
        assert [event.index for event in events] == [0, 1, 1, 1]

    run(scripted(on_step=hold), body)


def test_over_the_number_of_sequences_is_busy_until_one_ends(scripted):
    async def body(engine):
        job = await engine.submit([counts(tokens=2000), counts(tokens=2000)])
        with pytest.raises(BusyError, match="2 sequences run or wait, of at most 3; try again later"):
            await engine.submit([counts(), counts()])
        engine.close(job)
        engine.close(job)
        assert await engine.submit([counts(), counts()])

    run(scripted(on_step=slow), body, max_requests=3)


def test_a_prompt_that_is_refused_leaves_nothing_of_its_request(scripted):
    def refuse(prompt):
        if prompt == [9]:
            raise ValueError("no nines")

    decoder = scripted(on_add=refuse, on_step=slow)

    async def body(engine):
        other = await engine.submit([counts(tokens=50)])
        with pytest.raises(ValueError, match="no nines"):
            await engine.submit([counts((1,), 2000), counts((9,), 2000)])
        assert engine.sequences == 1
        ends = []
        while not ends:
            event = await other.events.get()
            ends += [event.end] if event.end else []
        assert ends == ["length"]
        assert decoder.cancelled == 1

    run(decoder, body)


def test_an_error_of_one_sequence_is_told_to_it_alone(scripted):
    async def body(engine):
        bad = await engine.submit([counts((7,), 5)])
        good = await engine.submit([counts((1,), 5)])
        event = await bad.events.get()
        assert event.end == "error"
        assert "logits must be finite" in str(event.error)
        assert [(await good.events.get()).token for _ in range(5)] == [2, 3, 4, 5, 6]
        assert engine.failure is None

    run(scripted(broken=7), body)


def test_an_error_of_the_decoder_ends_all(scripted, caplog):
    broken = threading.Event()

    def fail():
        if broken.is_set():
            raise RuntimeError("out of memory")
        time.sleep(0.002)

    async def body(engine):
        job = await engine.submit([counts(tokens=2000)])
        await job.events.get()
        broken.set()
        event = await job.events.get()
        while event.end is None:
            event = await job.events.get()
        assert isinstance(event.error, DownError)
        with pytest.raises(DownError, match="the decoder has failed and the server must be restarted: out of memory"):
            await engine.submit([counts()])

    run(scripted(on_step=fail), body)
    assert "the decoder has failed; the server answers 503 from now on" in caplog.text


def test_time_ends_a_sequence_that_runs_and_one_that_waits(scripted):
    async def body(engine):
        job = await engine.submit([counts(tokens=2000), counts(tokens=2000)])
        ends = {}
        while len(ends) < 2:
            event = await job.events.get()
            if event.end:
                ends[event.index] = (event.end, event.limit)
        assert ends == {0: ("length", "seconds"), 1: ("length", "seconds")}

    run(scripted(slots=1, on_step=slow), body, max_seconds=0.1)


def test_a_server_that_stops_lets_running_sequences_end_for_a_while(scripted):
    async def body(engine):
        short = await engine.submit([counts(tokens=10)])
        long = await engine.submit([counts(tokens=2000)])
        engine.drain_soon()
        await asyncio.sleep(0)
        with pytest.raises(DownError, match="the server is stopping"):
            await engine.submit([counts()])
        for job, limit in ((short, "tokens"), (long, "shutdown")):
            event = await job.events.get()
            while event.end is None:
                event = await job.events.get()
            assert (event.end, event.limit) == ("length", limit)

    run(scripted(on_step=slow), body, grace_seconds=0.3)


def test_a_request_that_is_refused_by_the_engine_is_told_so(scripted, served):
    def refuse(prompt):
        raise (RuntimeError if prompt[0] == ord("!") else ValueError)("refused here")

    with served(scripted(on_add=refuse)) as client:
        answer = client.post("/v1/completions", json={"prompt": "a"})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == "refused here"
        answer = client.post("/v1/completions", json={"prompt": "!"})
        assert answer.status_code == 500
        assert answer.json()["error"]["type"] == "server_error"
        assert client.get("/health").status_code == 200


def test_a_sequence_whose_numbers_go_wrong_is_an_error_in_the_answer(scripted, served, events):
    with served(scripted(broken=ord("!"))) as client:
        answer = client.post("/v1/completions", json={"prompt": ["a", "!"]})
        assert answer.status_code == 500
        assert "this sequence could not be decoded: the model's logits" in answer.json()["error"]["message"]
        answer = client.post("/v1/completions", json={"prompt": "!", "stream": True})
        assert answer.status_code == 200
        (chunk,) = events(answer.text)
        assert chunk["error"]["type"] == "server_error"
        assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 200


def test_a_prompt_that_memory_cannot_hold_ends_its_request_alone(client, monkeypatch):
    def read_piece(model, unread, *arguments):
        if unread[0] == ord("!"):
            raise RuntimeError("out of memory")
        return read(model, unread, *arguments)

    read = batch.read_piece
    monkeypatch.setattr(batch, "read_piece", read_piece)
    answer = client.post("/v1/completions", json={"prompt": "!!!"})
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "this sequence could not be decoded: out of memory"
    assert client.post("/v1/completions", json={"prompt": "abc"}).status_code == 200
    assert client.get("/health").status_code == 200


def test_a_decoder_that_has_failed_makes_the_server_unhealthy(scripted, served, events):
    def fail():
        raise RuntimeError("out of memory")

    with served(scripted(on_step=fail)) as client:
        (chunk,) = events(client.post("/v1/completions", json={"prompt": "a", "stream": True}).text)
        assert "the decoder has failed" in chunk["error"]["message"]
        for answer in (client.get("/health"), client.post("/v1/completions", json={"prompt": "a"})):
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "unavailable"
            assert "out of memory" in answer.json()["error"]["message"]
        assert client.get("/metrics").status_code == 200


def test_more_requests_than_are_taken_are_told_to_come_back(scripted, make):
    app = make(scripted(on_step=slow), config=ServeConfig(max_requests=1))

    async def main():
        async with app.router.lifespan_context(app):
            job = await app.state.engine.submit([counts(tokens=2000)])
            sent = []

            async def send(message):
                sent.append(message)

            await app(post({"prompt": "a"}), *receiving({"prompt": "a"}), send)
            app.state.engine.close(job)
            return sent

    start, body = asyncio.run(main())
    assert start["status"] == 429
    assert (b"retry-after", b"1") in start["headers"]
    assert json.loads(body["body"])["error"]["type"] == "rate_limit_error"


def post(body):
    length = str(len(json.dumps(body))).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", length), (b"host", b"test")]
    return {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "POST",
        "path": "/v1/completions", "raw_path": b"/v1/completions", "root_path": "", "scheme": "http",
        "query_string": b"", "headers": headers, "client": ("test", 1), "server": ("test", 80),
    }  # fmt: skip


def receiving(body, leave=None):
    """What a client sends: the body, and that it has gone when `leave` is set."""
    messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive():
        if messages:
            return messages.pop()
        await (leave.wait() if leave else asyncio.Event().wait())
        return {"type": "http.disconnect"}

    return (receive,)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_frees_its_slot(scripted, make, until, stream):
    decoder = scripted(slots=1, on_step=slow)
    app = make(decoder)
    body = {"prompt": "a", "max_tokens": 2000, "stream": stream}

    async def main():
        async with app.router.lifespan_context(app):
            leave = asyncio.Event()
            sent = []

            async def send(message):
                sent.append(message)
                if len(sent) == 3:
                    leave.set()

            if not stream:
                asyncio.get_running_loop().call_later(0.1, leave.set)
            await asyncio.wait_for(app(post(body), *receiving(body, leave), send), 10)
            assert app.state.engine.sequences == 0
            await asyncio.to_thread(until, lambda: decoder.cancelled == 1)
            assert counted(app, "subquad_sequences_ended_total", reason="cancelled") == 1
            assert len(sent) < 100
            if not stream:
                assert json.loads(sent[1]["body"])["error"]["message"] == "the client has gone"
            # The slot is free for the next one.
            answers = []

            async def keep(message):
                answers.append(message)

            small = {"prompt": "a", "max_tokens": 2}
            await asyncio.wait_for(app(post(small), *receiving(small), keep), 10)
            assert answers[0]["status"] == 200

    asyncio.run(main())
    if not stream:
        labels = {"route": "/v1/completions", "method": "POST", "status": "499"}
        assert counted(app, "subquad_requests_total", **labels) == 1


def test_a_client_that_takes_no_data_is_given_up(scripted, make, caplog):
    app = make(scripted(on_step=slow), config=ServeConfig(client_seconds=0.1))
    body = {"prompt": "a", "max_tokens": 2000, "stream": True}

    async def main():
        async with app.router.lifespan_context(app):
            sent = []

            async def send(message):
                sent.append(message)
                if len(sent) > 3:
                    await asyncio.Event().wait()

            await asyncio.wait_for(app(post(body), *receiving(body), send), 10)
            assert app.state.engine.sequences == 0

    asyncio.run(main())
    assert "a client has taken no data for 0.1 s" in caplog.text
