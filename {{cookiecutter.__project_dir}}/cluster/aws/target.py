"""The `aws` target: cluster.yaml on AWS, by Ray's own launcher. The rehearsal runs this very code inside its cloud."""

import json
import subprocess
import sys
import time

import requests
from rich.console import Console

import settings
from cluster import doctor
from cluster.aws import capacity, costs, head, ray_up, secrets_manager, ssh, stack, teardown
from cluster.common import bucket, cluster_file, instances, prices
from cluster.common.cluster_file import TARGET, ClusterFile
from cluster.target import Bill, Connection, Finding

A100_GIB = {"p4d.24xlarge": 40, "p4de.24xlarge": 80}


class Aws:
    """A head that is up, and workers that come and go with the work."""

    name: str = TARGET
    profile = "cluster"

    def doctor(self) -> list[Finding]:
        from cluster.aws import doctor as aws_doctor  # imports the jobs' options, which takes seconds

        return aws_doctor.checks(cluster_file.load())

    def prepare(self) -> None:
        stack.prepare(cluster_file.load())

    def up(self, yes: bool) -> None:
        file = cluster_file.load()
        running = instances.head(file)
        changes = _what_changes(file, running)
        if running and not changes:
            secrets_manager.upload(file)
            print(f"{self.name} is up already, and as cluster.yaml says: head {running.id}")
            stack.open_https(file, running.id)
            return
        _examine(self.doctor(), self.name)
        Console().print(prices.table(file, prices.ask(file)))
        print(changes)
        _ask("go on?" if running else "start it?", yes)
        started = time.monotonic()
        stack.prepare(file)
        secrets_manager.upload(file)
        bucket.forget_note(file)
        if running:
            head.mark(file, "being set up")  # what is interrupted from here on is not up already
        ray_up.up()
        head.wait_until_ready(ssh.reach(file))
        head.mark(file, file.digest)
        print(f"{self.name} is up after {time.monotonic() - started:.0f} s: a head with its autoscaler, no worker yet")
        stack.open_https(file, ssh.reach(file).instance_id)

    def connect(self) -> Connection:
        file = cluster_file.load()
        serve_port = settings.load(stack.ServeSection, "serve", profile=self.profile).port
        reached = ssh.reach(file)
        ports, token = reached.tunnel(ssh.DASHBOARD_PORT, serve_port)
        dashboard, headers = f"http://127.0.0.1:{ports[ssh.DASHBOARD_PORT]}", {"Authorization": f"Bearer {token}"}
        try:
            requests.get(f"{dashboard}/api/version", headers=headers, timeout=30).raise_for_status()
        except requests.RequestException:
            raise settings.UserError(
                f"Ray does not answer on the head {reached.instance_id}; mend it with: inv up --target {TARGET}"
            ) from None
        return Connection(
            target=TARGET,
            dashboard=dashboard,
            headers=headers,
            forwarded={serve_port: ports[serve_port]},
            job_variables={
                "PROFILE": self.profile,
                "PROJECT_DIR": f"s3://{bucket.name(file)}",
                "CLUSTER_NODES": json.dumps(capacity.possible_nodes(file)),
                "GANG_OFFERS": json.dumps(capacity.offers(file)),
                "SECRETS_PREFIX": f"{file.slug}/",
                "AWS_DEFAULT_REGION": file.region,
            },
        )

    def files(self) -> dict[str, str]:
        file = cluster_file.load()
        if not bucket.exists(file):
            raise settings.UserError(
                f"{file.slug} has no bucket on AWS yet, so no job wrote anything; start with: inv up --target {TARGET}"
            )
        return {"PROFILE": self.profile, "PROJECT_DIR": f"s3://{bucket.name(file)}", **bucket.access(file)}

    def shell(self, command: str) -> int:
        reached = ssh.reach(cluster_file.load())
        if command:
            return subprocess.call([*reached.command("-T"), ssh.ENVIRONMENT + command])
        return subprocess.call([*reached.command("-t"), "bash", "-l"])

    def dollars_per_machine_hour(self) -> dict[int, float]:
        file = cluster_file.load()
        known = prices.ask(file)
        by_card: dict[int, list[float]] = {}
        for worker in file.workers:
            if worker.instance_type in A100_GIB:
                by_card.setdefault(A100_GIB[worker.instance_type], []).append(known.workers[worker.name])
        return {card: min(dollars) for card, dollars in by_card.items()}

    def bill(self) -> Bill:
        file = cluster_file.load()
        return costs.report(file, head.report(ssh.reach(file)))

    def down(self) -> list[str]:
        file = cluster_file.load()
        teardown.end_instances(file)
        teardown.delete_orphans(file)
        stack.delete(file)
        secrets_manager.delete(file)
        left = teardown.leftovers(file) + [f"secret {name}" for name in secrets_manager.names(file)]
        if not left:
            print(
                f"{self.name} is down: no instance, volume, interface, security group, key, role, secret or stack "
                f"of {file.slug} is left"
            )
            if bucket.exists(file):
                print(f"kept, with your work in it: s3://{bucket.name(file)}")
        return left


def _examine(findings: list[Finding], target: str) -> None:
    """Show the findings that are not ok. Raises `settings.UserError` when something would fail."""
    told = [finding for finding in findings if finding.verdict != "ok"]
    print(
        f"doctor: {len(findings) - len(told)} of {len(findings)} checks are fine; see all: inv doctor --target {target}"
    )
    if not doctor.show(told, Console()):
        raise settings.UserError(
            f"nothing was started. Fix the problems marked ✗, then run: inv doctor --target {target}"
        )


def _ask(question: str, yes: bool) -> None:
    """Nothing that costs money starts without a yes. Raises `settings.UserError` for any other answer."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise settings.UserError(
            f"this costs money and nobody is here to agree; say so with: inv up --target {TARGET} --yes"
        )
    if input(f"{question} [y/N] ").strip().lower() not in ("y", "yes"):
        raise settings.UserError("nothing was started.")


def _what_changes(file: ClusterFile, running: instances.Instance | None) -> str:
    """What `up` will do, in a sentence; nothing is to be done where it is empty."""
    if running is None:
        orphans = len(instances.living(file))
        return "a head is started" + (f", and takes over {orphans} machines that have none" if orphans else "")
    if running.tags.get(instances.FILES_TAG) == file.digest:
        if head.runs(ssh.reach(file)):
            return ""
        return f"Ray, its autoscaler or the watchdog does not run on the head {running.id}: it is set up again"
    if running.tags.get("ray-launch-config") == _launch_hash(file):
        return (
            "cluster.yaml, the pins or a limit changed since the last up: the head is set up anew, and running jobs end"
        )
    return f"the head's machine changed in cluster.yaml: {running.id} is replaced, and running jobs end"


def _launch_hash(file: ClusterFile) -> str:
    """Return what Ray compares to decide whether a running head matches the file."""
    from pipeline.ray_support.private import cluster_launcher  # importing Ray takes a second

    return cluster_launcher.launch_hash(file.content, file.head.name)
