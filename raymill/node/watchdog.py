"""The watchdog, which runs on every node. cluster.yaml starts it.

On a worker, it drains the node before AWS takes it back, so that training can save a checkpoint. On the head, it stops
the autoscaler from retrying a node type that AWS refuses, so that the next type gets its turn, and it terminates the
cluster at the limits in settings.toml.

On both, it renews the machine's lease. The UserData in cluster.yaml shuts a machine down ten minutes after the last
renewal, and a shutdown terminates the instance. So an instance is also terminated if its watchdog dies or the head is
gone.
"""

import logging
import os
import sys
import time

from raymill.node import process
from raymill.node.state import INTERVAL_S


def watch(role: str) -> None:
    """Run the watchdog. `role` is this node's role: "head" or "worker". Never returns."""
    if role == "head":
        from raymill.node import watchdog_head  # imports boto3, which a worker's watchdog does not need

        watchdog_head.watch()
    else:
        from raymill.node import watchdog_worker

        watchdog_worker.watch(os.environ["RAY_HEAD_IP"])


if __name__ == "__main__":
    process.write_log()
    process.take_over("watchdog")
    while True:
        try:
            watch(sys.argv[1])
        except Exception:  # for example, if AWS does not answer; without a watchdog, this machine would shut down
            logging.exception("the watchdog starts again")
            time.sleep(INTERVAL_S)
