"""Faults in which a setup command fails, a package is missing, or versions do not match."""

import re
from pathlib import Path

from faults.capacity import GATHER
from faults.harness import Harness, changed_cluster_file, control, replaced_file, run_verb
from raymill.common.cluster_file import PINS
from raymill.emulator.waiting import wait_for
from raymill.instance_types import INSTANCE_TYPES

ONE_CPU = "import ray; ray.init(); print(ray.get(ray.remote(num_cpus=1)(lambda: 1).remote()))"


def setup_fails(harness: Harness) -> str:
    """A setup command fails on every new worker: `inv status` says so, and no worker starts after three failures."""
    harness.wait_until_no_workers()  # otherwise the job would run on a worker of the previous test
    head, pins = harness.head(), "~/project/requirements/cluster.txt"  # copied from the head to workers
    head.run(f"cp {pins} ~/good.txt && echo no-such-package==1 >> {pins}")
    job = harness.submit(ONE_CPU)
    try:
        wait_for(lambda: harness.report()["failed_setups"], 60, "status to report a failed setup")
        failure = harness.report()["failed_setups"][0]
        assert "no-such-package" in failure, failure
        wait_for(lambda: "no more are started" in str(_messages(harness)), 420, "the watchdog to stop the launches")
    finally:
        harness.connection.client().stop_job(job)
        head.run(f"cp ~/good.txt {pins}")
    return _messages(harness)[-1]


def machine_lacks_a_gpu(harness: Harness) -> str:
    """A machine has fewer GPUs than its type: `inv status` names it, and the job runs on another machine."""
    harness.wait_until_no_workers()
    gpus = INSTANCE_TYPES[harness.file.workers[-1].instance_type].gpus
    control(broken_machines=1)
    job = harness.submit(GATHER, "1")
    wait_for(lambda: harness.report()["failed_setups"], 120, "status to report a failed setup")
    failure = harness.report()["failed_setups"][0]
    assert f"it has {gpus - 1} of {gpus} GPUs" in failure, failure
    harness.wait_for_success(job)
    (machine,) = harness.workers()
    assert machine.id not in failure, failure
    return failure


def other_python_on_a_worker(harness: Harness) -> str:
    """Workers have a different version of Python than the head: Ray rejects them, and `inv status` says why."""
    version = "collections.namedtuple('Version', 'major minor micro releaselevel serial')(3, 11, 99, 'final', 0)"
    patch = f"import collections, sys; sys.version_info = {version}"
    site = "$(python -c 'import sysconfig; print(sysconfig.get_path(\"purelib\"))')"
    with changed_cluster_file(worker_setup_commands=[f'echo "{patch}" > {site}/sitecustomize.py']):
        harness.ensure_up()
        harness.submit(ONE_CPU)
        wait_for(lambda: "3.11.99" in str(harness.report()["failed_setups"]), 120, "status to say why")
        output = run_verb("status")
    return re.findall(r"the setup of a new worker failed: .*?3\.11\.99", output)[0]


def other_ray_on_the_laptop(harness: Harness) -> str:
    """The laptop has a different version of Ray than the cluster: the doctor rejects it, and nothing starts."""
    folder = Path("/tmp/other-ray/ray-2.0.0.dist-info")
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: ray\nVersion: 2.0.0\n")
    with changed_cluster_file(idle_timeout_minutes=6):
        output = run_verb("up", "--yes", exit_code=1, PYTHONPATH=str(folder.parent))
    assert "Ray: 2.0.0 here" in output, output
    assert "nothing was started" in output, output
    return re.findall(r"Ray: 2\.0\.0 here.*?doctor", output)[0]


def boto3_missing(harness: Harness) -> str:
    """The head lacks boto3, so its autoscaler cannot run: `ray up` succeeds, but `up` fails and says why."""
    without = "".join(line for line in PINS.read_text().splitlines(True) if not line.startswith("boto3"))
    with replaced_file(PINS, without):
        output = run_verb("up", "--yes", exit_code=1)
    assert "its autoscaler is not running" in output, output
    assert "boto3" in output, output
    assert "is up after" in run_verb("up", "--yes")
    return re.findall(r"the head is up but.*?boto3[^)]*\)", output)[0]


def _messages(harness: Harness) -> list[str]:
    return harness.report()["watchdog"]["messages"]
