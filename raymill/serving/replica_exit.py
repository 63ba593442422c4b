"""Takes a replica out of service, because its engine has died or AWS takes its machine back.

Before AWS takes a machine back, the watchdog drains its Ray node (raymill/node/watchdog_worker.py). Serve starts
another replica at once, and stops this one when the other is up, or shortly before the machine's end.
"""

import asyncio
import logging
import time
from collections.abc import Callable

import ray
from ray import serve

from raymill.ray_support.private import core
from raymill.ray_support.private import serve as private_serve
from raymill.serving.errors import CLOSE, ENGINE_RETRY_S, ApiError

FIRST_WAIT_S = 0.25
"""Seconds for requests that HAProxy is sending when the replica stops listening."""
POLL_S = 5.0
END_REQUESTS_S = 15.0
"""Seconds before the end of the machine at which its requests end, so that their clients learn of it. Otherwise they
would wait for a machine that is gone."""

log = logging.getLogger(__name__)


def machine_ends() -> ApiError:
    """Return the error for the requests that a machine cannot answer before its end. It closes HAProxy's connection."""
    message = "AWS takes this replica's machine back before the answer is complete; send the request again"
    return ApiError(503, message, code="machine_ends", headers=CLOSE | {"Retry-After": str(ENGINE_RETRY_S)})


async def stop_listening(timeout_s: float = 0.0) -> None:
    """Stop accepting connections, so that HAProxy uses other replicas. Wait up to `timeout_s` for open requests.

    Serve's own shutdown also closes idle connections, on which HAProxy may be sending a request at that moment.
    """
    http_server = private_serve.own_http_server()
    for server in http_server.servers:
        server.close()
    deadline = time.monotonic() + timeout_s
    await asyncio.sleep(FIRST_WAIT_S)
    while http_server.server_state.tasks and time.monotonic() < deadline:
        await asyncio.sleep(0.01)


async def leave_in_time(end_requests: Callable[[ApiError], None]) -> None:
    """Wait until this node drains. Then let other replicas answer new requests, if there are any.

    A few seconds before the machine's end, end the requests in progress with an error, and return.
    """
    context = ray.get_runtime_context()
    address, node, app = context.gcs_address, context.get_node_id(), serve.get_replica_context().app_name
    is_listening = True
    while True:
        await asyncio.sleep(POLL_S)
        try:
            draining = await asyncio.to_thread(core.draining_nodes, address)
            if node not in draining:
                continue
            if 0 < draining[node] <= time.time() + END_REQUESTS_S:
                end_requests(machine_ends())
                return
            others = await asyncio.to_thread(private_serve.nodes_of_running_replicas, app) - draining.keys()
        except Exception as error:  # of Ray's control store or of Serve's controller, which may restart
            log.warning("the end of this machine is unknown: %s: %s", type(error).__name__, error)
            continue
        if is_listening and others:
            log.warning("AWS takes this machine back, so other replicas get the new requests")
            await stop_listening()
            is_listening = False
