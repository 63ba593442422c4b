"""Stop the served models before `inv down` ends the cluster."""

import threading

from raymill import status, submission
from raymill.errors import UserError
from raymill.printable import printable
from raymill.target import Target

START_AND_STOP_S = 180.0
"""Seconds for the start of the job that stops the models, and for their replicas to stop, besides the answers' time."""


def before_down(target: Target, seconds: int) -> None:
    """Say how many answers run, wait up to `seconds` for them, and cut off the others.

    Return at once if nothing is served, or if the cluster does not answer. Whatever goes wrong, return within `seconds`
    and START_AND_STOP_S, because the cluster costs money until it is ended.
    """
    thread = threading.Thread(target=_stop_models, args=(target, seconds), daemon=True)
    thread.start()
    thread.join(seconds + START_AND_STOP_S)
    if thread.is_alive():
        print(f"the models have not stopped after {seconds + START_AND_STOP_S:.0f} s, so they end with the cluster")


def _stop_models(target: Target, seconds: int) -> None:
    try:
        connection = target.connect()
        if not status.snapshot(connection).serve["applications"]:
            return
    except UserError:
        return  # the cluster is not up, or its head is lost
    except Exception as error:  # it answers, but not as expected
        print(printable(f"what is served is unknown, and ends with the cluster: {type(error).__name__}: {error}"))
        return
    try:
        job_id = submission.submit(connection, "models", ["--end-all", "--drain", f"{seconds}"])
        submission.follow(connection, job_id)
    except Exception as error:  # of Ray's client, or of the network
        print(printable(f"running answers are cut off: {error}"))
