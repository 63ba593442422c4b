"""Calls an ASGI app, and stops its work when the client disconnects or the request times out."""

import asyncio
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOP_ITERATIONS = 10  # a new handler starts to listen for a disconnect within this many iterations of the event loop
GRACE_S = 5.0  # how long a handler may take to stop after `http.disconnect`, before its task is cancelled
DISCONNECT: Message = {"type": "http.disconnect"}


class AppCall:
    """A request that an app handles in a separate task.

    vLLM runs the handler of a non-streaming request in yet another task, and cancels it on `http.disconnect`. On
    a disconnect, Ray cancels only the outer task. This would orphan the handler, and the engine would keep working.
    Therefore the app first receives `http.disconnect`, and is cancelled only if it does not stop by itself.
    """

    def __init__(
        self, app: ASGIApp, scope: Scope, body: bytes, receive: Receive, send: Send, discard: Callable[[], None]
    ) -> None:
        """Start the app. `body` is the request's body; `discard` is called if the work is stopped early."""
        self._body: bytes | None = body
        self._receive = receive
        self._discard = discard
        self._listening: asyncio.Future[Message] | None = None
        self._stopping = False
        self.task = asyncio.ensure_future(app(scope, self._next_message, send))

    async def wait(self) -> None:
        """Wait until the app has finished. If this call is cancelled, stop the app's work first."""
        task = self.task
        del self.task  # a stream that was cancelled in `send` closes only when nothing refers to its task
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            await asyncio.shield(asyncio.create_task(self._stop(task)))  # even if this call is cancelled twice
            raise
        task.result()

    async def _stop(self, task: asyncio.Future[None]) -> None:
        for _ in range(LOOP_ITERATIONS):
            await asyncio.sleep(0)
        self._stopping = True
        self._discard()
        if self._listening:
            self._listening.cancel()  # the app then receives DISCONNECT
            await asyncio.wait({task}, timeout=GRACE_S)
        task.cancel()
        await asyncio.wait({task}, timeout=GRACE_S)

    async def _next_message(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        if self._stopping:
            return DISCONNECT
        self._listening = asyncio.ensure_future(self._receive())
        try:
            message = await self._listening
        except asyncio.CancelledError:
            if self._stopping:
                return DISCONNECT
            self._listening = None
            raise
        if message["type"] == DISCONNECT["type"]:
            self._discard()
        return message
