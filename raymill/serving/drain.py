"""Stops applications: says how many answers run, gives them a short time, and then ends them.

An update is different. The old replicas then keep their answers for as long as a request may take
(`RequestLimits.shutdown_s`).
"""

import logging
import time

from ray import serve

from raymill.errors import UserError
from raymill.ray_support.private import serve as private_serve
from raymill.serving.options import DRAIN_S
from raymill.settings import inv

CLEAN_STOP_S = 30.0
"""Seconds that replicas without answers get to stop by themselves."""
REMOVAL_S = 60.0
"""Seconds within which Serve notices that replicas were killed."""
PROGRESS_INTERVAL_S = 15.0
POLL_S = 0.5


def stop(app: str, name: str, drain_s: float = DRAIN_S) -> None:
    """Stop an application. Its running answers get `drain_s` seconds, and then are ended.

    `name` is the application's name in messages.

    Raises:
        UserError: Serve does not remove the application.
    """
    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # Serve's INFO lines repeat what this prints
    started = printed = time.monotonic()
    if count := private_serve.ongoing_requests(app):
        print(f"{name}: {_answers(count)} running; what is left after {drain_s:g} s is cut off", flush=True)
    serve.delete(app, _blocking=False)  # otherwise it raises TimeoutError after a minute
    while app in serve.status().applications:
        waited, count = time.monotonic() - started, private_serve.ongoing_requests(app)
        if waited > drain_s and (count or waited > drain_s + CLEAN_STOP_S):
            break
        if count and time.monotonic() > printed + PROGRESS_INTERVAL_S:
            printed = time.monotonic()
            print(f"{name}: {_answers(count)} still running; {drain_s - waited:.0f} s left", flush=True)
        time.sleep(POLL_S)
    else:
        return
    if count:
        print(f"{name}: {count} cut off. For more time, use --drain SECONDS", flush=True)
    private_serve.kill_replicas(app)
    deadline = time.monotonic() + REMOVAL_S
    while app in serve.status().applications:
        if time.monotonic() > deadline:
            raise UserError(f"Serve has not removed {name} after {REMOVAL_S:g} s. Run: {inv('status')}")
        time.sleep(POLL_S)


def _answers(count: int) -> str:
    return "1 answer is" if count == 1 else f"{count} answers are"
