"""Calls an ASGI app, and stops its work when the client disconnects or the request times out."""

import asyncio
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOP_ITERATIONS = 10  # a new handler starts to listen for a disconnect within this many iterations of the event loop
GRACE_S = 5.0  # how long a handler may take to stop after `http.disconnect`, before its task is cancelled
DISCONNECT: Message = {"type": "http.disconnect"}


class ClientDisconnected(Exception):
    """The client disconnected before it had the entire response."""


class AppCall:
    """A request that an app handles in a separate task.

    vLLM runs the handler of a non-streaming request in yet another task, and cancels it on `http.disconnect`.
    A cancellation of the outer task alone would orphan the handler, and the engine would keep working. Therefore the
    app first receives `http.disconnect`, and is cancelled only if it does not stop by itself.
    """

    def __init__(
        self, app: ASGIApp, scope: Scope, body: bytes, receive: Receive, send: Send, discard: Callable[[], None]
    ) -> None:
        """Start the app. `body` is the request's body; `discard` is called if the work is stopped early."""
        self._body: bytes | None = body
        self._receive = receive
        self._send = send
        self._discard = discard
        self._stopping = asyncio.Event()
        self._is_listening = False
        self._is_complete = False
        # By version 2.4 of this specification, a send to a client that has disconnected raises OSError. Starlette then
        # streams without a task that listens for the disconnect.
        scope = {**scope, "asgi": {**scope.get("asgi", {}), "spec_version": "2.4"}}
        self.task = asyncio.ensure_future(app(scope, self._next_message, self._tracked_send))

    async def wait(self) -> None:
        """Wait until the app has finished. If this call is cancelled, stop the app's work first.

        Raises:
            ClientDisconnected: the client disconnected, and the app's work was stopped.
        """
        task = self.task
        del self.task  # a stream that was cancelled in `send` closes only when nothing refers to its task
        disconnected = asyncio.ensure_future(self._receive())
        try:
            await asyncio.wait({task, disconnected}, return_when=asyncio.FIRST_COMPLETED)
            if self._is_complete:  # servers also report a disconnect after the last part of a response
                await asyncio.wait({task})
            if not task.done():
                raise ClientDisconnected
        except (asyncio.CancelledError, ClientDisconnected):
            await asyncio.shield(asyncio.create_task(self._stop(task)))  # even if this call is cancelled twice
            raise
        finally:
            disconnected.cancel()
        task.result()

    async def _stop(self, task: asyncio.Future[None]) -> None:
        for _ in range(LOOP_ITERATIONS):
            await asyncio.sleep(0)
        self._discard()
        if self._is_listening:
            self._stopping.set()
            await asyncio.wait({task}, timeout=GRACE_S)
        task.cancel()
        await asyncio.wait({task}, timeout=GRACE_S)

    async def _next_message(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        self._is_listening = True
        try:
            await self._stopping.wait()
        finally:
            self._is_listening = False
        return DISCONNECT

    async def _tracked_send(self, message: Message) -> None:
        self._is_complete = message["type"] == "http.response.body" and not message.get("more_body")
        await self._send(message)
