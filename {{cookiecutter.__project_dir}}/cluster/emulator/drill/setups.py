"""Rows of the drill: machines that cannot be set up, and versions that do not fit together."""

import re
from pathlib import Path

from cluster.common.cluster_file import PINS
from cluster.emulator.drill.stage import Stage, changed_cluster_file, covered, verb, wait_for

ONE_CPU = "import ray; ray.init(); print(ray.get(ray.remote(num_cpus=1)(lambda: 1).remote()))"


def setup_fails(stage: Stage) -> str:
    """A set-up command fails on every new worker: said within a minute, and no more start after three."""
    head, pins = stage.head(), "~/project/requirements/cluster.txt"  # workers get the head's copy
    head.run(f"cp {pins} ~/good.txt && echo no-such-package==1 >> {pins}")
    job = stage.submit(ONE_CPU)
    try:
        wait_for(lambda: stage.report()["failed_setups"], 60, "status to say that a set-up failed")
        said = stage.report()["failed_setups"][0]
        assert "no-such-package" in said, said
        wait_for(
            lambda: "no more are started" in str(stage.report()["watchdog"]["messages"]), 420, "the watchdog to stop it"
        )
    finally:
        stage.connection.client().stop_job(job)
        head.run(f"cp ~/good.txt {pins}")
    return stage.report()["watchdog"]["messages"][-1]


def other_python_on_a_worker(stage: Stage) -> str:
    """Workers whose Python is not the head's: Ray refuses them, and `inv status` has its words."""
    version = "collections.namedtuple('Version', 'major minor micro releaselevel serial')(3, 11, 99, 'final', 0)"
    lie = f"import collections, sys; sys.version_info = {version}"
    site = "$(python -c 'import sysconfig; print(sysconfig.get_path(\"purelib\"))')"
    with changed_cluster_file(worker_setup_commands=[f'echo "{lie}" > {site}/sitecustomize.py']):
        stage.set_up()
        stage.submit(ONE_CPU)
        wait_for(lambda: "3.11.99" in str(stage.report()["failed_setups"]), 120, "status to say why")
        said = verb("status")
    return re.findall(r"the set-up of a new worker failed: .*?3\.11\.99", said)[0]


def other_ray_here(stage: Stage) -> str:
    """A laptop with another Ray than the cluster's: the doctor refuses, and nothing is started."""
    folder = Path("/tmp/other-ray/ray-2.0.0.dist-info")
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: ray\nVersion: 2.0.0\n")
    with changed_cluster_file(idle_timeout_minutes=6):
        said = verb("up", "--yes", expect=1, PYTHONPATH=str(folder.parent))
    assert "Ray: 2.0.0 here" in said, said
    assert "nothing was started" in said, said
    return re.findall(r"Ray: 2\.0\.0 here.*?doctor", said)[0]


def boto3_missing(stage: Stage) -> str:
    """A head without boto3, on which no autoscaler can run: `up` fails and says why, where `ray up` ends well."""
    without = "".join(line for line in PINS.read_text().splitlines(True) if not line.startswith("boto3"))
    with covered(PINS, without):
        said = verb("up", "--yes", expect=1)
    assert "its autoscaler does not run" in said, said
    assert "boto3" in said, said
    again = verb("up", "--yes")
    assert "is up after" in again, again
    return re.findall(r"the head is up but.*?boto3[^)]*\)", said)[0]
