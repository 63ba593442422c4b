"""The emulated cloud: one process that answers AWS calls and runs each instance as a host (see host.py).

It is process 1 of its namespaces (see sandbox.py), so its network, mounts and hosts always end with it.
"""

import dataclasses
import datetime
import json
import os
import pwd
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

# moto reads this variable on import
os.environ["MOTO_IAM_LOAD_MANAGED_POLICIES"] = "true"

from moto.ec2.models import ec2_backends
from moto.iam.models import iam_backends
from werkzeug.serving import WSGIRequestHandler, make_server

from raymill import settings
from raymill.aws import identity
from raymill.emulator import consistency, host_image, moto_instances, stack_states
from raymill.emulator.addresses import CHECK_IP_PORT, CONTROL_PORT, ENDPOINT, GATEWAY
from raymill.emulator.api import Api, InjectedFaults, StartResponse
from raymill.emulator.host import Host
from raymill.emulator.launches import LaunchFailures
from raymill.emulator.metadata import MetadataService
from raymill.emulator.moto_instances import ACCOUNT, OTHER_ACCOUNT, MotoInstance
from raymill.emulator.reservations import Reservations
from raymill.emulator.schedules import Schedules
from raymill.instance_types import INSTANCE_TYPES

SCRATCH = Path("/tmp")  # the cloud has a private tmpfs here
HOME = SCRATCH / "home"
READY = SCRATCH / "ready"
USERS = {"default": (ACCOUNT, "laptop"), "colleague": (ACCOUNT, "colleague"), "other": (OTHER_ACCOUNT, "laptop")}
"""Maps each profile in ~/.aws to an account and an administrator in it."""
LAPTOP_IP = "203.0.113.7"  # the laptop's public address, from a range that is reserved for documentation (RFC 5737)


class Cloud:
    """Boots a host for each running instance. When either one ends, the cloud ends the other."""

    def __init__(
        self, layers: str, shared_paths: list[str], reservations: Reservations, launch_failures: LaunchFailures
    ) -> None:
        self.layers = layers
        self.shared_paths = shared_paths
        self.reservations = reservations
        self.launch_failures = launch_failures
        self.hosts: dict[str, Host] = {}
        self.events: list[dict[str, Any]] = []
        self.broken_machines = 0
        """How many of the next machines with GPUs lack one."""
        self._busy: set[str] = set()
        self._pool = ThreadPoolExecutor(8)

    def run_forever(self) -> None:
        while True:
            for instance in moto_instances.list_all():
                if instance.id not in self._busy:
                    self._reconcile(instance)
            time.sleep(0.1)

    def record(self, instance_id: str, what: str) -> None:
        """Record an event for the timeline that `inv rehearse` shows."""
        self.events.append({"at": time.time(), "instance": instance_id, "what": what})

    def reboot(self, instance_id: str) -> None:
        """Reboot a host, as RebootInstances does."""
        self.record(instance_id, "reboots")
        self._in_background(instance_id, self.hosts[instance_id].reboot)

    def _reconcile(self, instance: MotoInstance) -> None:
        host = self.hosts.get(instance.id)
        if instance.state == "running" and host is None:
            if self.launch_failures.end(instance):
                self.record(instance.id, f"ended during its launch: {instance.moto.state_reason.code}")
                return
            self._in_background(instance.id, lambda: self._boot(instance))
        elif instance.state == "running" and host and not host.is_alive():
            instance.moto.terminate()  # InstanceInitiatedShutdownBehavior: terminate
        elif self.reservations.end(instance):
            self.record(instance.id, "its Capacity Block ends")
        elif instance.state in ("shutting-down", "terminated", "stopped") and host:
            self._in_background(instance.id, lambda: self._stop(instance.id, host))

    def _in_background(self, instance_id: str, work: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                work()
            except Exception as error:  # nothing else reports the errors of a thread
                print(f"{instance_id}: {error!r}", file=sys.stderr, flush=True)
            finally:
                self._busy.discard(instance_id)

        self._busy.add(instance_id)
        self._pool.submit(guarded)

    def _boot(self, instance: MotoInstance) -> None:
        gpu_type = INSTANCE_TYPES.get(instance.type)
        is_broken = bool(gpu_type and self.broken_machines)
        self.broken_machines -= is_broken
        host = Host(
            folder=SCRATCH / "hosts" / instance.id,
            instance_id=instance.id,
            private_ip=instance.private_ip,
            public_ip=instance.public_ip,
            has_internet=bool(moto_instances.internet_gateway(instance)),
            public_key=instance.public_key,
            user_data=instance.user_data,
            gpus=gpu_type.gpus - is_broken if gpu_type else 0,
            has_nvme=bool(gpu_type and gpu_type.nvme_gb),
            layers=self.layers,
            shared_paths=self.shared_paths,
        )
        self.hosts[instance.id] = host
        self.record(instance.id, f"{instance.type} launched, {instance.market}, in {instance.zone}")
        host.boot()
        self.record(instance.id, "answers on port 22")

    def _stop(self, instance_id: str, host: Host) -> None:
        self.record(instance_id, "terminated")
        host.stop()
        del self.hosts[instance_id]


class ControlApi:
    """The control API on the cloud's loopback, for `inv rehearse` and the fault tests. AWS has no counterpart.

    GET returns the cloud's state. PUT calls `_control` with the JSON body as keyword arguments, then returns the state.
    """

    def __init__(self, cloud: Cloud, api: Api, metadata: MetadataService, ends: consistency.SlowEnds) -> None:
        self.cloud, self.api, self.metadata, self.ends = cloud, api, metadata, ends

    def __call__(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        if environ["REQUEST_METHOD"] == "PUT":
            self._control(**json.loads(body))
        answer = json.dumps(
            {
                "instances": [
                    {field: value for field, value in vars(one).items() if isinstance(value, str | dict)}
                    | {"host": one.id in self.cloud.hosts}
                    for one in moto_instances.list_all()
                ],
                "events": self.cloud.events,
                "calls": self.api.as_json(),
                "faults": dataclasses.asdict(self.api.faults),
            }
        ).encode()
        start_response("200 OK", [("Content-Type", "application/json")])
        return [answer]

    def _control(
        self,
        *,
        faults: dict[str, Any] | None = None,
        interrupt: str = "",
        notice_s: float = 120,
        age_leases_s: float = 0,
        reboot: str = "",
        fill_disk: str = "",
        reservation: dict[str, Any] | None = None,
        broken_machines: int = 0,
        without_volumes: int = 0,
        end_s: float | None = None,
        stack_s: float | None = None,
        gone: dict[str, int] | None = None,
    ) -> None:
        """Set the faults, interrupt a spot instance after a notice, backdate all leases, reboot an instance, fill an
        instance's disk, change a reservation, let the next machines with GPUs lack one or fail during their launch, set
        how long machines take to end and operations on stacks take, or which of the next deletions find nothing.

        `reservation` has the arguments of `Reservations.put`. Its hosts get the new end, as if time had passed.
        """
        if faults is not None:
            self.api.faults = InjectedFaults(**faults)
        if interrupt:
            (instance,) = [one for one in moto_instances.list_all() if one.id == interrupt]
            when = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=notice_s)
            self.metadata.spot_notices[interrupt] = when
            self.cloud.record(interrupt, f"spot interruption notice: ends in {notice_s:.0f} s")
            threading.Timer(notice_s, instance.moto.terminate).start()
        for host in list(self.cloud.hosts.values()) if age_leases_s else []:
            host.age_lease(age_leases_s)
        if reboot:
            self.cloud.reboot(reboot)
        if fill_disk:
            self.cloud.hosts[fill_disk].fill_disk()
        self.cloud.broken_machines += broken_machines
        self.cloud.launch_failures.without_volumes += without_volumes
        if end_s is not None:
            self.ends.seconds = end_s
        if stack_s is not None:
            self.api.stacks.seconds = stack_s
        self.api.deletions.gone.update(gone or {})
        if reservation is not None:
            self.api.reservations.put(**reservation)
            for instance_id, host in list(self.cloud.hosts.items()):
                own = self.api.reservations.of(instance_id)
                if own and own.end:
                    host.move_block_end(own.end.isoformat())


class _CheckIp:
    """Returns the laptop's address, as https://checkip.amazonaws.com does."""

    def __call__(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        start_response("200 OK", [("Content-Type", "text/plain")])
        return [f"{LAPTOP_IP}\n".encode()]


class _RequestHandler(WSGIRequestHandler):
    """Keeps connections open, and logs no requests."""

    protocol_version = "HTTP/1.1"

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        pass


def run(region: str, pins: Path) -> None:
    """Run the cloud until it is killed.

    `pins` is a requirements file. Hosts use it instead of requirements/cluster.txt, whose packages need CUDA.
    """
    _disable_dns()
    _create_network()
    layer = SCRATCH / "image"
    host_image.build(layer, ENDPOINT)
    layers = host_image.lower_layers(layer, SCRATCH)
    _bind_mount(settings.PROJECT / "requirements" / "cluster.txt", pins)
    _create_accounts(region)
    _set_home()
    api, metadata, ends = Api(), MetadataService(), consistency.SlowEnds()
    consistency.install_slow_ends(ends)
    moto_instances.install_unique_addresses()
    api.stacks.seconds = stack_states.DURATION_S
    cloud = Cloud(layers, host_image.shared_paths(), api.reservations, api.launch_failures)
    for host, port, application in (
        (GATEWAY, 80, api),
        ("169.254.169.254", 80, metadata),
        ("127.0.0.1", CONTROL_PORT, ControlApi(cloud, api, metadata, ends)),
        (GATEWAY, CHECK_IP_PORT, _CheckIp()),
    ):
        server = make_server(host, port, application, threaded=True, request_handler=_RequestHandler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
    threading.Thread(target=Schedules(ENDPOINT).run_forever, daemon=True).start()
    READY.touch()
    cloud.run_forever()


def _disable_dns() -> None:
    """Make lookups of names fail at once. This machine's name server cannot be reached, so they would take seconds."""
    if Path("/etc/resolv.conf").exists():
        empty = SCRATCH / "resolv.conf"
        empty.touch()
        _bind_mount(Path("/etc/resolv.conf"), empty)


def _create_network() -> None:
    """Create the bridge: the VPC's router, with the addresses of AWS's endpoint and of the metadata service."""
    for command in (
        "ip link set lo up",
        # a fixed MAC; by default, a bridge takes the lowest MAC of its ports, and a change stops traffic for seconds
        "ip link add br0 address 02:00:ac:1f:ff:01 type bridge",
        f"ip addr add {GATEWAY}/16 dev br0",
        "ip addr add 169.254.169.254/32 dev br0",
        "ip link set br0 up",
        "ip route add 10.0.0.0/8 dev br0",  # every VPC that is not the default one
    ):
        subprocess.run(command.split(), check=True)


def _create_accounts(region: str) -> None:
    """Create the users of USERS and their profiles, and two regions with images, in which clusters can start."""
    identity.record_of("rehearsal").unlink(missing_ok=True)  # that of an earlier cloud
    config, credentials = [], []
    for profile, (account, user) in USERS.items():
        iam = iam_backends[account]["aws"]
        iam.create_user(region, user)
        iam.attach_user_policy("arn:aws:iam::aws:policy/AdministratorAccess", user)
        key = iam.create_access_key(user)
        section = profile if profile == "default" else f"profile {profile}"
        config += [f"[{section}]", f"region = {region}", f"endpoint_url = {ENDPOINT}"]
        credentials += [f"[{profile}]", f"aws_access_key_id = {key.access_key_id}"]
        credentials += [f"aws_secret_access_key = {key.secret_access_key}"]
    for account in (ACCOUNT, OTHER_ACCOUNT):
        _create_spot_role(iam_backends[account]["aws"])
        for one in (region, other_region(region)):
            moto_instances.publish_image(one, moto_instances.IMAGE, account)
            _connect_default_vpc(account, one)
    folder = HOME / ".aws"
    folder.mkdir(parents=True)
    (folder / "config").write_text("\n".join(config) + "\n")
    (folder / "credentials").write_text("\n".join(credentials) + "\n")


def other_region(region: str) -> str:
    """Return the second region in which clusters can start."""
    return "us-west-2" if region != "us-west-2" else "us-east-1"


def _connect_default_vpc(account: str, region: str) -> None:
    """Give the default VPC the internet gateway that it has on AWS."""
    ec2 = ec2_backends[account][region]
    (vpc,) = ec2.describe_vpcs(filters={"is-default": "true"})
    (table,) = ec2.describe_route_tables(filters={"vpc-id": vpc.id})
    gateway = ec2.create_internet_gateway()
    ec2.attach_internet_gateway(gateway.id, vpc.id)
    ec2.create_route(table.id, "0.0.0.0/0", gateway_id=gateway.id)


def _create_spot_role(iam: Any) -> None:
    """Create the role that AWS creates when an account first requests a spot instance."""
    iam.create_role(
        "AWSServiceRoleForEC2Spot", "{}", "/aws-service-role/spot.amazonaws.com/", None, "", [], "3600", None
    )


def _set_home() -> None:
    """Set the user's home in /etc/passwd, because ssh ignores HOME. Only processes in the cloud see the change."""
    user = pwd.getpwuid(os.getuid())
    passwd = SCRATCH / "passwd"
    lines = Path("/etc/passwd").read_text().splitlines(keepends=True)
    passwd.write_text(
        "".join(
            line.replace(f":{user.pw_dir}:", f":{HOME}:") if line.startswith(f"{user.pw_name}:") else line
            for line in lines
        )
    )
    _bind_mount(Path("/etc/passwd"), passwd)


def _bind_mount(path: Path, source: Path) -> None:
    """Mount `source` over `path`. Only processes in the cloud see the change."""
    subprocess.run(["mount", "--bind", source, path], check=True)


if __name__ == "__main__":
    run(sys.argv[1], Path(sys.argv[2]))
