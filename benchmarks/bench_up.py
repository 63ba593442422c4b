"""`./inv bench-up`: compares the time of `ray up` inside `inv up` with that of plain `ray up`, in one emulated AWS."""

import statistics
import subprocess
import sys
import time

from raymill.aws import prepare, ray_up, teardown
from raymill.common import cluster_file
from raymill.common.cluster_file import FILE
from raymill.emulator import sandbox
from raymill.errors import UserError

ROUNDS = 3


def main() -> None:
    """Run the measurement inside an emulated AWS. Start one first, unless this process is already inside one."""
    if sandbox.is_inside():
        _measure()
        return
    try:
        sandbox.run_in_fresh_cloud("benchmarks.bench_up")
    except UserError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def _measure() -> None:
    """In each round, start a head with each command. The order alternates between rounds."""
    file = cluster_file.load()
    prepare.prepare(file)
    seconds: dict[str, list[float]] = {"ray up": [], "inv up": []}
    for number in range(ROUNDS):
        ways = [("ray up", _plain_ray_up), ("inv up", ray_up.up)]
        for name, start in ways if number % 2 == 0 else reversed(ways):
            started = time.monotonic()
            start()
            seconds[name].append(time.monotonic() - started)
            print(f"round {number + 1}, {name}: {seconds[name][-1]:.1f} s", flush=True)
            teardown.end_instances(file)
    ratio = statistics.median(ours / plain for plain, ours in zip(seconds["ray up"], seconds["inv up"], strict=True))
    print(
        f"`ray up` inside `inv up` takes {ratio:.2f} times as long as plain `ray up` "
        f"(median of {ROUNDS} rounds, target: at most 1.1)"
    )


def _plain_ray_up() -> None:
    command = [sys.executable, "-m", "ray.scripts.scripts", "up", "--yes", "--no-config-cache", str(FILE)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
