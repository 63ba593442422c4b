"""Rows of the drill: what people do to a cluster, meant and not meant."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import settings
from cluster.aws import target as aws
from cluster.common import cluster_file, instances
from cluster.common.cluster_file import FILE
from cluster.emulator.drill import leaks
from cluster.emulator.drill.markets import GATHER
from cluster.emulator.drill.setups import ONE_CPU
from cluster.emulator.drill.stage import Stage, changed_cluster_file, covered, interrupt, verb, wait_for

SLEEP = "import time; print('at work', flush=True); time.sleep(600)"


def up_again(stage: Stage) -> str:
    """`up` while a job runs: with nothing changed it disturbs nothing, with a change it says first what ends."""
    job, head = stage.submit(SLEEP), instances.head(stage.file)
    assert head
    wait_for(lambda: "at work" in stage.log(job), 60, "the job to start")
    for _ in range(2):
        assert f"is already up and matches cluster.yaml: head {head.id}" in verb("up")
    with changed_cluster_file(idle_timeout_minutes=6):
        said = verb("up", expect=1)  # nobody agrees: it only says what it would do
        assert "the head is set up anew, and running jobs end" in said, said
    assert stage.is_running(job), stage.log(job)
    return "the job ran on; with another cluster.yaml: " + re.findall(r"cluster\.yaml, the pins.*?end", said)[0]


def interrupted_up(stage: Stage) -> str:
    """Ctrl-C in `up`, at three points: `down` leaves nothing."""
    verb("down")
    points = ("at most", "step 1 of 7", "step 6 of 7")  # the price was shown; the head boots; it is set up
    for point in points:
        assert "interrupted" in interrupt(point, "up", "--yes")
        assert "is left" in verb("down")
        assert not instances.living(stage.file)
    return f"at {', '.join(f'“{point}”' for point in points)}"


def down_twice(stage: Stage) -> str:
    """`down` from another checkout, the laptop with the key being lost, and again: nothing is left."""
    stage.file.key_file.unlink()
    with _checkout(stage.file.slug) as folder:
        for _ in range(2):
            said = verb("down", folder=folder)
            assert "is left" in said, said
    assert not instances.living(stage.file), "machines live on"
    return re.findall(r"rehearsal is down:.*?is left", said)[0]


def two_clusters(stage: Stage) -> str:
    """Another project beside this one: each sees and ends its own machines only."""
    with _checkout(f"other-{stage.file.slug}") as folder:
        verb("up", "--yes", folder=folder)
        job, head = stage.submit(SLEEP), instances.head(stage.file)
        other = cluster_file.load(folder / FILE.relative_to(settings.PROJECT))
        theirs = instances.head(other)
        assert head
        assert theirs
        assert theirs.id in verb("status", folder=folder)
        assert head.id not in verb("status", folder=folder)
        assert theirs.id not in verb("status")
        verb("down", folder=folder)
        assert not instances.living(other)
    wait_for(lambda: "at work" in stage.log(job), 60, "the job to start")
    assert stage.is_running(job), stage.log(job)
    return f"{other.slug} with {theirs.id} came and went; {stage.file.slug} with {head.id} worked on"


def permission_missing(stage: Stage) -> str:
    """One permission less: the verb names it, for the caller's own calls and for those of the head."""
    iam = stage.file.client("iam")
    user = {"UserName": "laptop", "PolicyName": "less"}
    for action, words in (("cloudformation:UpdateStack", "prepare"), ("ec2:DescribeInstances", "status")):
        iam.put_user_policy(**user, PolicyDocument=_deny(action))
        try:
            assert f"you may not {action}" in verb(words, expect=1)
        finally:
            iam.delete_user_policy(**user)
    role = {"RoleName": f"{stage.file.slug}-head", "PolicyName": "less"}
    iam.put_role_policy(**role, PolicyDocument=_deny("ec2:RunInstances"))
    stage.submit(GATHER, "2")
    try:
        wait_for(lambda: "ec2:RunInstances" in str(stage.report()["refused"]), 60, "AWS to refuse the head")
        said = verb("status")
    finally:
        iam.delete_role_policy(**role)
    assert "not authorized to perform: ec2:RunInstances" in said, said
    return re.findall(r"AWS refused \S+ at .*?ec2:RunInstances", said)[0]


def secret_stays_secret(stage: Stage) -> str:
    """A secret that a job uses is in no file, command line, log, upload or answer of the cluster."""
    canary = f"canary-{os.urandom(16).hex()}"
    check = "import os, ray, time; from jobs import secrets; secrets.load(); ray.init(); "
    check += "see = lambda: len(os.environ['HF_TOKEN']); "
    check += "print('both see it', see(), ray.get(ray.remote(num_cpus=1)(see).remote()), flush=True); time.sleep(600)"
    env = settings.PROJECT / ".env"
    with covered(env, f"HF_TOKEN={canary}\n"):
        verb("up", "--yes")
        job = stage.submit(check, with_secrets=True)
        wait_for(lambda: "both see it" in stage.log(job), 120, "the job to have the secret")
        assert f"both see it {len(canary)} {len(canary)}" in stage.log(job), stage.log(job)
        searched = leaks.search(canary, stage, only_in={str(env), "/tmp/covers/.env"})
    return f"not in {searched}"


def bare_ray(stage: Stage) -> str:
    """Plain `ray up` and `ray down` after `prepare`: workers come, and nothing but the stack is left."""
    verb("down")
    verb("prepare")
    _ray("up", "--no-config-cache")
    stage.connection = aws.Aws().connect()
    stage.ended(stage.submit(ONE_CPU))
    count = len(instances.living(stage.file))
    _ray("down")
    assert not instances.living(stage.file)
    return f"`ray up` brought a head, a job {count - 1} worker, `ray down` ended all"


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
    """A copy of this project's files, of this slug."""
    folder = Path("/tmp/checkout")
    skipped = shutil.ignore_patterns(".venv", ".cluster", ".env", "data", "models", "runs", "results")
    shutil.copytree(settings.PROJECT, folder, ignore=skipped)
    (folder / ".venv").symlink_to(settings.PROJECT / ".venv")
    ours = cluster_file.load().slug
    for name in ("cluster.yaml", "stack.yaml"):
        file = folder / "cluster" / name
        file.write_text(file.read_text().replace(ours, slug))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def _deny(action: str) -> str:
    statement = {"Effect": "Deny", "Action": action, "Resource": "*"}
    return json.dumps({"Version": "2012-10-17", "Statement": [statement]})
