"""Rows of the drill: machines that AWS does not have, takes back, or gives by the half."""

import re

from cluster.common import instances
from cluster.emulator.drill.stage import Stage, changed_cluster_file, last_loss, no_capacity, tell, wait_for

# 900 s: zones are given up only because AWS refuses, not because a slow machine starts its hosts late
GATHER = (
    "import ray, sys; from jobs import gang; ray.init(); "
    "print('gathered', gang.gather(int(sys.argv[1]), {'CPU': 60, 'GPU': 1}, 900, gang.offers()))"
)
MANY = 8


def first_zone_refuses(stage: Stage) -> str:
    """No spot machine in the first zone: the gang comes together in the second."""
    stage.wait_until_alone()
    with no_capacity({"market": "spot", "zone": f"{stage.file.region}a"}):
        log = _gather(stage)
    assert "zone 1, spot: AWS refuses machines" in log, log
    assert "gathered {'zone': '2'}" in log, log
    return _seen(log)


def all_spot_refuses(stage: Stage) -> str:
    """No spot machine anywhere: the gang takes machines on demand."""
    stage.wait_until_alone()
    with no_capacity({"market": "spot"}):
        log = _gather(stage)
        markets = {machine.market for machine in stage.workers()}
    assert "gathered {'zone': '1'}" in log, log
    assert markets == {"on-demand"}, markets
    return _seen(log)


def half_a_gang(stage: Stage) -> str:
    """One machine where two are asked for: it is given back, and the gang comes together in another zone."""
    stage.wait_until_alone()
    none = {"market": "spot", "zone": f"{stage.file.region}a"}  # closed by the watchdog, where a row before found none
    one = {"market": "spot", "zone": f"{stage.file.region}b", "left": 1}
    with no_capacity(none, one):
        job = stage.submit(GATHER, "2")
        wait_for(stage.workers, 90, "half of the gang to come")
        (half,) = stage.workers()
        log = stage.ended(job)
    assert "zone 2, spot: AWS refuses machines, 1 given back" in log, log
    assert half.id not in [one.id for one in stage.workers()], f"{half.id} is still there"
    return f"{half.id} was alone in {half.zone} and was given back; {_seen(log)}"


def everything_refuses(stage: Stage) -> str:
    """No machine at all: the job waits and says so, and goes on once there are some."""
    stage.wait_until_alone()
    with no_capacity({"type": stage.file.workers[-1].instance_type}):
        job = stage.submit(GATHER, "2")
        wait_for(lambda: "no zone and market has 2 machines" in stage.log(job), 240, "the job to say that it waits")
    log = stage.ended(job)
    assert "gathered" in log, log
    return _seen(log)


def spot_interruption(stage: Stage) -> str:
    """AWS takes a machine back in mid-training: it goes on from a checkpoint made at the notice, on a replacement."""
    calm = stage.undisturbed_loss
    job = stage.train("disturbed", "--checkpoint-every", "100")
    taken = _take_one_back(stage, job)
    log = stage.ended(job, 300)
    assert last_loss(log) == calm, f"losses differ: {last_loss(log)} and {calm}"
    (saved,) = re.findall(r"about to be taken away: a checkpoint of step (\d+)", log)
    assert f"resumed after step {saved}" in log, log
    return f"{taken} was taken back, a checkpoint of step {saved} made before; loss at step 30 with and without: {calm}"


def interruption_without_replacement(stage: Stage) -> str:
    """AWS takes a machine back and has no other: a training of one worker or two goes on with one."""
    calm = stage.undisturbed_loss
    job = stage.train("elastic", "--num-workers", "1", "2")
    wait_for(lambda: "on 2 x" in stage.log(job), 240, "the training to start")
    with no_capacity({"type": stage.file.workers[-1].instance_type}):
        taken = _take_one_back(stage, job)
        log = stage.ended(job, 600)  # Ray waits a minute for two workers before it takes one
    assert "on 1 x" in log, log
    assert abs(last_loss(log) - calm) < 1.5e-4, f"losses differ: {last_loss(log)} and {calm}"
    return f"{taken} was taken back, the other worker went on; loss {last_loss(log)}, undisturbed {calm}"


def _take_one_back(stage: Stage, job: str) -> str:
    """Interrupt a spot machine of a training that has begun; returns its id."""
    wait_for(lambda: "step 10/" in stage.log(job), 240, "the training to reach step 10")
    victim = next(machine for machine in instances.living(stage.file) if machine.market == "spot")
    tell(take_back=victim.id, notice_s=15)
    return victim.id


def eight_workers(stage: Stage) -> str:
    """A gang of eight machines beside the head."""
    with changed_cluster_file(**_most(stage, MANY)):
        stage.set_up()
        job = stage.submit(GATHER, str(MANY))
        took = wait_for(lambda: "gathered" in stage.log(job), 400, f"{MANY} machines to come together")
        zones = {machine.zone for machine in stage.workers()}
        joined = len(stage.report()["nodes"]) - 1
        stage.ended(job)
    assert joined == MANY, f"{joined} have joined"
    assert len(zones) == 1, zones
    return f"{joined} workers in {zones.pop()}, together {took:.0f} s after the job was submitted"


def _most(stage: Stage, count: int) -> dict:
    types = stage.file.content["available_node_types"]
    workers = {name: body | {"max_workers": count} for name, body in types.items() if name != stage.file.head.name}
    return {"max_workers": count, "available_node_types": types | workers}


def _gather(stage: Stage) -> str:
    """Bring two A100 machines together, from none; returns the job's log."""
    return stage.ended(stage.submit(GATHER, "2"))


def _seen(log: str) -> str:
    """The first and the last line in which the gang says what it met, and how many there are between."""
    first, *between, last = [line for line in log.splitlines() if line.startswith(("zone ", "no zone", "gathered"))]
    return f"{first} … {len(between)} more … {last}" if between else f"{first} … {last}"
