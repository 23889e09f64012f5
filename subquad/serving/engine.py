"""Run the batched decoder in a thread of its own and pass its tokens to the event loop.

Only methods whose names begin with `_thread` run in that thread; all others run on the event loop. No locks are needed:
a queue carries commands to the thread, and `call_soon_threadsafe` carries results back.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from queue import Empty, SimpleQueue
from typing import Any, Literal

from subquad.generation.batch import BatchDecoder, Request
from subquad.generation.logprobs import TokenLogprob
from subquad.generation.sampling import SamplingConfig
from subquad.serving.config import ServeConfig
from subquad.serving.metrics import Load, Metrics

logger = logging.getLogger(__name__)
Limit = Literal["tokens", "seconds", "shutdown"]


class BusyError(Exception):
    """The server already runs its maximum of sequences."""


class DownError(Exception):
    """The server takes no more requests: it is stopping, or its decoder has failed."""


@dataclass(frozen=True, slots=True)
class Event:
    """A token of the sequence `index`, its end, or both; `limit` says which limit ended it with "length".

    `state_bytes` is the state's size at the token; `seconds` is the event's time by `perf_counter`. If they were asked
    for, `logprob` is the token's, and `prompt_logprobs` are those of the prompt from its second token on.
    """

    index: int
    token: int | None
    state_bytes: int
    seconds: float
    end: Literal["stop", "length", "error"] | None = None
    limit: Limit | None = None
    error: Exception | None = None
    logprob: TokenLogprob | None = None
    prompt_logprobs: Sequence[TokenLogprob] = ()


Prompts = Sequence[tuple[Sequence[int], Sequence[SamplingConfig]]]
"""Prompts, each with the sampling of each of its sequences."""


class Job:
    """The sequences of one request, numbered in the order of `prompts`; `events` receives their tokens and ends.

    `options` are those of `BatchDecoder.add_samples`.
    """

    def __init__(self, prompts: Prompts, options: Mapping[str, Any]) -> None:
        self.prompts = prompts
        self.options = options
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.open = set(range(sum(len(samplings) for _, samplings in prompts)))
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.begin = time.perf_counter()
        self.last: dict[int, float] = {}
        self.timer: asyncio.TimerHandle | None = None


class Engine:
    """Decode the sequences of many jobs together in a thread.

    `failure` is the exception that the decoder failed with, or None; a failure ends all sequences, and no more are
    taken. `max_context` is the most tokens of a sequence, None if the model has no limit.
    """

    def __init__(self, decoder: BatchDecoder, config: ServeConfig, metrics: Metrics) -> None:
        self.failure: Exception | None = None
        self.load = Load(0, 0, config.slots, decoder.state_bytes)
        self.max_context = decoder.max_context
        self._decoder = decoder
        self._config = config
        self._metrics = metrics
        self._jobs: set[Job] = set()
        self._stopping = False
        self._commands: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._requests: dict[tuple[Job, int], Request] = {}
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Start the thread. Must be called on the event loop that receives its events."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._thread_main, name="decoder", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """End all sequences and wait for the thread to end."""
        self._stopping = True
        self._end_all("shutdown")
        self._commands.put(None)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    def join(self) -> None:
        """Wait for the thread from outside the event loop, which may have ended without calling `stop`."""
        self._commands.put(None)
        if self._thread is not None:
            self._thread.join()

    def drain(self) -> None:
        """Take no new jobs, and end the running ones after `grace_seconds`."""
        if not self._stopping:
            self._stopping = True
            asyncio.get_running_loop().call_later(self._config.grace_seconds, self._end_all, "shutdown")

    def drain_soon(self) -> None:
        """Call `drain` from another thread or a signal handler."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self.drain)

    @property
    def sequences(self) -> int:
        """Return the number of sequences that run or wait, over all jobs."""
        return sum(len(job.open) for job in self._jobs)

    def check(self) -> None:
        """Raise `DownError` if no jobs are taken."""
        if self.failure is not None:
            raise DownError(f"the decoder has failed and the server must be restarted: {self.failure}")
        if self._stopping:
            raise DownError("the server is stopping")

    async def submit(self, prompts: Prompts, /, **options: Any) -> Job:
        """Start decoding; the caller must `close` the job at the end, whatever happens.

        A prompt is read once for all its sequences; `options` are those of `BatchDecoder.add_samples`. Raises
        `BusyError` above `max_requests`, `DownError` if the server is stopping or has failed, and the errors of
        `BatchDecoder.add_samples` (`ValueError` for a prompt that the model can't take).
        """
        self.check()
        most, job = self._config.max_requests, Job(prompts, options)
        if self.sequences + len(job.open) > most:
            raise BusyError(f"{self.sequences} of at most {most} sequences run or wait; try again later")
        self._jobs.add(job)
        job.timer = asyncio.get_running_loop().call_later(self._config.max_seconds, self._end, job, "seconds")
        self._commands.put(lambda: self._thread_add(job))
        try:
            await job.accepted
        except BaseException:
            self.close(job)
            raise
        self._metrics.count_prompts(sum(len(prompt) for prompt, _ in prompts))
        return job

    def close(self, job: Job) -> None:
        """End the job's open sequences and forget it; do nothing if it has ended."""
        for index in tuple(job.open):
            self.cancel(job, index)
        self._forget(job)

    def cancel(self, job: Job, index: int, reason: str = "cancelled") -> None:
        """End one sequence without an event; do nothing if it has ended."""
        if index in job.open:
            self._metrics.count_end(reason)
            self._free(job, index)
            if not job.open:
                self._forget(job)

    def _free(self, job: Job, index: int) -> None:
        job.open.discard(index)
        self._commands.put(lambda: self._thread_cancel(job, index))

    def _forget(self, job: Job) -> None:
        self._jobs.discard(job)
        if job.timer is not None:
            job.timer.cancel()

    def _end(self, job: Job, limit: Limit) -> None:
        """End a job's sequences as if they had reached `max_tokens`."""
        self._accept(job)
        for index in tuple(job.open):
            self._metrics.count_end(limit)
            self._free(job, index)
            job.events.put_nowait(Event(index, None, 0, time.perf_counter(), "length", limit))
        self._forget(job)

    def _end_all(self, limit: Limit) -> None:
        for job in tuple(self._jobs):
            self._end(job, limit)

    def _deliver(self, events: list[tuple[Job, Event]]) -> None:
        for job, event in events:
            if event.index not in job.open:
                continue  # cancelled while the token was made
            if event.token is not None:
                self._metrics.count_token(event.seconds - job.last.get(event.index, job.begin), event.index in job.last)
                job.last[event.index] = event.seconds
            if event.end is not None:
                self._metrics.count_end("tokens" if event.end == "length" else event.end)
                job.open.discard(event.index)
                if not job.open:
                    self._forget(job)
            job.events.put_nowait(event)

    def _fail(self, error: Exception) -> None:
        """Record the decoder's exception and end all jobs."""
        self.failure = error
        self.load = self.load._replace(running=0, waiting=0, free=0, state_bytes=0)
        down = DownError("the decoder has failed and the server must be restarted")
        for job in tuple(self._jobs):
            self._refuse(job, down)
            for index in tuple(job.open):
                self._deliver([(job, Event(index, None, 0, time.perf_counter(), "error", error=down))])

    def _accept(self, job: Job) -> None:
        if not job.accepted.done():
            job.accepted.set_result(None)

    def _refuse(self, job: Job, error: Exception) -> None:
        if not job.accepted.done():
            job.accepted.set_exception(error)

    def _thread_main(self) -> None:
        try:
            while self._thread_obey():
                if self._requests:
                    self._thread_step()
        except Exception as error:
            logger.exception("the decoder has failed; the server answers 503 from now on")
            self._thread_tell(self._fail, error)

    def _thread_tell(self, callback: Callable[..., None], *arguments: Any) -> None:
        """Have the event loop call `callback`; a closed loop has no listeners left."""
        assert self._loop is not None
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback, *arguments)

    def _thread_obey(self) -> bool:
        """Run the queued commands, or wait for one if nothing is decoded; return False when told to end."""
        while True:
            try:
                command = self._commands.get_nowait()
            except Empty:
                self._thread_note_load()
                if self._requests:
                    return True
                command = self._commands.get()
            if command is None:
                return False
            command()

    def _thread_note_load(self) -> None:
        decoder = self._decoder
        self.load = Load(decoder.running, decoder.waiting, decoder.free, decoder.state_bytes, decoder.prefixes)

    def _thread_add(self, job: Job) -> None:
        try:
            index = 0
            for prompt, samplings in job.prompts:
                for request in self._decoder.add_samples(prompt, samplings, **job.options):
                    self._requests[job, index] = request
                    index += 1
        except Exception as error:  # concerns this job alone, which `submit` closes; the others continue
            self._thread_tell(self._refuse, job, error)
        else:
            self._thread_tell(self._accept, job)

    def _thread_cancel(self, job: Job, index: int) -> None:
        request = self._requests.pop((job, index), None)
        if request is not None:
            self._decoder.cancel(request)

    def _thread_step(self) -> None:
        made = defaultdict[int, list[int | None]](list)
        for request, token in self._decoder.step():
            made[id(request)].append(token)
        now = time.perf_counter()
        events = []
        for (job, index), request in tuple(self._requests.items()):
            tokens, end = made[id(request)], request.finished
            if not tokens and end is None:
                continue
            if end is not None:
                del self._requests[job, index]
            if end == "cancelled":
                continue
            limit: Limit | None = "tokens" if end == "length" else None
            logprobs = request.logprobs[len(request.tokens) - len(tokens) :]
            event = partial(
                Event,
                index,
                state_bytes=request.state_bytes,
                seconds=now,
                prompt_logprobs=request.prompt_logprobs,
            )
            *others, (last, logprob) = zip_longest(tokens or [None], logprobs)
            events += [(job, event(token, logprob=logprob)) for token, logprob in others]
            events.append((job, event(last, end=end, limit=limit, error=request.error, logprob=logprob)))
        if events:
            self._thread_note_load()  # before an answer ends: who has it may ask for the load
            self._thread_tell(self._deliver, events)
