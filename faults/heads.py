"""Faults in which the head dies, or the cluster reaches a limit."""

import datetime
import json
import re
import time
from typing import Any

from faults.harness import Harness, control, replaced_file, run_verb
from faults.setup import ONE_CPU
from raymill import settings
from raymill.aws import guard
from raymill.common import instances, limits
from raymill.emulator import scenario
from raymill.emulator.waiting import slowdown, wait_for
from raymill.errors import UserError
from raymill.job_client import Unreachable
from raymill.node import log_shipping
from raymill.node.state import INTERVAL_S, LAUNCHED

MAX_REPAIR_S = 180
FIRST_LEASE_S = 1800  # see UserData in cluster.yaml
BUSY_JOB = (
    "import ray, time; ray.init(); work = lambda: (print('at work', flush=True), time.sleep(600)); "
    "ray.get(ray.remote(num_cpus=1)(work).remote())"
)


SERVED_PORT = 8000
SERVE = (
    "from ray import serve; "
    f"serve.start(proxy_location='HeadOnly', http_options={{'host': '127.0.0.1', 'port': {SERVED_PORT}}}); "
    "echo = type('Echo', (), {'__call__': lambda self, request: 'ok'}); "
    "serve.run(serve.deployment(ray_actor_options={'num_cpus': 0})(echo).bind())"
)


def ray_on_the_head_killed(harness: Harness) -> str:
    """Ray's GCS dies while a job runs: `up` repairs the same head, and no worker is orphaned."""
    _busy_workers(harness)
    before = instances.head(harness.file)
    harness.head().run("pkill -KILL gcs_server")
    output = run_verb("status", exit_code=(1, Unreachable.exit_code))  # Ray's dashboard may outlive the GCS for a while
    assert "inv up" in output, output
    started = time.monotonic()
    output = run_verb("up", "--yes")
    took = time.monotonic() - started
    assert "is not running on the head" in output, output
    after = instances.head(harness.file)
    assert before
    assert after
    assert before.id == after.id, f"{before.id} was replaced by {after.id}"
    assert took < MAX_REPAIR_S * slowdown(), f"the repair took {took:.0f} s"
    harness.ensure_up()
    harness.wait_for_success(harness.submit(ONE_CPU))
    _check_no_orphans(harness)
    return f"`up` repaired {before.id} in {took:.0f} s"


def head_killed(harness: Harness) -> str:
    """The head is terminated during training: `up` starts a new head, and the job resumes when submitted again."""
    job = harness.train("head-killed")
    harness.wait_for_step(job, 15)
    before = instances.head(harness.file)
    assert before
    harness.file.client("ec2").terminate_instances(InstanceIds=[before.id])
    wait_for(lambda: not _has_host(before.id), 30, "the head to end")
    started = time.monotonic()
    output = run_verb("up", "--yes")
    took = time.monotonic() - started
    assert took < MAX_REPAIR_S * slowdown(), f"the repair took {took:.0f} s"
    assert "take over 2 instances that have no head" in output, output
    harness.ensure_up()
    log = harness.wait_for_success(harness.train("head-killed"), 300)
    resumed = re.findall(r"resum\w+ .*?step (\d+)", log)
    assert resumed, log
    assert int(resumed[0]) >= 10, log
    _check_no_orphans(harness)
    return f"`up` took {took:.0f} s; submitted again, the job resumed at step {resumed[0]} and succeeded"


def time_limit(harness: Harness) -> str:
    """The cluster reaches a time limit that `inv limits` has raised: it terminates itself, including all workers."""
    _busy_workers(harness)
    first = limits.load().hours
    limit = first + 1
    with replaced_file(settings.FILE, settings.FILE.read_text()):  # because the verb writes to it
        output = run_verb("limits", "--hours", f"{limit:g}", "--yes")
    assert f"the limits are now {limit:g} hours" in output, output
    harness.head().run(f"sudo touch --date='{first:g} hours ago' {LAUNCHED}")  # as if the cluster had started then
    time.sleep(2 * log_shipping.INTERVAL_S)  # until the job's log is in the bucket
    assert harness.workers(), "the cluster has ended at the first limit"
    assert f"{first:.1f}" in run_verb("limits")
    harness.head().run(f"sudo touch --date='{limit:g} hours ago' {LAUNCHED}")
    summary, output = _status_after_the_end(harness)
    assert f"the limit of {limit:g} hours" in output, output
    log = run_verb("logs", exit_code=1)  # the job did not succeed
    assert "at work" in log, log
    return f"{summary}, status says why, and logs shows the job's log; {limit:g} hours were skipped"


def spend_limit(harness: Harness) -> str:
    """The cluster reaches the spend limit in settings.toml: it terminates itself, including all workers."""
    _busy_workers(harness)
    limit = limits.load().dollars
    _restart_watchdog(harness, limit - 0.0001)
    summary, output = _status_after_the_end(harness)
    assert f"the limit of {limit:g} dollars" in output, output
    return f"{summary}, and status says why; its recorded costs were set to almost {limit:g} dollars"


def prices_unknown(harness: Harness) -> str:
    """AWS names no price: `inv status` says so, and the spend limit ends the cluster with a note that says so."""
    _busy_workers(harness)  # first, because the laptop asks for prices when it submits a job
    control(faults={"prices": "AccessDenied"})
    _restart_watchdog(harness, 0)
    wait_for(lambda: _watchdog(harness).get("price_warning"), 60, "the watchdog to ask for prices")
    output = run_verb("status")
    assert "does not name the price of" in output, output
    limit = limits.load().dollars
    _restart_watchdog(harness, limit - 0.0001)
    summary, output = _status_after_the_end(harness)
    assert f"the limit of {limit:g} dollars" in output, output
    assert "dollars are assumed, because AWS did not name the price" in output, output
    return f"{summary}, and status says that the price was assumed"


def full_disk(harness: Harness) -> str:
    """The head's disk is full: `inv status` says so, and at a limit, the cluster terminates itself with a note."""
    _busy_workers(harness)
    head, limit = instances.head(harness.file), limits.load().hours
    assert head
    control(fill_disk=head.id)
    time.sleep(6 * INTERVAL_S)  # a watchdog that cannot write would have ended
    output = run_verb("status")
    assert "GB free on the disk with" in output, output
    assert "the watchdog is not running" not in output, output
    harness.head().run(f"sudo touch --date='{limit:g} hours ago' {LAUNCHED}")
    summary, output = _status_after_the_end(harness)
    assert f"the limit of {limit:g} hours" in output, output
    assert "GB free on the disk with" in output, output
    return f"{summary}, and status says why; {limit:g} hours were skipped"


def nobody_uses_the_cluster(harness: Harness) -> str:
    """A request keeps the cluster; without jobs and requests, it warns, and then it terminates itself."""
    harness.wait_until_no_workers()
    harness.wait_for_success(harness.submit(SERVE))
    harness.head().run(f"curl --fail --silent --data x http://127.0.0.1:{SERVED_PORT}/")
    wait_for(lambda: _watchdog(harness)["requests"] == 1, 150, "the watchdog to count the request")
    with replaced_file(settings.FILE, settings.FILE.read_text()):  # because the verb writes to it
        run_verb("limits", "--idle-hours", "0.05")
    wait_for(lambda: "no job and no request" in run_verb("status"), 240, "status to warn")
    summary = _wait_until_terminated(harness, 240)
    output = run_verb("status", exit_code=1)
    assert "no job and no request for 0.05 hours" in output, output
    return f"{summary} of idle time, although an application was served; before, one request counted as use"


def no_watchdog_works(harness: Harness) -> str:
    """The watchdogs are dead when the limit in hours is over: the guard outside the cluster ends all machines."""
    workers, head = _busy_workers(harness), instances.head(harness.file)
    assert head
    schedule = harness.file.client("scheduler").get_schedule(Name=f"{harness.file.slug}-guard")
    after = (schedule["StartDate"] - head.launched).total_seconds() / 3600
    assert abs(after - limits.load().hours - 0.25) < 0.1, f"the guard comes {after:.2f} hours after the launch"
    harness.head().run("kill $(cat ~/watchdog.pid)")
    limit = limits.load().hours
    guard.move(harness.file, head.launched - datetime.timedelta(hours=limit + 1), limit)  # as if that were the launch
    return f"{_wait_until_terminated(harness)}, {len(workers)} of them workers; {limit:g} hours were skipped"


def _restart_watchdog(harness: Harness, dollars: float) -> None:
    """Restart the watchdog, as if the cluster had cost this much. It forgets the prices that it knows."""
    spent = json.dumps({"at": time.time(), "dollars": dollars, "messages": []})
    restart = harness.file.content["head_start_ray_commands"][-1]
    start = f"exec > /dev/null 2>&1; {restart}"  # otherwise ssh would wait for the watchdog's end
    harness.head().run(f"kill $(cat ~/watchdog.pid); sleep 1; echo '{spent}' > ~/watchdog.json; {start}")


def _watchdog(harness: Harness) -> dict[str, Any]:
    return harness.report()["watchdog"]


def head_lost(harness: Harness) -> str:
    """The head is gone for good: the workers terminate themselves."""
    workers, head = _busy_workers(harness), instances.head(harness.file)
    assert head
    harness.file.client("ec2").terminate_instances(InstanceIds=[head.id])
    wait_for(lambda: not _has_host(head.id), 30, "the head to end")
    time.sleep(INTERVAL_S)  # a watchdog may still renew its lease if it saw the head just before the end
    control(age_leases_s=570)
    wait_for(lambda: not instances.living(harness.file), 120, "the workers to terminate themselves")
    return f"{len(workers)} workers terminated themselves; 570 s of their 600 s lease were skipped"


def head_reboots(harness: Harness) -> str:
    """The head reboots, so that nothing renews its lease: the head terminates itself."""
    harness.wait_until_no_workers()
    head = instances.head(harness.file)
    assert head
    control(reboot=head.id)
    wait_for(lambda: _answers(harness), 60, "the head to boot")
    output = run_verb("status", exit_code=(1, Unreachable.exit_code))
    assert "inv up" in output, output
    control(age_leases_s=FIRST_LEASE_S)
    return _wait_until_terminated(harness)


def _answers(harness: Harness) -> bool:
    try:
        return "up" in harness.head().run("uptime")
    except UserError:
        return False


def _busy_workers(harness: Harness) -> list[instances.Instance]:
    """Start a job that keeps one worker busy for the rest of the test, and return all workers."""
    job = harness.submit(BUSY_JOB)
    wait_for(lambda: "at work" in harness.log(job), 240, "a worker to run the job")
    return harness.workers()


def _wait_until_terminated(harness: Harness, timeout_s: float = 60) -> str:
    count = len(instances.living(harness.file))
    took = wait_for(lambda: not instances.living(harness.file), timeout_s, "the cluster to terminate itself")
    return f"{count} machines terminated themselves after {took:.0f} s"


def _status_after_the_end(harness: Harness) -> tuple[str, str]:
    """Wait until the cluster has terminated itself. Return a summary, and what `inv status` then prints."""
    summary = _wait_until_terminated(harness)
    return summary, run_verb("status", exit_code=1)


def _check_no_orphans(harness: Harness) -> None:
    """Wait until all workers have ended. An orphaned worker would keep running."""
    idle_s = 60 * scenario.SHORT_IDLE_MINUTES + 60
    wait_for(lambda: len(instances.living(harness.file)) == 1, idle_s, "every idle worker to end")


def _has_host(instance_id: str) -> bool:
    return any(one["id"] == instance_id and one["host"] for one in scenario.cloud_state()["instances"])
