"""The application around a tiny model or a decoder that a test directs, in this process or in one of its own."""

import json
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from starlette.testclient import TestClient

from subquad.data import load_tokenizer
from subquad.generation.prefix_cache import PrefixCounts
from subquad.models import Decoder, DecoderConfig
from subquad.serving import ServeConfig
from subquad.serving.app import Served, make_app
from subquad.serving.engine import Engine
from subquad.serving.metrics import Metrics
from subquad.serving.texts import Texts

START = "import sys; from subquad.cli.serve import run; sys.exit(run(sys.argv[1:]))"


def tiny_model(position="none", **options):
    torch.manual_seed(0)
    shape = {"vocab_size": 256, "dim": 16, "num_layers": 1, "num_heads": 2, "init_std": 0.5, "position": position}
    return Decoder(DecoderConfig(**shape, attention="linear", **options)).eval()


class ScriptedDecoder:
    """The interface of `BatchDecoder`; each sequence counts up from its prompt's last token.

    `on_add` and `on_step` are called first, with the prompt or nothing, and may raise; a prompt that begins with the
    token `broken` ends with an error.
    """

    max_context, state_bytes, prefixes = None, 1000, PrefixCounts(hits=3)

    def __init__(self, slots=4, on_add=lambda prompt: None, on_step=lambda: None, broken=None):
        self.slots, self.on_add, self.on_step, self.broken = slots, on_add, on_step, broken
        self.requests, self.cancelled = [], 0

    running = property(lambda self: min(len(self.requests), self.slots))
    waiting = property(lambda self: len(self.requests) - self.running)
    free = property(lambda self: self.slots - self.running)

    def add_samples(self, prompt, samplings, /, *, stop_tokens=(), logprobs=None, prompt_logprobs=None):
        self.on_add(prompt)
        added = []
        for sampling in samplings:
            request = SimpleNamespace(tokens=[], prompt=list(prompt), finished=None, error=None, state_bytes=0)
            request.most, request.stop_tokens = sampling.max_tokens, stop_tokens
            request.logprobs = request.prompt_logprobs = ()
            added.append(request)
        self.requests += added
        return added

    def cancel(self, request, /):
        self.cancelled += request in self.requests
        self.requests = [other for other in self.requests if other is not request]

    def step(self):
        self.on_step()
        made = []
        for request in self.requests[: self.slots]:
            if request.prompt[0] == self.broken:
                request.finished, request.error = "error", ValueError("the model's logits must be finite")
                continue
            token = (request.prompt + request.tokens)[-1] + 1
            request.tokens.append(token)
            request.state_bytes = 100 * len(request.tokens)
            made.append((request, token))
            if token in request.stop_tokens:
                request.finished = "stop"
            elif len(request.tokens) == request.most:
                request.finished = "length"
        self.requests = [request for request in self.requests if request.finished is None]
        return made


def slow():
    time.sleep(0.002)


def make(decoder, *, config=None, template=None, texts=None, api_key=None):
    """The application around a decoder; its state holds the engine and the metrics."""
    config, metrics = config or ServeConfig(), Metrics()
    engine = Engine(decoder, config, metrics)
    texts = texts or Texts(load_tokenizer("bytes"), template)
    app = make_app(engine, texts, config, Served("tiny", "linear", 123), metrics, api_key=api_key)
    app.state.engine, app.state.metrics = engine, metrics
    return app


@contextmanager
def served(decoder, **options):
    """A client of an application that runs."""
    with TestClient(make(decoder, **options), raise_server_exceptions=False) as client:
        yield client


def events(text):
    """The objects of a stream of server-sent events, which must end with [DONE]."""
    *parts, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert all(part.startswith("data: ") for part in parts)
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def until(condition, seconds=20.0):
    """Wait until a condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


class Process:
    """A server in a process of its own."""

    def __init__(self, popen, port):
        self.popen, self.port, self.url = popen, port, f"http://127.0.0.1:{port}"

    def get(self, path):
        """The body of an answer, or None without an answer."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=20) as answer:
                return answer.read().decode()
        except (ConnectionError, urllib.error.URLError):
            return None

    def numbers(self):
        """The samples of /metrics by their names and labels."""
        lines = (line.rpartition(" ") for line in self.get("/metrics").splitlines() if not line.startswith("#"))
        return {name: float(value) for name, _, value in lines}


@contextmanager
def server(folder, *arguments, log=subprocess.PIPE):
    """A server on a free port, which does not outlive the test."""
    command = [sys.executable, "-c", START, str(folder), "--port", "0", "--device", "cpu", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as popen:
        try:
            line = popen.stdout.readline()
            match = re.match(r"http://127\.0\.0\.1:(\d+) serves tiny ", line)
            assert match, line or popen.stderr.read()
            process = Process(popen, int(match[1]))
            until(lambda: process.get("/health"))
            yield process
        finally:
            popen.kill()
