"""Faults in which AWS has too little capacity or interrupts spot machines, and a test with a large gang."""

import re
import time

from faults.harness import (
    Harness,
    changed_cluster_file,
    control,
    final_loss,
    no_capacity,
    no_quota,
    replaced_file,
    run_verb,
)
from raymill import settings
from raymill.aws.target import Aws
from raymill.common import instances
from raymill.emulator import scenario
from raymill.emulator.waiting import wait_for
from raymill.instance_types import INSTANCE_TYPES
from raymill.ray_support.workers import WorkerOptions

# The project's default. It is far longer than a host takes to start, so no zone fails because of a slow start.
ZONE_TIMEOUT_S = WorkerOptions.model_fields["zone_timeout_s"].default
GATHER = (
    "import ray, sys; from raymill.ray_support import gang; ray.init(); "
    f"print('gathered', gang.gather(int(sys.argv[1]), {{'CPU': 60, 'GPU': 1}}, {ZONE_TIMEOUT_S}, gang.offers()))"
)
END_S = 45
"""Seconds that machines take to end, where the test says so."""
MANY_WORKERS = 8
PREFERRED, SERVING = "p5.48xlarge", "g6e.xlarge"
# requests what a replica of `serve_llm` requests
REPLICA = (
    "import ray, sys; ray.init(); "
    "print(ray.get(ray.remote(num_gpus=1, num_cpus=4, accelerator_type=sys.argv[1])(lambda: 'ran').remote()))"
)
SAVED = re.compile(r"is about to be taken away: saving a checkpoint after step (\d+)")


def first_zone_refuses(harness: Harness) -> str:
    """No spot capacity in the first zone: the gang starts in the second."""
    harness.wait_until_no_workers()
    with no_capacity({"market": "spot", "zone": f"{harness.file.region}a"}):
        log = gather(harness)
    assert "zone 1, spot: AWS refuses machines" in log, log
    assert "gathered {'zone': '2'}" in log, log
    return _summary(log)


def launch_ends_early(harness: Harness) -> str:
    """EC2 accepts a launch and ends the machine before it runs: `inv status` says why, and another zone is tried."""
    harness.wait_until_no_workers()
    control(without_volumes=1)
    log = gather(harness)
    assert "gathered {'zone': '2'}" in log, log
    output = run_verb("status")
    (ended,) = re.findall(r"AWS ended \S+ \(gpu-spot-1\) during its launch: [^.]*\.VolumeLimitExceeded: [^.]*", output)
    return ended


def own_key_for_disks(harness: Harness) -> str:
    """A key of the account's own encrypts all disks: the head's role may use it, so machines start."""
    harness.wait_until_no_workers()
    key = harness.file.client("kms").create_key()["KeyMetadata"]["Arn"]
    ec2 = harness.file.client("ec2")
    ec2.modify_ebs_default_kms_key_id(KmsKeyId=key)
    try:
        log = gather(harness)
    finally:
        ec2.modify_ebs_default_kms_key_id(KmsKeyId="alias/aws/ebs")
    assert "gathered" in log, log
    return _summary(log)


def all_spot_refuses(harness: Harness) -> str:
    """No spot capacity in any zone: the gang starts on demand."""
    harness.wait_until_no_workers()
    with no_capacity({"market": "spot"}):
        log = gather(harness)
        markets = {machine.market for machine in harness.workers()}
    assert "gathered {'zone': '1'}" in log, log
    assert markets == {"on-demand"}, markets
    return _summary(log)


def cheapest_zone_lacks_the_heads_type(harness: Harness) -> str:
    """The zone with the lowest spot price does not offer the head's type: only the gang starts there."""
    cheapest = f"{harness.file.region}a"
    run_verb("down")  # because a stack keeps its zones
    control(faults={"not_offered": [{"type": harness.file.head.instance_type, "zone": cheapest}]})
    run_verb("up", "--yes")
    harness.connection = Aws().connect()
    log = gather(harness)
    head, *workers = instances.living(harness.file)
    run_verb("down")
    assert head.zone != cheapest, head
    assert {machine.zone for machine in workers} == {cheapest}, workers
    assert "refuses" not in log, log
    return f"the head started in {head.zone}, and the gang in {cheapest}"


def everything_at_once(harness: Harness) -> str:
    """AWS refuses launches, ends one early, and takes long to end machines: a job, `down` and the next `up` work.

    The emulated AWS throttles calls and shows changes late in every test (see throttling.py and consistency.py).
    """
    harness.wait_until_no_workers()
    control(end_s=END_S, without_volumes=1)
    try:
        with no_capacity({"zone": f"{harness.file.region}a", "market": "spot"}):
            gather(harness)
        zones = {machine.zone for machine in harness.workers()}
        started = time.monotonic()
        output = run_verb("down")
        seconds = time.monotonic() - started
    finally:
        control(end_s=0)
    assert "is left" in output, output
    assert seconds >= END_S, f"down took {seconds:.0f} s"
    assert len(zones) == 1, zones
    run_verb("up", "--yes")
    harness.connection = Aws().connect()
    return f"the gang started in {zones.pop()}; down waited for the machines and took {seconds:.0f} s; up worked again"


def no_spot_quota(harness: Harness) -> str:
    """The account may not run spot machines: the doctor warns, and the gang starts on demand at once."""
    harness.wait_until_no_workers()
    instance_type = harness.file.workers[-1].instance_type
    with no_quota(INSTANCE_TYPES[instance_type].family.spot_quota):
        report = run_verb("doctor")
        log = gather(harness)
        markets = {machine.market for machine in harness.workers()}
    assert "Until you have more, only" in report, report
    assert f"{instance_type} on-demand" in report, report
    assert "refuses" not in log, log
    assert "gathered {'zone': '1'}" in log, log
    assert markets == {"on-demand"}, markets
    return "the gang started on demand in zone 1, without trying spot machines"


def preferred_type_refuses(harness: Harness) -> str:
    """The preferred instance type has no capacity anywhere: the gang starts on the next type, and only on that."""
    harness.wait_until_no_workers()
    fallback = harness.file.workers[-1].instance_type
    text = settings.FILE.read_text().replace("instance_types = []", f'instance_types = ["{PREFERRED}", "{fallback}"]')
    with replaced_file(settings.FILE, text):
        harness.ensure_up()
        with no_capacity({"type": PREFERRED}):
            log = gather(harness)
            types = {machine.instance_type for machine in harness.workers()}
    assert f"zone 1, spot, {PREFERRED}: AWS refuses machines" in log, log
    assert f"'instance_type': '{fallback}'" in log, log
    assert types == {fallback}, types
    return _summary(log)


def serving_type(harness: Harness) -> str:
    """A replica's GPU is on the instance type for serving, not on one for training."""
    harness.wait_until_no_workers()
    text = settings.FILE.read_text().replace('serve_instance_type = ""', f'serve_instance_type = "{SERVING}"')
    with replaced_file(settings.FILE, text):
        harness.ensure_up()
        harness.wait_for_success(harness.submit(REPLICA, INSTANCE_TYPES[SERVING].gpu.accelerator))
        (machine,) = harness.workers()
    assert (machine.instance_type, machine.market) == (SERVING, "spot"), machine
    return f"{machine.instance_type} started as {machine.node_type}"


def half_a_gang(harness: Harness) -> str:
    """Only one of two machines starts: the job releases it, and the gang starts in another zone."""
    harness.wait_until_no_workers()
    # The first zone has no capacity at all. After an earlier test, the watchdog may have closed it anyway.
    none = {"market": "spot", "zone": f"{harness.file.region}a"}
    one = {"market": "spot", "zone": f"{harness.file.region}b", "available": 1}
    with no_capacity(none, one):
        job = harness.submit(GATHER, "2")
        wait_for(harness.workers, 90, "half of the gang to start")
        (half,) = harness.workers()
        log = harness.wait_for_success(job)
    assert "zone 2, spot: AWS refuses machines, 1 released" in log, log
    assert half.id not in [one.id for one in harness.workers()], f"{half.id} still runs"
    return f"{half.id}, alone in {half.zone}, was released; {_summary(log)}"


def everything_refuses(harness: Harness) -> str:
    """No capacity at all: the job reports that it waits, and continues when there is capacity."""
    harness.wait_until_no_workers()
    with no_capacity({"type": harness.file.workers[-1].instance_type}):
        job = harness.submit(GATHER, "2")
        wait_for(lambda: "no zone has room" in harness.log(job), 240, "the job to say that it waits")
    log = harness.wait_for_success(job)
    assert "gathered" in log, log
    return _summary(log)


def spot_interruption(harness: Harness) -> str:
    """AWS interrupts a machine: training saves a checkpoint when the notice arrives, and resumes on a replacement."""
    baseline = harness.baseline_loss
    job = harness.train("interrupted", "--checkpoint-every", "100")
    interrupted = _interrupt_one(harness, job)
    log = harness.wait_for_success(job, 300)
    assert final_loss(log) == baseline, f"losses differ: {final_loss(log)} and {baseline}"
    (saved,) = SAVED.findall(log)
    assert f"resumed after step {saved}" in log, log
    return f"{interrupted} ended after a checkpoint of step {saved}; loss {baseline}, the same as without interruption"


def interruption_without_replacement(harness: Harness) -> str:
    """AWS interrupts a machine and has no replacement: an elastic training run continues with one of two workers."""
    baseline = harness.baseline_loss
    job = harness.train("elastic", "--num-workers", "1", "2")
    wait_for(lambda: "on 2 x" in harness.log(job), 240, "the training to start")
    # Ray waits for a second worker before it continues with one. Until then, the idle machine must not be terminated.
    scenario.set_idle_timeout(harness.file, 2)
    with no_capacity({"type": harness.file.workers[-1].instance_type}):
        interrupted = _interrupt_one(harness, job)
        log = harness.wait_for_success(job, 600)
    assert "on 1 x" in log, log
    assert abs(final_loss(log) - baseline) < 1.5e-4, f"losses differ: {final_loss(log)} and {baseline}"
    return (
        f"{interrupted} ended and the other worker continued; loss {final_loss(log)}, without interruption {baseline}"
    )


def _interrupt_one(harness: Harness, job: str) -> str:
    """Interrupt a spot machine after step 10 of a training run, and return the machine's id."""
    harness.wait_for_step(job, 10)
    victim = next(machine for machine in instances.living(harness.file) if machine.market == "spot")
    control(interrupt=victim.id, notice_s=15)
    return victim.id


def block_ends(harness: Harness) -> str:
    """A gang trains in a Capacity Block: 40 minutes before the end, it saves a checkpoint. It resumes elsewhere."""
    baseline = harness.baseline_loss
    with replaced_file(settings.FILE, settings.FILE.read_text()):  # because the purchase changes this file
        block = {"reservation_id": _buy_block(), "start_s": -60}
        assert "so nothing was started" in run_verb("up", "--yes", exit_code=1)
        control(reservation=block | {"end_s": 23 * 3600})
        harness.ensure_up()
        job = harness.train("block", "--checkpoint-every", "100")
        harness.wait_for_step(job, 10)
        reserved = [machine.id for machine in harness.workers() if machine.market == "capacity-block"]
        assert len(reserved) == 2, harness.log(job)
        assert run_verb("status").count("prepaid") == 2
        control(reservation=block | {"end_s": 40 * 60})  # as if all time until then had passed
        wait_for(lambda: SAVED.search(harness.log(job)), 60, "training to save a checkpoint")
        control(reservation=block | {"end_s": 30 * 60 + 15})  # of the ten minutes until then, leave 15 s
        log = harness.wait_for_success(job, 600)
        after = {machine.market for machine in harness.workers()}
    assert after <= {"spot", "on-demand"}, after
    assert final_loss(log) == baseline, f"losses differ: {final_loss(log)} and {baseline}"
    saved = SAVED.findall(log)[-1]
    assert f"resumed after step {saved}" in log, log
    return (
        f"two reserved machines ended after a checkpoint of step {saved}; loss {baseline}, the same as on spot machines"
    )


def _buy_block() -> str:
    """Buy a Capacity Block of two machines, and return its id."""
    offering, *_ = re.findall(r"cb-\w+", run_verb("capacity", "--instances", "2"))
    (bought,) = re.findall(r"bought (cr-\w+)", run_verb("capacity", "--buy", offering, "--yes"))
    return bought


def eight_workers(harness: Harness) -> str:
    """A gang of eight workers starts in one zone."""
    with changed_cluster_file(**_with_max_workers(harness, MANY_WORKERS)):
        harness.ensure_up()
        job = harness.submit(GATHER, str(MANY_WORKERS))
        took = wait_for(lambda: "gathered" in harness.log(job), 400, f"{MANY_WORKERS} machines to start")
        zones = {machine.zone for machine in harness.workers()}
        joined = len(harness.report()["nodes"]) - 1
        harness.wait_for_success(job)
    assert joined == MANY_WORKERS, f"{joined} workers joined"
    assert len(zones) == 1, zones
    return f"{joined} workers in {zones.pop()}, {took:.0f} s after the job was submitted"


def _with_max_workers(harness: Harness, count: int) -> dict:
    types = harness.file.content["available_node_types"]
    workers = {name: body | {"max_workers": count} for name, body in types.items() if name != harness.file.head.name}
    return {"max_workers": count, "available_node_types": types | workers}


def gather(harness: Harness) -> str:
    """Run a job that starts two GPU machines in one zone, and return its log."""
    return harness.wait_for_success(harness.submit(GATHER, "2"))


def _summary(log: str) -> str:
    """Return the first and last line about zones in a job's log, and the number of such lines in between."""
    first, *between, last = [line for line in log.splitlines() if line.startswith(("zone ", "no zone", "gathered"))]
    return f"{first} … {len(between)} more … {last}" if between else f"{first} … {last}"
