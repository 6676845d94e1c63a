"""Runs an engine on a thread of its own while there are streams to answer."""

from __future__ import annotations

import atexit
import functools
import threading
import weakref
from dataclasses import dataclass, field

from pagedlora import _core
from pagedlora.engine.parts import EngineParts
from pagedlora.engine.request_processor import Sent
from pagedlora.engine.request_stream import RequestStream
from pagedlora.errors import InvalidArgumentError, PagedLoraError
from pagedlora.requests import LlmRequest, LoRARequest, RequestOutput
from pagedlora.sampling_params import SamplingParams


@dataclass(eq=False, slots=True)
class _Submission:
    """A request on its way to the engine, and what was delivered of it."""

    stream: RequestStream
    prompt: str | list[int]
    params: SamplingParams
    lora: LoRARequest | str | None
    token_ids: list[int] = field(default_factory=list)
    is_aborted: bool = False  # before the engine had it
    sent: Sent = field(default_factory=Sent)


class StepLoop:
    """Requests of any thread in, outputs out.

    The thread holds the engine's lock from the first request to the end of the last one, so
    requests that come meanwhile share its batches. It ends when nothing is left to do, and before
    the interpreter ends: a thread that the interpreter kills inside a forward brings the process
    down. Thread-safe. A child of the process that made it cannot use it, only close it.
    """

    def __init__(self, parts: EngineParts, engine_lock: threading.Lock) -> None:
        """Starts without a thread.

        Args:
            parts: Used only with the lock.
            engine_lock: Whoever holds it steps the engine.
        """
        self._process = _core.ProcessMark()
        self._parts: EngineParts | None = parts  # until it is closed
        self._engine_lock = engine_lock
        self._lock = threading.Lock()  # guards what follows
        self._inbox: list[_Submission] = []
        self._running: dict[int, _Submission] = {}
        self._thread: threading.Thread | None = None  # the last one
        self._takes_inbox = False  # whether that will look into the inbox once more
        self._closed = False
        self._at_exit = functools.partial(_close, weakref.ref(self))
        atexit.register(self._at_exit)

    @property
    def is_current_thread(self) -> bool:
        """Whether the caller is called by the engine's steps."""
        return self._thread is threading.current_thread()

    @property
    def _open_parts(self) -> EngineParts:
        assert self._parts is not None, "the loop was closed"
        return self._parts

    def submit(
        self,
        request_id: int,
        prompt: str | list[int],
        params: SamplingParams,
        lora: LoRARequest | str | None,
    ) -> RequestStream:
        """Hands a request to the thread, which is started if need be.

        Raises:
            InvalidArgumentError: The loop was closed.
        """
        stream = RequestStream(request_id, self.abort)
        with self._lock:
            if self._closed:
                raise InvalidArgumentError("this LLM is closed: make a new one")
            self._inbox.append(_Submission(stream, prompt, params, lora))
            if not self._takes_inbox:
                self._takes_inbox = True
                self._thread = threading.Thread(
                    target=self._run, name="pagedlora-steps", daemon=True
                )
                self._thread.start()
        return stream

    def abort(self, request_id: int) -> None:
        """Ends a request, wherever it is; unknown ones are ignored."""
        self._process.check("this LLM")
        with self._lock:
            for submission in self._inbox:
                if submission.stream.request_id == request_id:
                    submission.is_aborted = True
                    return
            if self._parts is not None:
                self._parts.core.abort(request_id)

    def wait_if_done(self) -> None:
        """Waits until the thread has given the engine back, if all streams have ended."""
        with self._lock:
            thread = None if self._inbox or self._running else self._thread
        if thread is not None:
            thread.join()

    def close(self) -> None:
        """Ends all requests as aborted, waits for the thread and lets the engine go; idempotent.

        Not from that thread.
        """
        if not self._process.is_here:  # neither is the thread, and the lock may be held for ever
            atexit.unregister(self._at_exit)
            self._parts = None
            return
        with self._lock:
            self._closed = True
            thread = self._thread
            for submission in self._inbox:
                submission.is_aborted = True
            for request_id in self._running:
                self._open_parts.core.abort(request_id)
        if thread is not None:
            thread.join()
        atexit.unregister(self._at_exit)
        with self._lock:
            self._parts = None

    def _run(self) -> None:
        with self._engine_lock:
            try:
                while self._take_inbox():
                    for request in self._open_parts.core.step():
                        self._deliver(request)
            except BaseException as error:  # everybody who waits must hear of it
                self._fail_all(error)

    def _take_inbox(self) -> bool:
        """Whether there is anything to do; if not, the thread is given up."""
        with self._lock:
            submissions, self._inbox = self._inbox, []
            self._running.update((s.stream.request_id, s) for s in submissions)
            if not self._running:
                self._takes_inbox = False
                return False
        for submission in submissions:
            self._begin(submission)
        return True

    def _begin(self, submission: _Submission) -> None:
        parts, request_id = self._open_parts, submission.stream.request_id
        try:
            submission.token_ids = parts.processor.token_ids(submission.prompt)
            parts.begin(
                request_id, submission.token_ids, submission.params, submission.lora, streams=True
            )
            if submission.is_aborted or self._closed:
                parts.core.abort(request_id)
        except PagedLoraError as error:
            output = RequestOutput(request_id, submission.token_ids, [], error=error)
            self._end(submission, output, output)

    def _deliver(self, request: LlmRequest) -> None:
        submission, parts = self._running[request.request_id], self._open_parts
        item = parts.processor.make_delta(request, submission.sent)
        if not request.has_ended:
            submission.stream.push(item, None)
            return
        parts.adapters.release(request)
        self._end(submission, item, parts.processor.make_output(request))

    def _end(self, submission: _Submission, item: RequestOutput, whole: RequestOutput) -> None:
        with self._lock:
            del self._running[submission.stream.request_id]
        submission.stream.push(item, whole)

    def _fail_all(self, error: BaseException) -> None:
        """The engine takes back everything; all streams raise the error."""
        self._open_parts.core.abort_all(PagedLoraError(f"the engine failed: {error!r}"))
        self._open_parts.adapters.release_all()
        with self._lock:
            failed = [*self._running.values(), *self._inbox]
            self._running, self._inbox, self._takes_inbox = {}, [], False
        for submission in failed:
            submission.stream.fail(error)


def _close(reference: weakref.ref[StepLoop]) -> None:
    loop = reference()
    if loop is not None:
        loop.close()
