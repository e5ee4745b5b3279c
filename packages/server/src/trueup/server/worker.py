"""The thread that runs the engine, and what passes between it and the event loop.

The engine is not thread-safe, so nobody else touches it: the event loop sends calls through a queue, which the
thread works off between rounds, and tokens come back through the queue of each submission.  All requests
therefore decode together.
"""
import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from trueup.core.engine import Engine
from trueup.core.sampling import SamplingParams

log = logging.getLogger(__name__)


class EngineFailed(RuntimeError):
    """The engine broke while it ran a request, or no longer runs."""


@dataclass(frozen=True)
class Gained:
    """What one round gave to one prompt of a submission."""

    index: int
    token_ids: tuple[int, ...]
    finish_reason: str | None


class Submission:
    """Prompts that were submitted together; iterate to follow them to their end.

    Raises:
        EngineFailed: while iterating.
    """

    def __init__(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> None:
        self.prompts, self.params = prompts, params
        self.requests: list[int] = []  # the worker's thread only
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Gained | Exception | None] = asyncio.Queue()

    def send(self, event: Gained | Exception | None) -> None:
        """From the worker's thread: tokens, an error, or None for "accepted"."""
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)
        except RuntimeError:
            log.debug("the event loop has closed; nobody waits for %s", event)

    async def next(self) -> Gained | None:
        event = await self._events.get()
        if isinstance(event, Exception):
            raise event
        return event

    async def __aiter__(self) -> AsyncIterator[Gained]:
        unfinished = len(self.prompts)
        while unfinished:
            event = await self.next()
            assert event is not None, "acceptance is sent once, and submit() has read it"
            unfinished -= event.finish_reason is not None
            yield event


class Worker:
    """Runs an engine in a thread of its own, from :meth:`start` to :meth:`stop`.

    ``rounds`` and ``largest_batch`` (most requests in one forward) are counts since the start.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.rounds, self.largest_batch = 0, 0
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._owners: dict[int, tuple[Submission, int]] = {}
        self._thread = threading.Thread(target=self._run, name="trueup-engine", daemon=True)
        self._running, self._lock = False, threading.Lock()

    @property
    def running(self) -> bool:
        return self._running

    @property
    def unfinished(self) -> int:
        """Requests that wait or run."""
        return len(self._owners)

    def start(self) -> None:
        self._running = True
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its round; what is unfinished fails.  May be called twice."""
        self._calls.put(self._end)
        self._thread.join()

    async def submit(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> Submission:
        """Queue prompts of token ids, all or none.

        Raises:
            ValueError: the engine refuses one of them.
            EngineFailed: the worker is not running.
        """
        submission = Submission(prompts, params)
        with self._lock:  # so that no call is queued behind the last look into the queue
            if not self._running:
                raise EngineFailed("the engine is not running")
            self._calls.put(partial(self._add, submission))
        try:
            await submission.next()
        except BaseException:
            self.abort(submission)
            raise
        return submission

    def abort(self, submission: Submission) -> None:
        """Forget a submission and free its pages after the round that is running; finished ones are ignored."""
        self._calls.put(partial(self._abort, submission))

    # From here on: in the thread.

    def _run(self) -> None:
        try:
            while self._running:
                self._work_off_calls()
                if self._running and self.engine.has_work:
                    self._step()
        finally:
            with self._lock:
                self._running = False
            self._fail_all("the engine has stopped")
            while not self._calls.empty():
                self._calls.get()()

    def _work_off_calls(self) -> None:
        """Every call that waits; without work, wait for one."""
        if not self.engine.has_work:
            self._calls.get()()
        while not self._calls.empty():
            self._calls.get()()

    def _step(self) -> None:
        try:
            done = self.engine.step()
        except Exception as error:
            log.exception("the engine failed in a round; its requests are given up")
            self._fail_all(f"the engine failed: {error}")
            return
        self.rounds += 1
        self.largest_batch = max(self.largest_batch, done.layout.real_requests)
        for request, token_ids in done.tokens.items():
            submission, index = self._owners[request]
            submission.send(Gained(index, token_ids, done.finished.get(request)))
        for request in done.finished:
            del self._owners[request]

    def _add(self, submission: Submission) -> None:
        if not self._running:
            submission.send(EngineFailed("the engine has stopped"))
            return
        try:
            for index, prompt in enumerate(submission.prompts):
                request = self.engine.add(prompt, submission.params)
                submission.requests.append(request)
                self._owners[request] = submission, index
        except Exception as error:
            self._abort(submission)
            submission.send(error)
        else:
            submission.send(None)

    def _abort(self, submission: Submission) -> None:
        for request in submission.requests:
            self.engine.abort(request)
            self._owners.pop(request, None)

    def _fail_all(self, reason: str) -> None:
        for submission in {submission for submission, _ in self._owners.values()}:
            self._abort(submission)
            submission.send(EngineFailed(reason))

    def _end(self) -> None:
        self._running = False
