"""Stop the served models before `inv down` ends the cluster."""

import settings
from cluster import status, submission
from cluster.target import Target
from pipeline.printable import printable

INTERRUPTED = 130
"""Exit code of `submission.follow` after Ctrl-C."""


def before_down(target: Target, seconds: int) -> None:
    """Say how many answers run, wait up to `seconds` for them, and cut off the others.

    Return at once if nothing is served, or if the cluster does not answer.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed meanwhile.
    """
    try:
        connection = target.connect()
        if not status.snapshot(connection).serve["applications"]:
            return
    except settings.UserError:
        return  # the cluster is not up, or its head is lost
    try:
        job_id = submission.submit(connection, "models", ["--end-all", "--drain", f"{seconds}"])
        if submission.follow(connection, job_id) == INTERRUPTED:
            raise KeyboardInterrupt
    except settings.UserError as error:
        print(printable(f"running answers are cut off: {error}"))
