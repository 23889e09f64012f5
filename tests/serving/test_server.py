"""The server as a process: signals, lost clients, thousands of malformed requests, many streams for minutes.

`SUBQUAD_SOAK_SECONDS` sets how long the streams last.
"""

import asyncio
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.serving.helpers import server, until

pytestmark = pytest.mark.slow
SOAK_SECONDS = float(os.environ.get("SUBQUAD_SOAK_SECONDS", "300"))
GROWTH = 0.02


async def post(process, path, content, length=None):
    """Post bytes by hand, announced to be `length`: the two ends of the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", process.port)
    head = f"POST {path} HTTP/1.1\r\nHost: test\r\nConnection: close\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {length or len(content)}\r\n\r\n".encode() + content)
    return reader, writer


async def status_of(reader):
    """The status of an answer."""
    return int((await reader.readuntil(b"\r\n\r\n")).split(b" ")[1])


async def begin(process, **body):
    """Post to /v1/completions by hand: the response's status, and the stream of its body's lines."""
    reader, writer = await post(process, "/v1/completions", json.dumps({"prompt": "hello", **body}).encode())
    return await status_of(reader), reader, writer


async def objects(reader):
    """The objects of a stream until [DONE]; `EOFError` if it ends before."""
    async for line in reader:
        if line.strip() == b"data: [DONE]":
            return
        if line.startswith(b"data: "):
            yield json.loads(line[6:])
    raise EOFError("the stream ended before [DONE]")


@pytest.mark.anyio
@pytest.mark.parametrize(("number", "tokens", "grace", "ended_by"), [
    (signal.SIGTERM, 2000, "0.5", "shutdown"), (signal.SIGINT, 2000, "0.5", "shutdown"),
    (signal.SIGTERM, 60, "10", "tokens"),
])  # fmt: skip
async def test_a_signal_ends_running_streams_and_the_server(run_folder, number, tokens, grace, ended_by):
    with server(run_folder, "--grace_seconds", grace) as process:
        _, reader, writer = await begin(process, max_tokens=tokens, stream=True, temperature=0)
        chunks = []
        async for chunk in objects(reader):
            chunks.append(chunk)
            if len(chunks) == 3:
                process.popen.send_signal(number)
        writer.close()
        last = chunks[-1]["choices"][0]
        assert (last["finish_reason"], last["subquad"]["ended_by"]) == ("length", ended_by)
        assert process.popen.wait(20) == 0
        assert process.popen.stderr.read() == ""


@pytest.mark.anyio
async def test_a_second_interrupt_ends_at_once(run_folder):
    with server(run_folder, "--grace_seconds", "60") as process:
        _, reader, writer = await begin(process, max_tokens=2000, stream=True)
        await reader.readline()
        for _ in range(2):
            process.popen.send_signal(signal.SIGINT)
            await asyncio.sleep(0.3)
        writer.close()
        assert process.popen.wait(20) == 0


@pytest.mark.timeout(900)
def test_thousands_of_malformed_requests_cause_no_5xx(run_folder, tmp_path):
    program = Path(sys.executable).with_name("schemathesis")
    if not program.is_file():
        pytest.skip("schemathesis is not installed")
    with server(run_folder, "--max_tokens", "16", log=subprocess.DEVNULL) as process:
        # Without the check that all valid bodies are accepted: numbers of tokens depend on the server's limits.
        options = "--max-examples 600 --mode all --phases examples,coverage,fuzzing --no-shrink --seed 0"
        checks = ["--checks", "all", "--exclude-checks", "positive_data_acceptance", "--continue-on-failure"]
        url = f"http://127.0.0.1:{process.port}/openapi.json"
        command = [str(program), "run", url, *options.split(), *checks]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=800)
        counts = Counter()
        for name, value in process.numbers().items():
            if match := re.fullmatch(r'subquad_requests_total\{.*status="(\d)\d\d"\}', name):
                counts[match[1]] += int(value)
        assert process.get("/health") is not None
    sys.stdout.write(f"requests by class of status: {dict(counts)}\n")
    assert done.returncode == 0, done.stdout[-6000:]
    assert counts["4"] >= 1000
    assert counts["2"] >= 100
    assert counts["5"] == 0


BAD = [
    ("/v1/completions", b"{", 400), ("/v1/completions", b'{"prompt": 3}', 400), ("/tokenize", b"{}", 400),
    ("/v1/completions", b'{"prompt": "a", "max_tokens": 99999999}', 400), ("/v1/nothing", b"{}", 404),
    ("/v1/completions", b'{"prompt": "a", "model": "other"}', 404), ("/detokenize", b'{"tokens": [999999]}', 400),
    ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": null}]}', 400), ("/health", b"", 405),
    ("/v1/completions", b'{"prompt": "' + b"\xff" * 1000 + b'"}', 400),
]  # fmt: skip
"""Requests that are refused, and the statuses of their answers."""
LARGEST = 1 << 22


async def disturb(process, counts, ends):
    """Send bad requests, bodies of the largest size and larger ones, and leave in the middle of bodies."""
    while time.monotonic() < ends:
        for path, content, status in BAD:
            reader, writer = await post(process, path, content)
            found = await status_of(reader)
            counts[str(found) if found == status else "errors"] += 1
            writer.close()
        body = b'{"prompt": "' + b"x" * (LARGEST - 14) + b'"}'
        reader, writer = await post(process, "/v1/completions", body)  # longer than any prompt
        found = await status_of(reader)
        counts[str(found) if found in (400, 429) else "errors"] += 1
        writer.close()
        reader, writer = await post(process, "/v1/completions", b"{", length=LARGEST + 1)
        counts["413" if await status_of(reader) == 413 else "errors"] += 1
        writer.close()
        _, writer = await post(process, "/v1/completions", body[: LARGEST // 2], length=len(body))
        await asyncio.sleep(0.05)
        writer.transport.abort()
        counts["left"] += 1
        await asyncio.sleep(0.5)


async def soak(process, seconds, streams, disturbers=0):
    """Keep `streams` streams open for `seconds`, beside `disturb`: counts of results, and (time, resident bytes)."""
    counts, memory, start = Counter(), [], time.monotonic()

    async def one(number):
        tokens = 100 + 13 * (number % 16)
        options = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": tokens, "seed": number}
        while time.monotonic() - start < seconds:
            try:
                status, reader, writer = await begin(process, prompt="x" * (1 + 7 * number), **options)
                async for chunk in objects(reader):
                    counts["errors"] += "error" in chunk
                    if number == 0:  # a client that disconnects
                        break
                writer.transport.abort()
                fits = number == 0 or (status == 200 and chunk["usage"]["completion_tokens"] == tokens)
                counts["streams" if fits else "errors"] += 1
                counts["tokens"] += tokens
            except (OSError, EOFError, KeyError, TypeError, ValueError) as error:
                counts["errors"] += 1
                sys.stdout.write(f"stream {number} at {time.monotonic() - start:.1f} s: {error!r}\n")

    async def watch():
        status = Path(f"/proc/{process.popen.pid}/status")
        while True:
            resident = 1024 * int(re.search(r"VmRSS:\s+(\d+) kB", status.read_text())[1])
            memory.append((time.monotonic() - start, resident))
            await asyncio.sleep(0.5)

    watching = asyncio.ensure_future(watch())
    beside = [disturb(process, counts, start + seconds) for _ in range(disturbers)]
    await asyncio.gather(*(one(number) for number in range(streams)), *beside)
    watching.cancel()
    return counts, memory, time.monotonic() - start


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="memory is read from /proc")
@pytest.mark.timeout(SOAK_SECONDS + 180)
@pytest.mark.parametrize(("streams", "disturbers"), [(64, 0), (16, 4)], ids=["streams", "beside bad requests"])
def test_many_streams_for_minutes_without_an_error_or_growth(run_folder, streams, disturbers):
    options = {"slots": streams, "max_requests": 2 * streams, "prefill_chunk": 32}
    options |= {"draft": "ngram"} if disturbers else {}
    with server(run_folder, *(f"--{name}={value}" for name, value in options.items())) as process:
        counts, memory, seconds = asyncio.run(soak(process, SOAK_SECONDS, streams, disturbers))
        warm = min(60.0, SOAK_SECONDS / 4)
        # Bodies of 4 MiB come and go: their peak then is compared with their peak now, and what lies below likewise.
        before, after = (
            [size for at, size in memory if begins <= at <= begins + warm / 2]
            for begins in (warm / 2, SOAK_SECONDS - warm / 2)
        )
        growth = {kind.__name__: kind(after) / kind(before) - 1 for kind in (statistics.median, max)}
        until(lambda: process.numbers()["subquad_sequences_running"] == 0)  # told after the last chunk is sent
        found = process.numbers()
        process.popen.terminate()
        ended = process.popen.wait(30), process.popen.stderr.read()
    sys.stdout.write(
        f"{streams} streams at once for {seconds:.0f} s: {dict(counts)}, {counts['tokens'] / seconds:.0f} tokens/s, "
        f"resident {max(before) / 2**20:.1f} MiB, growth {', '.join(f'{k} {g:+.2%}' for k, g in growth.items())}\n"
    )
    assert ended == (0, "")
    assert counts["errors"] == 0
    assert counts["streams"] >= streams
    assert found["subquad_slots_free"] == streams
    assert found["subquad_prefix_tokens_total"] > found["subquad_prompt_tokens_total"] / 4, "their prompts begin alike"
    statuses = Counter()
    for name, value in found.items():
        if match := re.fullmatch(r'subquad_requests_total\{.*status="(\d+)"\}', name):
            statuses[match[1]] += int(value)
    assert not [status for status in statuses if status.startswith("5")]
    assert all((status in statuses) == (disturbers > 0) for status in ("400", "404", "405", "413", "499"))
    assert found['subquad_sequences_ended_total{reason="cancelled"}'] > 0
    assert max(growth.values()) < GROWTH
