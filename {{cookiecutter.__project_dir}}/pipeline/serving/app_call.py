"""Calls an ASGI app so that its work stops when the client disconnects or the request times out."""

import asyncio
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

TURNS = 10  # iterations of the event loop, in which a handler that just started begins to listen for a disconnect
GRACE_S = 5.0  # for a handler that got `http.disconnect` to stop; then its task is cancelled
HANG_UP: Message = {"type": "http.disconnect"}


class AppCall:
    """One request that an app handles in its own task.

    vLLM runs the handler of a non-streaming request in a separate task, and cancels it on `http.disconnect`. If only
    the outer task is cancelled, as Ray does on a disconnect, the handler is orphaned and the engine keeps working. So
    the app first receives `http.disconnect`, and is cancelled only if it does not listen.
    """

    def __init__(
        self, app: ASGIApp, scope: Scope, body: bytes, receive: Receive, send: Send, close: Callable[[], None]
    ) -> None:
        """Start the app on a request whose body has been read. `close` is called before its work is stopped early."""
        self._body: bytes | None = body
        self._receive = receive
        self._close = close
        self._listening: asyncio.Future[Message] | None = None
        self._ending = False
        self.task = asyncio.ensure_future(app(scope, self._next_message, send))

    async def wait(self) -> None:
        """Wait until the app has answered. On cancellation, stop the app's work first."""
        task = self.task
        del self.task  # the task may hold a stream cancelled in `send`, which closes when nothing refers to it
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            await asyncio.shield(asyncio.create_task(self._end(task)))  # even if it is cancelled twice
            raise
        task.result()

    async def _end(self, task: asyncio.Future[None]) -> None:
        for _ in range(TURNS):
            await asyncio.sleep(0)
        self._ending = True
        self._close()
        if self._listening:
            self._listening.cancel()  # the app then receives HANG_UP
            await asyncio.wait({task}, timeout=GRACE_S)
        task.cancel()
        await asyncio.wait({task}, timeout=GRACE_S)

    async def _next_message(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        if self._ending:
            return HANG_UP
        self._listening = asyncio.ensure_future(self._receive())
        try:
            message = await self._listening
        except asyncio.CancelledError:
            if self._ending:
                return HANG_UP
            self._listening = None
            raise
        if message["type"] == HANG_UP["type"]:
            self._close()
        return message
