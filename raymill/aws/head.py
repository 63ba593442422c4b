"""The status of a running head: whether all its parts are running, and which cluster file it was set up from."""

import json
import time
from collections.abc import Mapping
from typing import Any

from raymill.aws import ssh
from raymill.common import instances
from raymill.common.cluster_file import ClusterFile, target
from raymill.console import Console
from raymill.errors import UserError

READY_TIMEOUT_S = 120
START_TIMEOUT_S = 15
"""If there is no autoscaler process this many seconds after `ray up`, the autoscaler has failed to start."""


def tag(file: ClusterFile, tags: Mapping[str, str]) -> None:
    """Add these tags to the head, such as the digest of the cluster file that it was set up from."""
    head = instances.head(file)
    assert head
    pairs = [{"Key": key, "Value": value} for key, value in tags.items()]
    file.client("ec2").create_tags(Resources=[head.id], Tags=pairs)


def read_status(head: ssh.SshHead) -> dict[str, Any]:
    """Return what raymill/node/head_status.py prints."""
    return json.loads(head.run("cd ~/project && python -m raymill.node.head_status"))


def runs(head: ssh.SshHead) -> bool:
    """Return whether Ray, its autoscaler and the watchdog are running.

    Raises:
        UserError: ssh cannot connect.
    """
    head.run("true")
    try:
        return not _missing(read_status(head))
    except UserError:  # Ray is not running
        return False


def _missing(status: dict[str, Any]) -> str:
    """Return the name of a part of the head that is not running, or "" if all are running."""
    if not (status["autoscaler"] and status["reported"]):
        return "autoscaler"
    return "" if status["watchdog"]["runs"] else "watchdog"


def wait_until_ready(head: ssh.SshHead) -> None:
    """Wait until the autoscaler and the watchdog are running, because `ray up` succeeds even without them.

    Raises:
        UserError: one of them does not start. The message contains the last line of its log.
    """
    started = time.monotonic()
    with Console().status("waiting for the autoscaler") as spinner:
        while missing := _missing(current := read_status(head)):
            waited = time.monotonic() - started
            if waited > (READY_TIMEOUT_S if current["autoscaler"] else START_TIMEOUT_S):
                lines = current["log_tail"][missing].splitlines()[-1:] or ["no reason given"]
                raise UserError(
                    f"the head is up but its {missing} is not running ({lines[0]}). Correct cluster/cluster.yaml, then "
                    f"run: inv up --target {target()}   or end the cluster: inv down --target {target()}"
                )
            spinner.update(f"waiting for the {missing}: {waited:.0f} s")
            time.sleep(1)
