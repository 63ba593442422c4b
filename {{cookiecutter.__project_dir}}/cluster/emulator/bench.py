"""`inv bench-up`: how long `ray up` takes within `inv up`, against `ray up` typed by hand, in turns, in one cloud."""

import statistics
import subprocess
import sys
import time

from cluster.aws import prepare, ray_up, teardown
from cluster.common import cluster_file
from cluster.common.cluster_file import FILE

ROUNDS = 3


def run() -> None:
    """Each round starts a head in both ways, the first of them in turn."""
    file = cluster_file.load()
    prepare.prepare(file)
    times: dict[str, list[float]] = {"ray up": [], "inv up": []}
    for number in range(ROUNDS):
        ways = [("ray up", _by_hand), ("inv up", ray_up.up)]
        for name, way in ways if number % 2 == 0 else reversed(ways):
            started = time.monotonic()
            way()
            times[name].append(time.monotonic() - started)
            print(f"round {number + 1}, {name}: {times[name][-1]:.1f} s", flush=True)
            teardown.end_instances(file)
    ratio = statistics.median(ours / bare for bare, ours in zip(times["ray up"], times["inv up"], strict=True))
    print(f"launcher time inside inv up: {ratio:.2f} of bare ray up (median of {ROUNDS} rounds; at most 1.1 is wanted)")


def _by_hand() -> None:
    command = [sys.executable, "-m", "ray.scripts.scripts", "up", "--yes", "--no-config-cache", str(FILE)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    run()
