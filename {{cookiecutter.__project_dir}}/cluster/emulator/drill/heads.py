"""Rows of the drill: a head that dies, and a cluster that has reached a limit."""

import json
import re
import time

import settings
from cluster.common import instances
from cluster.emulator import scenario
from cluster.emulator.drill.setups import ONE_CPU
from cluster.emulator.drill.stage import Stage, slowness, tell, verb, wait_for
from cluster.node import watchdog_head
from cluster.node.state import INTERVAL_S, LEASE

REPAIRED_WITHIN_S = 180
AT_WORK = (
    "import ray, time; ray.init(); work = lambda: (print('at work', flush=True), time.sleep(600)); "
    "ray.get(ray.remote(num_cpus=1)(work).remote())"
)


def ray_on_the_head_killed(stage: Stage) -> str:
    """Ray's control store dies under a job: `up` repairs the same head, and no worker is orphaned."""
    _worker_at_work(stage)
    before = instances.head(stage.file)
    stage.head().run("pkill -KILL gcs_server")
    shown = verb("status", expect=1)
    assert "inv up" in shown, shown
    started = time.monotonic()
    said = verb("up", "--yes")
    took = time.monotonic() - started
    assert "does not run on the head" in said, said
    after = instances.head(stage.file)
    assert before
    assert after
    assert before.id == after.id, f"{before.id} was replaced by {after.id}"
    assert took < REPAIRED_WITHIN_S * slowness(), f"the repair took {took:.0f} s"
    stage.set_up()
    stage.ended(stage.submit(ONE_CPU))
    _no_orphans(stage)
    return f"`up` took {took:.0f} s; {before.id} works again"


def head_killed(stage: Stage) -> str:
    """The head's machine ends in mid-training: `up` starts another, and the same job goes on from S3."""
    job = stage.train("beheaded")
    wait_for(lambda: "step 15/" in stage.log(job), 300, "the training to reach step 15")
    before = instances.head(stage.file)
    assert before
    stage.file.client("ec2").terminate_instances(InstanceIds=[before.id])
    wait_for(lambda: not _has_host(before.id), 30, "the head to be gone")
    started = time.monotonic()
    said = verb("up", "--yes")
    took = time.monotonic() - started
    assert took < REPAIRED_WITHIN_S * slowness(), f"the repair took {took:.0f} s"
    assert "take over 2 instances that have no head" in said, said
    stage.set_up()
    log = stage.ended(stage.train("beheaded"), 300)
    resumed = re.findall(r"resum\w+ .*?step (\d+)", log)
    assert resumed, log
    assert int(resumed[0]) >= 10, log
    _no_orphans(stage)
    return f"`up` took {took:.0f} s; the same job resumed at step {resumed[0]} and ended"


def time_limit(stage: Stage) -> str:
    """The hours of settings.toml are over: the cluster ends itself, workers too."""
    _worker_at_work(stage)
    limit = _limits().hours
    stage.head().run(f"touch --date='{limit:g} hours ago' {LEASE.parent}")  # as if it had been launched then
    told = _ends_itself(stage)
    shown = verb("status", expect=1)
    assert f"the limit of {limit:g} hours" in shown, shown
    return f"{told}, and status said why; {limit:g} hours were skipped"


def spend_limit(stage: Stage) -> str:
    """The dollars of settings.toml are spent: the cluster ends itself, workers too."""
    _worker_at_work(stage)
    limit = _limits().dollars
    spent = json.dumps({"at": time.time(), "dollars": limit - 0.0001, "messages": []})
    restart = stage.file.content["head_start_ray_commands"][-1]
    stage.head().run(f"kill $(cat ~/watchdog.pid); sleep 1; echo '{spent}' > ~/watchdog.json; {restart}")
    told = _ends_itself(stage)
    shown = verb("status", expect=1)
    assert f"the limit of {limit:g} dollars" in shown, shown
    return f"{told}, and status said why; its books were given {limit:g} dollars"


def head_lost(stage: Stage) -> str:
    """The head is gone for good: the worker that a job brought ends itself."""
    workers, head = _worker_at_work(stage), instances.head(stage.file)
    assert head
    stage.file.client("ec2").terminate_instances(InstanceIds=[head.id])
    wait_for(lambda: not _has_host(head.id), 30, "the head to be gone")
    time.sleep(INTERVAL_S)  # a watchdog that saw the head just before may renew its lease once more
    tell(age_leases_s=570)
    wait_for(lambda: not instances.living(stage.file), 120, "the workers to end themselves")
    return f"ended themselves: {len(workers)}; a lease lasts 600 s, of which 570 were skipped"


def _worker_at_work(stage: Stage) -> list[instances.Instance]:
    """Workers, of which one has work for the rest of the row."""
    job = stage.submit(AT_WORK)
    wait_for(lambda: "at work" in stage.log(job), 240, "a worker to be at work")
    return stage.workers()


def _limits() -> watchdog_head.LimitsSection:
    return settings.load(watchdog_head.LimitsSection, "limits", profile="cluster")


def _ends_itself(stage: Stage) -> str:
    count = len(instances.living(stage.file))
    took = wait_for(lambda: not instances.living(stage.file), 60, "the cluster to end itself")
    return f"{count} machines ended themselves after {took:.0f} s"


def _no_orphans(stage: Stage) -> None:
    """Every machine that lives belongs to the cluster, or is leaving it."""
    idle_s = 60 * scenario.IDLE_TIMEOUT_MINUTES + 60
    wait_for(lambda: len(instances.living(stage.file)) == 1, idle_s, "every worker to leave once it idles")


def _has_host(instance_id: str) -> bool:
    return any(one["id"] == instance_id and one["host"] for one in scenario.state()["instances"])
