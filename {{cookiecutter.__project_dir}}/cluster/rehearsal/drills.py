"""`inv drill`: faults, one after the other, in the emulated cloud, and whether the cluster answers each as it should.

One cluster serves all rows. Two clocks are turned while it runs, as nobody wants to wait for them: the idle timeout of
workers, and the age of the leases of machines whose head is lost.
"""

import json
import re
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

import settings
from cluster import cluster_file, machines, steward, submission
from cluster.aws import Aws, report
from cluster.cluster_file import ClusterFile
from cluster.rehearsal import play
from cluster.target import Connection

CONSOLE = Console(highlight=False)
GATHER = (
    "import ray; from jobs import gang; ray.init(); "
    "print('gathered', gang.gather(2, {'CPU': 60, 'GPU': 1}, 60, gang.offers()))"
)


@dataclass
class Row:
    """One fault and what came of it."""

    fault: str
    expected: str
    seconds: float = 0.0
    evidence: str = ""
    problem: str = ""


@dataclass(frozen=True)
class Stage:
    """What a drill works with."""

    file: ClusterFile
    connection: Connection


def run(only: str) -> None:
    """The rows whose fault contains a part of `only`, which commas separate.

    Raises:
        settings.Refusal: a row did not go as expected, or something is left at the end.
    """
    target = Aws("rehearsal")
    target.prepare()
    play.upload_assets(cluster_file.load())
    target.up(yes=True)
    play.shorten_idle_timeout(cluster_file.load())
    stage = Stage(cluster_file.load(), target.connect())
    rows = [_run_row(stage, *row) for row in ROWS if any(part in row[0] for part in only.split(","))]
    left = target.down()
    _show(rows)
    if wrong := [row.fault for row in rows if row.problem]:
        raise settings.Refusal(f"not as expected: {'; '.join(wrong)}")
    if left:
        raise settings.Refusal(f"still there after down: {', '.join(left)}")


def _run_row(stage: Stage, fault: str, expected: str, body: Callable[[Stage], str]) -> Row:
    row, started = Row(fault, expected), time.monotonic()
    CONSOLE.print(f"\n[bold]{fault}[/]: {expected}")
    try:
        row.evidence = body(stage)
    except (AssertionError, settings.Refusal) as error:
        row.problem = str(error) or repr(error)
    finally:
        _tell(faults={"no_capacity": []})
    row.seconds = time.monotonic() - started
    CONSOLE.print(f"[dim]{row.seconds:.0f} s[/] {row.evidence or row.problem}")
    return row


# ---------------------------------------------------------------- the rows


def first_zone_refuses(stage: Stage) -> str:
    """No spot machine in the first zone: the gang comes together in the second."""
    with _no_capacity({"market": "spot", "zone": f"{stage.file.region}a"}):
        log = _gather(stage)
    assert "zone 1, spot: AWS refuses machines" in log, log
    assert "gathered {'zone': '2'}" in log, log
    return _seen(log)


def all_spot_refuses(stage: Stage) -> str:
    """No spot machine anywhere: the gang takes machines on demand."""
    with _no_capacity({"market": "spot"}):
        log = _gather(stage)
        markets = {machine.market for machine in machines.living(stage.file) if machine.node_type.startswith("a100")}
    assert "gathered {'zone': '1'}" in log, log
    assert markets == {"on-demand"}, markets
    return _seen(log)


def everything_refuses(stage: Stage) -> str:
    """No machine at all: the job waits and says so, and goes on once there are some."""
    a100 = stage.file.workers[-1].instance_type
    with _no_capacity({"type": a100}):
        job = _submit_gather(stage)
        _wait_for(lambda: "no zone and market has 2 machines" in _log(stage, job), 240, "the job to say that it waits")
    log = _ended(stage, job)
    assert "gathered" in log, log
    return _seen(log)


def setup_fails(stage: Stage) -> str:
    """A set-up command fails on every new worker: said within a minute, and no more start after three."""
    head = machines.reach(stage.file)
    pins = "~/project/requirements/cluster.txt"  # workers get the head's copy
    head.run(f"cp {pins} ~/good.txt && echo no-such-package==1 >> {pins}")
    job = _submit_gather(stage, cpus=True)
    try:
        _wait_for(lambda: report(head)["failed_setups"], 60, "status to say that a set-up failed")
        said = report(head)["failed_setups"][0]
        assert "no-such-package" in said, said
        _wait_for(lambda: "no more are started" in str(report(head)["steward"]["said"]), 420, "the steward to stop it")
    finally:
        stage.connection.client().stop_job(job)
        head.run(f"cp ~/good.txt {pins}")
    return report(head)["steward"]["said"][-1]


def spot_interruption(stage: Stage) -> str:
    """AWS takes a machine back in mid-training: the training goes on with a replacement, to the same losses."""
    calm = _train(stage, "calm")
    job = submission.submit(stage.connection, "finetune_ddp", _training("disturbed"))
    _wait_for(lambda: "step 10/" in _log(stage, job), 240, "the training to reach step 10")
    victim = next(machine for machine in machines.living(stage.file) if machine.market == "spot")
    _tell(take_back=victim.id, notice_s=15)
    log = _ended(stage, job, 300)
    last = [re.findall(r"step 30/30  loss ([\d.]+)", one) for one in (calm, log)]
    assert last[0], calm
    assert last[0] == last[1], f"losses differ: {last}"
    return f"{victim.id} was taken back; loss at step 30 with and without: {last[0][0]}"


def head_lost(stage: Stage) -> str:
    """The head is gone for good: the worker that a job brought ends itself."""
    _ended(stage, _submit_gather(stage, cpus=True))
    head = machines.head(stage.file)
    workers = [machine for machine in machines.living(stage.file) if machine.node_type != stage.file.head.name]
    assert head
    assert workers
    stage.file.client("ec2").terminate_instances(InstanceIds=[head.id])
    _wait_for(lambda: not _has_host(head.id), 30, "the head to be gone")
    time.sleep(steward.EVERY_S)  # a steward that saw the head just before may renew its lease once more
    _tell(age_leases_s=570)
    _wait_for(lambda: not machines.living(stage.file), 120, "the workers to end themselves")
    return f"ended themselves: {len(workers)}; a lease lasts 600 s, of which 570 were skipped"


ROWS: list[tuple[str, str, Callable[[Stage], str]]] = [
    ("no spot capacity in the first zone", "the next zone", first_zone_refuses),
    ("no spot capacity anywhere", "on demand", all_spot_refuses),
    ("no capacity at all", "waits, says so, recovers", everything_refuses),
    ("spot interruption in mid-training", "resumes on a replacement, with the same losses", spot_interruption),
    ("a set-up command fails", "said within a minute, stopped after three", setup_fails),
    ("head lost for good", "workers end themselves", head_lost),
]


# ---------------------------------------------------------------- what the rows are made of


@contextmanager
def _no_capacity(entry: dict[str, str]) -> Iterator[None]:
    _tell(faults={"no_capacity": [entry]})
    try:
        yield
    finally:
        _tell(faults={"no_capacity": []})


def _tell(**what: Any) -> None:
    request = urllib.request.Request(play.CONTROL, data=json.dumps(what).encode(), method="PUT")
    urllib.request.urlopen(request).close()


def _has_host(instance_id: str) -> bool:
    return any(one["id"] == instance_id and one["host"] for one in play.state()["instances"])


def _gather(stage: Stage) -> str:
    """Bring two A100 machines together, from none; returns the job's log."""
    _wait_for(lambda: len(machines.living(stage.file)) == 1, 120, "workers of the row before to leave")
    return _ended(stage, _submit_gather(stage))


def _submit_gather(stage: Stage, *, cpus: bool = False) -> str:
    code = "import ray; ray.init(); print(ray.get(ray.remote(num_cpus=1)(lambda: 1).remote()))" if cpus else GATHER
    environment = {"working_dir": str(settings.PROJECT), "excludes": submission.EXCLUDES}
    environment |= {"env_vars": stage.connection.job_variables}
    return stage.connection.client().submit_job(entrypoint=f'python -c "{code}"', runtime_env=environment)


def _training(name: str) -> list[str]:
    changed = [*play.TRAINING, "--steps", "30", "--log-every", "10", "--checkpoint-every", "5"]
    return [*changed, "--name", name]


def _train(stage: Stage, name: str) -> str:
    return _ended(stage, submission.submit(stage.connection, "finetune_ddp", _training(name)), 300)


def _ended(stage: Stage, job: str, patience_s: float = 240) -> str:
    """The log of a job that has ended well."""
    client = stage.connection.client()
    _wait_for(lambda: client.get_job_status(job).is_terminal(), patience_s, f"{job} to end")
    assert client.get_job_status(job) == "SUCCEEDED", _log(stage, job)[-2000:]
    return _log(stage, job)


def _log(stage: Stage, job: str) -> str:
    return stage.connection.client().get_job_logs(job)


def _wait_for(condition: Callable[[], Any], patience_s: float, what: str) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {patience_s:.0f} s for {what}"
        time.sleep(1)


def _seen(log: str) -> str:
    """The first and the last line in which the gang says what it met, and how many there are between."""
    first, *between, last = [line for line in log.splitlines() if line.startswith(("zone ", "no zone", "gathered"))]
    return f"{first} … {len(between)} more … {last}" if between else f"{first} … {last}"


def _show(rows: list[Row]) -> None:
    table = Table(title="Drill", title_justify="left", title_style="bold", box=None, pad_edge=False)
    for column in ("", "fault", "expected", "took", "evidence"):
        table.add_column(column, header_style="dim", overflow="fold")
    for row in rows:
        mark = "[bold red]✗[/]" if row.problem else "[green]✓[/]"
        table.add_row(mark, row.fault, row.expected, f"{row.seconds:.0f} s", row.evidence or row.problem)
    CONSOLE.print("\n", table)


if __name__ == "__main__":
    try:
        run(sys.argv[1])
    except settings.Refusal as refusal:
        sys.exit(f"error: {refusal}")
