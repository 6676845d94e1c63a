"""What a caller of `generate_async` holds: one request's answer as it comes."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator

from pagedlora import _core
from pagedlora.arguments import to_seconds
from pagedlora.errors import RequestTimeoutError
from pagedlora.requests import RequestOutput


class RequestStream:
    """One request's outputs, token by token, for threads and for coroutines.

    Iterate over it (`for`, `async for`): each item is a `RequestOutput` with what is new since the
    last one, one per token; the last one has `finished` and the finish reason, or the error. Or ask
    for `result()` (`await aresult()`), the whole answer. Every item is delivered once. An iterator
    that is given up early does not end the request: `abort()` does. Thread-safe. In a child of the
    process that made it all of it raises InvalidArgumentError.
    """

    def __init__(self, request_id: int, abort: Callable[[int], None]) -> None:
        """Made by `LLM.generate_async`.

        Args:
            request_id: For `LLM.abort`.
            abort: Ends the request.
        """
        self.request_id = request_id
        self._abort = abort
        self._process = _core.ProcessMark()
        self._changed = threading.Condition()
        self._items: deque[RequestOutput] = deque()
        self._whole: RequestOutput | None = None
        self._exception: BaseException | None = None
        self._wakers: list[Callable[[], object]] = []

    def abort(self) -> None:
        """Ends the request with what it has, soon; nothing happens if it has ended."""
        self._abort(self.request_id)

    def result(self, timeout_s: float | None = None) -> RequestOutput:
        """Waits for the whole answer.

        Args:
            timeout_s: Seconds at most; None: as long as it takes.

        Raises:
            RequestTimeoutError: It has not ended by then; it goes on.
            InvalidArgumentError: The time is no number, or negative.
            Exception: The engine failed.
        """
        self._check_process()
        limit_s = None if timeout_s is None else to_seconds(timeout_s, "timeout_s")
        with self._changed:
            if not self._changed.wait_for(lambda: self._has_ended, limit_s):
                raise RequestTimeoutError(
                    f"request {self.request_id} has not ended after {limit_s:g} s: wait longer, or "
                    "end it with abort()",
                    request_id=self.request_id,
                    limit_seconds=limit_s,
                )
        return self._outcome()

    async def aresult(self) -> RequestOutput:
        """`result` for a coroutine."""
        await self._wait(lambda: self._has_ended)
        return self._outcome()

    def __iter__(self) -> Iterator[RequestOutput]:
        """The items that were not delivered yet, as they come."""
        while True:
            self._check_process()
            with self._changed:
                self._changed.wait_for(lambda: self._items or self._has_ended)
                item = self._items.popleft() if self._items else None
            if item is None:
                self._raise_exception()
                return
            yield item

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        """The same for a coroutine."""
        while True:
            self._check_process()
            with self._changed:
                item = self._items.popleft() if self._items else None
                ended = self._has_ended
            if item is not None:
                yield item
            elif ended:
                self._raise_exception()
                return
            else:
                await self._wait(lambda: bool(self._items) or self._has_ended)

    def push(self, item: RequestOutput, whole: RequestOutput | None) -> None:
        """Delivers an item; with `whole`, the last one. Called by the engine."""
        with self._changed:
            self._items.append(item)
            self._whole = whole
            self._wake()

    def fail(self, exception: BaseException) -> None:
        """The engine failed. Called by the engine."""
        with self._changed:
            self._exception = exception
            self._wake()

    @property
    def _has_ended(self) -> bool:
        return self._whole is not None or self._exception is not None

    def _outcome(self) -> RequestOutput:
        self._raise_exception()
        assert self._whole is not None
        return self._whole

    def _raise_exception(self) -> None:
        if self._exception is not None:
            raise self._exception

    def _wake(self) -> None:
        self._changed.notify_all()
        wakers, self._wakers = self._wakers, []
        for wake in wakers:
            wake()

    def _check_process(self) -> None:
        self._process.check("this stream")

    async def _wait(self, is_ready: Callable[[], bool]) -> None:
        self._check_process()
        loop = asyncio.get_running_loop()
        news = asyncio.Event()

        def wake() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(news.set)

        while True:
            with self._changed:
                if is_ready():
                    return
                news.clear()
                self._wakers.append(wake)
            await news.wait()
