"""The `aws` target: cluster.yaml on AWS, started by Ray's launcher. The same code runs inside the emulated AWS."""

import datetime
import json
import subprocess
import time
from collections.abc import Collection, Iterable, Mapping, Sequence

import requests

from raymill import doctor, drain, settings
from raymill.aws import (
    caller,
    capacity,
    capacity_blocks,
    cloud_status,
    consent,
    guard,
    head,
    identity,
    images,
    launcher_file,
    limits,
    load_balancer,
    node_code,
    ownership,
    prepare,
    ray_up,
    reservation,
    secrets_manager,
    ssh,
    teardown,
)
from raymill.aws.deletion import attempt
from raymill.aws.past_jobs import PastJobs
from raymill.aws.saved_logs import SavedLogs
from raymill.common import bucket, instances, prices
from raymill.common.cluster_file import CAPACITY_BLOCK, ClusterFile, target
from raymill.console import Console
from raymill.doctor import Finding
from raymill.env_file import EnvFile
from raymill.errors import UserError
from raymill.instance_types import INSTANCE_TYPES
from raymill.job_context import JobContext
from raymill.node.state import DASHBOARD_PORT
from raymill.ray_support.aws_sections import NetworkSection
from raymill.serving.options import ServeOptions
from raymill.target import CloudStatus, Connection, KeyStore, PastJob, PastLog, Target, WantedBlock

JOIN = "is it yours, too?"
"""Question before a verb uses the cluster of another owner."""


class Aws(Target):
    """A head on AWS, and workers that start when there is work and stop when they are idle."""

    profile = "cluster"

    def __init__(self) -> None:
        self.name = target()

    def doctor(self) -> list[Finding]:
        from raymill.aws.doctor import checks  # takes seconds, because it imports the jobs' options

        return checks.check(launcher_file.load())  # which reports as a finding why identity.load refuses

    def prepare(self, owner: str = "") -> None:
        file = self._file()
        ownership.agree(file, owner, JOIN, f"inv prepare --target {target()}")
        prepare.prepare(file)
        if running := instances.head(file):
            self._admit_people(file)
            load_balancer.register(file, running.id)  # the port or the certificate may have changed

    def up(self, yes: bool, wait: bool = False, owner: str = "") -> None:
        file = self._file()
        ownership.agree(file, owner, JOIN, f"inv up --target {target()}")
        running = instances.head(file)
        changes = _describe_changes(file, running)
        if running and not changes:
            limits.follow_settings(file, yes)
            node_code.follow(file, running)
            secrets_manager.upload(file)
            self._admit_people(file)
            ownership.record(file)
            print(f"{self.name} is already up and matches cluster.yaml: head {running.id}")
            load_balancer.register(file, running.id)
            return
        reserved = reservation.require(file)
        if reserved and not wait:
            reservation.refuse_before_start(reserved)
        _require_no_errors(self.doctor(), self.name)
        Console().print(prices.table(file, prices.ask(file)))
        if costs := settings.load(NetworkSection, "network", profile=self.profile).costs:
            print(costs)
        reservation.show_costs(file)
        print(changes)
        consent.ask("continue?" if running else "start it?", yes, f"inv up --target {target()}")
        reservation.wait_for_start(file)
        started = time.monotonic()
        prepare.prepare(file)
        secrets_manager.upload(file)
        bucket.forget_note(file)
        if running:
            # if this `up` is interrupted, the next one sets the head up again
            head.tag(file, {instances.FILES_TAG: "being set up"})
        copied = node_code.digest()  # before the copy, so that a change during `up` is noticed by the next one
        _run_launcher(file)
        head.wait_until_ready(ssh.find_head(file))
        self._admit_people(file)
        head.tag(file, {instances.FILES_TAG: file.digest, instances.NODE_CODE_TAG: copied})
        guard.follow_head(file)
        took = f"{time.monotonic() - started:.0f} s"
        print(f"{self.name} is up after {took}: the head is running, and workers start when there is work")
        load_balancer.register(file, ssh.find_head(file).instance_id)

    def _file(self) -> ClusterFile:
        """Return the cluster file with the node types that the settings add. Refuses as identity.load does."""
        return launcher_file.resolved(identity.load())

    def _admit_people(self, file: ClusterFile) -> None:
        section = settings.load(NetworkSection, "network", profile=self.profile)
        ssh.add_authorized_keys(ssh.find_head(file), section.ssh_keys)

    def show_capacity(self, wanted: WantedBlock) -> None:
        capacity_blocks.show(identity.load(), wanted, Console())

    def buy_capacity(self, offering: str, yes: bool) -> None:
        capacity_blocks.buy(identity.load(), offering, yes)

    def show_limits(self) -> None:
        limits.show(self._file(), Console())

    def change_limits(self, given: Mapping[str, str], yes: bool) -> None:
        limits.change(self._file(), given, yes)

    def bake(self) -> None:
        if self.shell("cd ~/project && python -m raymill.node.bake"):
            raise UserError(
                "the head's packages were not stored, for the reason above, so new nodes install their packages. Run "
                f"again: inv bake --target {target()}"
            )

    def connect(self) -> Connection:
        file = self._file()
        serve_port = settings.load(ServeOptions, "serve", profile=self.profile).port
        ssh_head = ssh.find_head(file)
        ports, token = ssh_head.tunnel(DASHBOARD_PORT, serve_port)
        dashboard, headers = f"http://127.0.0.1:{ports[DASHBOARD_PORT]}", {"Authorization": f"Bearer {token}"}
        try:
            requests.get(f"{dashboard}/api/version", headers=headers, timeout=30).raise_for_status()
        except requests.RequestException:
            raise UserError(
                f"Ray does not answer on the head {ssh_head.instance_id}. Run: inv up --target {target()}"
            ) from None
        return Connection(
            target=target(),
            dashboard=dashboard,
            headers=headers,
            forwarded_ports={serve_port: ports[serve_port]},
            job_variables={
                **self._context(file, secrets_prefix=f"{file.slug}/").variables(),
                "AWS_DEFAULT_REGION": file.region,
            },
            capacity_variables=lambda: JobContext(
                cluster_nodes=json.dumps(capacity.possible_nodes(file)),
                gang_offers=json.dumps(capacity.offers(file)),
                serve_offers=json.dumps(capacity.serve_offers(file)),
            ).variables(),
            relay_metrics=ssh_head.relay_metrics,
        )

    def storage_variables(self) -> dict[str, str]:
        file = self._file()
        bucket.require(file)
        return self._context(file).variables() | bucket.access(file)

    def _context(self, file: ClusterFile, secrets_prefix: str | None = None) -> JobContext:
        folder = f"s3://{bucket.name(file)}"
        return JobContext(profile=self.profile, project_dir=folder, secrets_prefix=secrets_prefix)

    def shell(self, command: str) -> int:
        ssh_head = ssh.find_head(self._file())
        if command:
            return subprocess.call([*ssh_head.command("-T"), ssh.ENVIRONMENT + command])
        return subprocess.call([*ssh_head.command("-t"), "bash", "-l"])

    def configure_ssh(self) -> None:
        file = self._file()
        entry = ssh.write_config(ssh.find_head(file), file.slug)
        print(f"added the host {file.slug} to your ssh configuration, in {entry}; `inv down` removes it")
        print(f"next: ssh {file.slug}   or in VS Code: Remote-SSH: Connect to Host, {file.slug}")

    def notebook(self) -> str:
        return ssh.find_head(self._file()).notebook()

    def dollars_per_instance_hour(self, types: Collection[str] = ()) -> dict[str, float]:
        file = self._file()
        known, found = prices.ask(file), prices.lowest(file, types)
        for worker in file.workers:
            dollars = known.workers[worker.name]
            if worker.instance_type in INSTANCE_TYPES and worker.market != CAPACITY_BLOCK:
                found[worker.instance_type] = min(dollars, found.get(worker.instance_type, dollars))
        return found

    def cloud_status(self) -> CloudStatus:
        file = self._file()
        return cloud_status.cloud_status(file, head.read_status(ssh.find_head(file)))

    def past_jobs(self) -> list[PastJob]:
        return PastJobs(identity.load()).latest()

    def past_log(self, job_id: str) -> PastLog | None:
        return PastJobs(identity.load()).log(job_id)

    def access_logs(self, since: datetime.datetime) -> Iterable[str]:
        return SavedLogs(identity.load()).access_logs(since)

    def key_stores(self) -> Sequence[KeyStore]:
        on_aws = secrets_manager.KeyList(identity.load())
        return [on_aws, EnvFile()] if (settings.PROJECT / ".env").is_file() else [on_aws]  # up takes those in .env

    def down(self, owner: str = "", drain_s: int = 0) -> list[str]:
        file = identity.load()
        ownership.agree(file, owner, "end it?", f"inv down --target {target()}")
        if drain_s:
            drain.before_down(self, drain_s)
        had_instances = bool(instances.living(file))  # asks only EC2, because machines must end whatever else fails
        if failures := attempt("instances", lambda: teardown.end_instances(file)):
            return [*teardown.leftovers(file), *failures]  # the guard and its stack stay, because they end instances
        existing = had_instances or teardown.leftovers(file)
        failures = [*teardown.delete_orphans(file), *prepare.delete(file), *secrets_manager.delete(file)]
        ssh.remove_config(file.slug)
        left = [*(teardown.leftovers if failures else teardown.settled_leftovers)(file), *failures]
        if not left:
            identity.forget()
            print(
                f"{self.name} is down: no instance, volume, interface, VPC, security group, key, role, secret or "
                f"stack of {file.slug} is left in account {caller.ask(file).account}, {file.region}"
                if existing
                else ownership.describe_nothing(file)
            )
            if bucket.exists(file):
                print(f"the bucket with your work is kept: s3://{bucket.name(file)}")
        reservation.show_costs(file)
        return left


def _run_launcher(file: ClusterFile) -> None:
    """Run `ray up`. Raises `UserError`, which says why EC2 ended the head during its launch, if it did."""
    earlier = {one.id for one in instances.failed_launches(file)}
    try:
        ray_up.up()
    except UserError:
        for one in instances.failed_launches(file):
            if one.node_type == file.head.name and one.id not in earlier:
                raise UserError(
                    f"{cloud_status.describe_failed_launch(one)}. Then run again: inv up --target {target()}"
                ) from None
        raise


def _require_no_errors(findings: list[Finding], target: str) -> None:
    """Show the findings that are not ok. Raises `UserError` if one of them is an error."""
    shown = [finding for finding in findings if finding.status != "ok"]
    print(
        f"doctor: {len(findings) - len(shown)} of {len(findings)} checks are ok. See all: inv doctor --target {target}"
    )
    if not doctor.show(shown, Console()):
        raise UserError(f"nothing was started. Fix the problems marked ✗, then run: inv doctor --target {target}")


def _describe_changes(file: ClusterFile, running: instances.Instance | None) -> str:
    """Return a sentence that says what `up` will do, or "" if it has nothing to do."""
    if running is None:
        orphans = len(instances.living(file))
        return "a head will start" + (f" and take over {orphans} instances that have no head" if orphans else "")
    if running.tags.get(instances.FILES_TAG) == file.digest:
        if head.runs(ssh.find_head(file)):
            return ""
        return (
            f"Ray, its autoscaler or the watchdog is not running on the head {running.id}, so the head will be set up "
            "again"
        )
    if running.tags.get("ray-launch-config") == _launch_hash(images.keep(file, running)):
        return (
            "cluster.yaml or the pins changed, or the last up was interrupted, so the head will be set up again, which "
            "ends running jobs"
        )
    return f"the head's instance changed in cluster.yaml, so {running.id} will be replaced, which ends running jobs"


def _launch_hash(file: ClusterFile) -> str:
    """Return the hash by which Ray decides whether it must replace a running head."""
    from raymill.ray_support.private import cluster_launcher  # importing Ray takes a second

    types = file.content["available_node_types"]
    head_only = {file.head.name: types[file.head.name]}  # the launch templates of other types may not exist yet
    return cluster_launcher.launch_hash(file.content | {"available_node_types": head_only}, file.head.name)
