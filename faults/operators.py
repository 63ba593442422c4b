"""Faults that people cause, on purpose or by mistake."""

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from faults import secret_search
from faults.capacity import GATHER, gather
from faults.harness import (
    Harness,
    changed_cluster_file,
    control,
    interrupt_verb,
    replaced_file,
    run_printed,
    run_verb,
    start_verb,
)
from faults.setup import ONE_CPU
from raymill import settings
from raymill.aws import stack
from raymill.aws.target import Aws
from raymill.common import cluster_file, instances
from raymill.common.cluster_file import FILE
from raymill.emulator import cloud
from raymill.emulator.deletions import GONE
from raymill.emulator.moto_instances import ACCOUNT, OTHER_ACCOUNT
from raymill.emulator.waiting import wait_for
from raymill.node import restart

SLEEP = "import time; print('at work', flush=True); time.sleep(600)"
SLEEP_ON_A_WORKER = (
    "import ray, time; ray.init(); "
    "ray.get(ray.remote(num_cpus=1)(lambda: (print('at work', flush=True), time.sleep(600))).remote())"
)
WATCHDOG = settings.PROJECT / "raymill" / "node" / "watchdog.py"


def up_again(harness: Harness) -> str:
    """`up` runs during a job: without changes, the job continues; with changes, `up` warns first that jobs will end."""
    job, head = harness.submit(SLEEP), instances.head(harness.file)
    assert head
    wait_for(lambda: "at work" in harness.log(job), 60, "the job to start")
    for _ in range(2):
        assert f"is already up and matches cluster.yaml: head {head.id}" in run_verb("up")
    with changed_cluster_file(idle_timeout_minutes=6):
        output = run_verb("up", exit_code=1)  # without --yes and without input, `up` only prints what it would do
        assert "the head will be set up again, which ends running jobs" in output, output
    assert harness.is_running(job), harness.log(job)
    change, *_ = re.findall(r"cluster\.yaml or the pins.*?running jobs", output)
    return f"the job continued; with a changed cluster.yaml: {change}"


def watchdog_changes(harness: Harness) -> str:
    """The watchdog's code changes during a job: `up` updates it on head and worker, and reports code that fails."""
    job = harness.submit(SLEEP_ON_A_WORKER)
    wait_for(lambda: "at work" in harness.log(job), 240, "the job to start on a worker")
    (worker,), line = harness.workers(), 'process.take_over("watchdog")\n'
    code = WATCHDOG.read_text(encoding="utf-8")
    with replaced_file(WATCHDOG, code.replace(line, f'{line}    logging.warning("this is new")\n')):
        output = run_verb("up")
        assert "the new code runs on the head and 1 worker" in output, output
        assert "code has changed" not in run_verb("up")
    on_worker = shlex.join([*restart.SSH, f"ubuntu@{worker.private_address}", "cat ~/watchdog.log"])
    assert "this is new" in harness.head().run("cat ~/watchdog.log")
    assert "this is new" in harness.head().run(on_worker)
    # before it takes over, when the earlier watchdog still renews the lease, and afterwards
    for broken in (f"raise SystemExit\n    {line}", f"{line}    raise SystemExit\n"):
        with replaced_file(WATCHDOG, code.replace(line, broken)):
            output = run_verb("up", exit_code=1)
            assert "does not work with the new code" in output, output
            assert worker.id not in output, output  # it keeps the code that works
    assert "the new code runs on the head and 1 worker" in run_verb("up")
    assert [one.id for one in harness.workers()] == [worker.id]
    assert harness.is_running(job), harness.log(job)
    return re.findall(r"the watchdog of .*?does not work with the new code", output)[0] + "; the job went on"


def own_subnets(harness: Harness) -> str:
    """`[cluster.network]` names subnets of the user's own: machines start there, and `down` changes nothing there."""
    run_verb("down")
    ec2 = harness.file.client("ec2")
    subnets = _make_network(ec2, harness.file.region)
    before = _network(ec2)
    text = settings.FILE.read_text(encoding="utf-8")
    changed = text.replace("\nsubnets = []", f"\nsubnets = {json.dumps(subnets)}")
    assert changed != text
    with replaced_file(settings.FILE, changed):
        run_verb("up", "--yes")
        harness.connection = Aws().connect()
        gather(harness)
        machines = [machine.id for machine in instances.living(harness.file)]
        found = ec2.describe_instances(InstanceIds=machines)["Reservations"]
        output = run_verb("down")
    used = {one["SubnetId"] for reservation in found for one in reservation["Instances"]}
    assert used <= set(subnets), f"{used} are not in {subnets}"
    assert "is left" in output, output
    assert _network(ec2) == before
    return f"{len(machines)} machines started in {len(used)} of two subnets; the network is as it was before"


def _make_network(ec2: Any, region: str) -> list[str]:
    """Make a VPC with two public subnets in different zones, and return the ids of the subnets."""
    vpc = ec2.create_vpc(CidrBlock="10.9.0.0/16")["Vpc"]["VpcId"]
    gateway = ec2.create_internet_gateway()["InternetGateway"]["InternetGatewayId"]
    ec2.attach_internet_gateway(InternetGatewayId=gateway, VpcId=vpc)
    (table,) = ec2.describe_route_tables(Filters=[{"Name": "vpc-id", "Values": [vpc]}])["RouteTables"]
    ec2.create_route(RouteTableId=table["RouteTableId"], DestinationCidrBlock="0.0.0.0/0", GatewayId=gateway)
    return [
        ec2.create_subnet(VpcId=vpc, CidrBlock=f"10.9.{number}.0/24", AvailabilityZone=f"{region}{zone}")["Subnet"][
            "SubnetId"
        ]
        for number, zone in enumerate("ab")
    ]


def _network(ec2: Any) -> dict[str, Any]:
    """Return what the account has in its network, except what depends on instances."""
    return {
        "VPCs": ec2.describe_vpcs()["Vpcs"],
        "route tables": ec2.describe_route_tables()["RouteTables"],
        "security groups": ec2.describe_security_groups()["SecurityGroups"],
        "endpoints": ec2.describe_vpc_endpoints()["VpcEndpoints"],
    }


def interrupted_up(harness: Harness) -> str:
    """Ctrl-C interrupts `up` at three points: afterwards, the command that it prints leaves nothing behind."""
    run_verb("down")
    points = ("at most", "step 1 of 7", "step 6 of 7")  # `up` shows the price, boots the head, and sets it up
    for point in points:
        (command,) = re.findall(r"interrupted\..*End it: (.*)", interrupt_verb(point, "up", "--yes"))
        expected = "there was nothing to end" if point == points[0] else "is left in account"
        assert expected in run_printed(command.removeprefix("inv ")), command
        assert not instances.living(harness.file)
    return f"at {', '.join(f'“{point}”' for point in points)}"


def busy_stack(harness: Harness) -> str:
    """Two `prepare` run at the same time, and a `prepare` runs during `down`: each waits until the stack is free."""
    run_verb("down")
    for process in [start_verb("prepare"), start_verb("prepare")]:
        output, _ = process.communicate()
        assert process.returncode == 0, output
    leaving = start_verb("down")
    wait_for(lambda: (stack.find(harness.file) or {}).get("StackStatus") == "DELETE_IN_PROGRESS", 60, "the deletion")
    output = run_verb("prepare")
    assert f"stack {harness.file.slug} created" in output, output
    leaving.communicate()  # it may find what `prepare` has made, and say so
    assert leaving.returncode in (0, 1)
    assert "is left" in run_verb("down")
    return "two prepare at once worked; prepare during down waited, and made the stack again"


def volumes_vanish(harness: Harness) -> str:
    """Volumes have outlived their machines, and EC2 deletes one of them, and more, before `down` does."""
    ec2, tags = harness.file.client("ec2"), [{"Key": "ray-project", "Value": harness.file.slug}]
    of_volume = [{"ResourceType": "volume", "Tags": tags}]
    for _ in range(3):
        ec2.create_volume(AvailabilityZone=f"{harness.file.region}a", Size=1, TagSpecifications=of_volume)
    control(gone=dict.fromkeys(GONE, 1))
    output = run_verb("down")
    assert "is left" in output, output
    assert not instances.living(harness.file)
    return re.findall(r"\w+ is down:.*?is left in account", output)[0]


def down_twice(harness: Harness) -> str:
    """`down` runs twice from another checkout, without the private key: nothing is left."""
    harness.file.key_file.unlink()
    with _checkout(harness.file.slug) as folder:
        output = run_verb("down", folder=folder)
        assert "is left" in output, output
        assert "there was nothing to end" in run_verb("down", folder=folder)
    assert not instances.living(harness.file), "some machines still run"
    return re.findall(r"rehearsal is down:.*?is left", output)[0]


def another_account_region_or_owner(harness: Harness) -> str:
    """Verbs refuse to work on another cluster than the one of their checkout. `down` ends each cluster where it is."""
    head, file = instances.head(harness.file), harness.file
    assert head
    other = {"AWS_PROFILE": "other"}
    for words in (("down",), ("status", "--past"), ("keys", "list"), ("up", "--yes")):
        output = run_verb(*words, exit_code=1, **other)
        assert "but your AWS credentials are for account" in output, output
    text = FILE.read_text(encoding="utf-8")
    with replaced_file(FILE, text.replace(file.region, cloud.other_region(file.region))):
        assert "but cluster/cluster.yaml has " in run_verb("down", exit_code=1)
    with _checkout(file.slug) as folder:
        output = run_verb("down", exit_code=1, folder=folder, AWS_PROFILE="colleague")
        assert "belongs to" in output, output
        assert "there was nothing to end" in run_verb("down", folder=folder, **other)
        assert f"stack {file.slug} created" in run_verb("prepare", folder=folder, **other)
        assert f"is left in account {OTHER_ACCOUNT}, {file.region}" in run_verb("down", folder=folder, **other)
    assert [one.id for one in instances.living(file) if one.node_type == file.head.name] == [head.id]
    output = run_verb("down")
    assert f"is left in account {ACCOUNT}, {file.region}" in output, output
    assert not instances.living(file)
    return re.findall(r"rehearsal is down:.*?is left in .*", output)[0]


def two_clusters(harness: Harness) -> str:
    """Two projects have a cluster each, and each project sees and ends only its own machines."""
    with _checkout(f"other-{harness.file.slug}") as folder:
        run_verb("up", "--yes", folder=folder)
        job, head = harness.submit(SLEEP), instances.head(harness.file)
        other = cluster_file.load(folder / FILE.relative_to(settings.PROJECT))
        other_head = instances.head(other)
        assert head
        assert other_head
        assert other_head.id in run_verb("status", folder=folder)
        assert head.id not in run_verb("status", folder=folder)
        assert other_head.id not in run_verb("status")
        run_verb("down", folder=folder)
        assert not instances.living(other)
    wait_for(lambda: "at work" in harness.log(job), 60, "the job to start")
    assert harness.is_running(job), harness.log(job)
    return f"{other.slug} with {other_head.id} started and ended; {harness.file.slug} with {head.id} continued"


def permission_missing(harness: Harness) -> str:
    """The user or the head lacks a permission: the verb names the permission."""
    iam = harness.file.client("iam")
    user = {"UserName": "laptop", "PolicyName": "deny-one"}
    for action, words in (("cloudformation:UpdateStack", "prepare"), ("ec2:DescribeInstances", "status")):
        iam.put_user_policy(**user, PolicyDocument=_deny(action))
        try:
            assert f"you lack the permission {action}" in run_verb(words, exit_code=1)
        finally:
            iam.delete_user_policy(**user)
    role = {"RoleName": harness.file.role("head"), "PolicyName": "deny-one"}
    iam.put_role_policy(**role, PolicyDocument=_deny("ec2:RunInstances"))
    harness.submit(GATHER, "2")
    try:
        wait_for(lambda: "ec2:RunInstances" in str(harness.report()["refused"]), 60, "AWS to reject the head's call")
        output = run_verb("status")
    finally:
        iam.delete_role_policy(**role)
    assert "not authorized to perform: ec2:RunInstances" in output, output
    return re.findall(r"AWS refused \S+ at .*?ec2:RunInstances", output)[0]


def secret_stays_secret(harness: Harness) -> str:
    """A job uses a secret: except for .env, no file, command line, object, response or AWS call contains it."""
    canary = f"canary-{os.urandom(16).hex()}"
    code = "import os, ray, time; from raymill.ray_support import job_secrets; job_secrets.load(); ray.init(); "
    code += "length = lambda: len(os.environ['HF_TOKEN']); "
    code += "print('lengths', length(), ray.get(ray.remote(num_cpus=1)(length).remote()), flush=True); time.sleep(600)"
    env = settings.PROJECT / ".env"
    with replaced_file(env, f"HF_TOKEN={canary}\n"):
        run_verb("up", "--yes")
        job = harness.submit(code, with_secrets=True)
        wait_for(lambda: "lengths" in harness.log(job), 120, "the job to read the secret")
        assert f"lengths {len(canary)} {len(canary)}" in harness.log(job), harness.log(job)
        searched = secret_search.search(canary, harness, only_in={str(env), "/tmp/replaced/.env"})
    return f"not in {searched}"


def plain_ray(harness: Harness) -> str:
    """After `prepare`, plain `ray up` starts a head, which starts a worker for a job. `ray down` terminates both."""
    run_verb("down")
    run_verb("prepare")
    _ray("up", "--no-config-cache")
    harness.connection = Aws().connect()
    harness.wait_for_success(harness.submit(ONE_CPU))
    count = len(instances.living(harness.file))
    _ray("down")
    assert not instances.living(harness.file)
    return f"`ray up` started a head, a job started {count - 1} worker, and `ray down` terminated all of them"


def _ray(word: str, *options: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ray.scripts.scripts", word, "--yes", *options, str(FILE)],
        cwd=settings.PROJECT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-1000:]


@contextlib.contextmanager
def _checkout(slug: str) -> Iterator[Path]:
    """Copy the project to another folder, and change the copy's slug to `slug`."""
    folder = Path("/tmp/checkout")
    # skipped only at the top level, because the copy needs raymill/data
    skipped = (".venv", ".cluster", ".env", "data", "models", "runs", "results")
    shutil.copytree(settings.PROJECT, folder, ignore=lambda path, _: skipped if Path(path) == settings.PROJECT else ())
    (folder / ".venv").symlink_to(settings.PROJECT / ".venv")
    old_slug = cluster_file.load().slug
    for name in ("cluster.yaml", "stack.yaml"):
        file = folder / "cluster" / name
        file.write_text(file.read_text().replace(old_slug, slug))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def _deny(action: str) -> str:
    statement = {"Effect": "Deny", "Action": action, "Resource": "*"}
    return json.dumps({"Version": "2012-10-17", "Statement": [statement]})
