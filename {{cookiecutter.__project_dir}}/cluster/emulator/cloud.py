"""The emulated cloud: one process that answers as AWS does and runs every instance as a real host.

It is process 1 of namespaces of its own (see sandbox.py): its network, mounts and hosts end with it, however it ends.
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

# before moto is imported, which reads it
os.environ["MOTO_IAM_LOAD_MANAGED_POLICIES"] = "true"

from moto.iam.models import iam_backends
from moto.ssm.models import Parameter, ssm_backends
from werkzeug.serving import WSGIRequestHandler, make_server

import settings
from cluster.emulator import image, instances
from cluster.emulator.addresses import CALLER_ADDRESS_PORT, CONTROL_PORT, ENDPOINT, GATEWAY
from cluster.emulator.api import Api, Faults, StartResponse
from cluster.emulator.hosts import Host
from cluster.emulator.metadata import Metadata

SCRATCH = Path("/tmp")  # a tmpfs of the cloud's own
HOME = SCRATCH / "home"
READY = SCRATCH / "ready"
IMAGE_PARAMETER = (
    "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id"  # moto has it not
)
IMAGE = "ami-12c6146b"  # any that moto knows: what boots is image.py's
CALLER = "203.0.113.7"  # what this machine is to the cloud, from outside; an address for documentation (RFC 5737)


class Cloud:
    """Hosts for instances: boots one for each that runs, and ends it when the instance ends."""

    def __init__(self, layers: str, shared: list[str]) -> None:
        self.layers = layers
        self.shared = shared
        self.hosts: dict[str, Host] = {}
        self.events: list[dict[str, Any]] = []
        self._busy: set[str] = set()
        self._pool = ThreadPoolExecutor(8)

    def reconcile_for_ever(self) -> None:
        while True:
            for instance in instances.every():
                if instance.id not in self._busy:
                    self._reconcile(instance)
            time.sleep(0.1)

    def note(self, instance_id: str, what: str) -> None:
        """Keep an event for the play's timeline."""
        self.events.append({"at": time.time(), "instance": instance_id, "what": what})

    def _reconcile(self, instance: instances.Instance) -> None:
        host = self.hosts.get(instance.id)
        if instance.state == "running" and host is None:
            self._start(instance.id, lambda: self._boot(instance))
        elif instance.state == "running" and host and not host.is_alive():
            instance.moto.terminate()  # it shut itself down: InstanceInitiatedShutdownBehavior is terminate
        elif instance.state in ("terminated", "stopped") and host:
            self._start(instance.id, lambda: self._end(instance.id, host))

    def _start(self, instance_id: str, work: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                work()
            except Exception as error:  # in a thread, where nobody else would see it
                print(f"{instance_id}: {error!r}", file=sys.stderr, flush=True)
            finally:
                self._busy.discard(instance_id)

        self._busy.add(instance_id)
        self._pool.submit(guarded)

    def _boot(self, instance: instances.Instance) -> None:
        host = Host(
            folder=SCRATCH / "hosts" / instance.id,
            instance_id=instance.id,
            private_ip=instance.private_ip,
            public_ip=instance.public_ip,
            public_key=instance.public_key,
            user_data=instance.user_data,
            layers=self.layers,
            shared=self.shared,
        )
        self.hosts[instance.id] = host
        self.note(instance.id, f"{instance.type} launched, {instance.market}, in {instance.zone}")
        host.boot()
        self.note(instance.id, "answers on port 22")

    def _end(self, instance_id: str, host: Host) -> None:
        self.note(instance_id, "terminated")
        host.end()
        del self.hosts[instance_id]


class Control:
    """What the rehearsal's own verbs and tests ask of the cloud, on its loopback. AWS has nothing like it."""

    def __init__(self, cloud: Cloud, api: Api, metadata: Metadata) -> None:
        self.cloud, self.api, self.metadata = cloud, api, metadata

    def __call__(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        if environ["REQUEST_METHOD"] == "PUT":
            self._do(**json.loads(body))
        answer = json.dumps(
            {
                "instances": [
                    {field: value for field, value in vars(one).items() if isinstance(value, str | dict)}
                    | {"host": one.id in self.cloud.hosts}
                    for one in instances.every()
                ],
                "events": self.cloud.events,
                "calls": self.api.as_json(),
                "faults": dataclasses.asdict(self.api.faults),
            }
        ).encode()
        start_response("200 OK", [("Content-Type", "application/json")])
        return [answer]

    def _do(
        self,
        *,
        faults: dict[str, Any] | None = None,
        take_back: str = "",
        notice_s: float = 120,
        age_leases_s: float = 0,
    ) -> None:
        """Let capacity run out, take a spot machine back after the notice that AWS gives, or skip time for leases."""
        if faults is not None:
            self.api.faults = Faults(**faults)
        if take_back:
            (instance,) = [one for one in instances.every() if one.id == take_back]
            when = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=notice_s)
            self.metadata.spot_notices[take_back] = when
            self.cloud.note(take_back, f"is told that it is taken back in {notice_s:.0f} s")
            threading.Timer(notice_s, instance.moto.terminate).start()
        for host in list(self.cloud.hosts.values()) if age_leases_s else []:
            host.age_lease(age_leases_s)


class _Caller:
    """What https://checkip.amazonaws.com answers."""

    def __call__(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        start_response("200 OK", [("Content-Type", "text/plain")])
        return [f"{CALLER}\n".encode()]


class _Silent(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"  # connections stay open: each call would cost one otherwise

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        pass


def run(region: str, pins: Path) -> None:
    """Be the cloud, until killed.

    `pins` is what the hosts install in the place of requirements/cluster.txt, whose CUDA packages are not here.
    """
    _network()
    layer = SCRATCH / "image"
    image.build(layer, ENDPOINT)
    layers = image.lower_layers(layer, SCRATCH)
    _cover(settings.PROJECT / "requirements" / "cluster.txt", pins)
    _account(region)
    _laptop()
    cloud, api, metadata = Cloud(layers, image.shared_paths()), Api(), Metadata()
    for host, port, application in (
        (GATEWAY, 80, api),
        ("169.254.169.254", 80, metadata),
        ("127.0.0.1", CONTROL_PORT, Control(cloud, api, metadata)),
        (GATEWAY, CALLER_ADDRESS_PORT, _Caller()),
    ):
        server = make_server(host, port, application, threaded=True, request_handler=_Silent)
        threading.Thread(target=server.serve_forever, daemon=True).start()
    READY.touch()
    cloud.reconcile_for_ever()


def _network() -> None:
    """A bridge that is the VPC's router, the endpoint and the metadata service in one."""
    for command in (
        "ip link set lo up",
        # without an address of its own, a bridge takes over that of its lowest port, and neighbours lose it for seconds
        "ip link add br0 address 02:00:ac:1f:ff:01 type bridge",
        f"ip addr add {GATEWAY}/16 dev br0",
        "ip addr add 169.254.169.254/32 dev br0",
        "ip link set br0 up",
    ):
        subprocess.run(command.split(), check=True)


def _account(region: str) -> None:
    """What an AWS account has before anything is prepared: an administrator, and public image parameters."""
    iam = iam_backends[instances.ACCOUNT]["aws"]
    iam.create_user(region, "laptop")
    iam.attach_user_policy("arn:aws:iam::aws:policy/AdministratorAccess", "laptop")
    key = iam.create_access_key("laptop")
    _spot_was_used_before(iam)
    parameter = Parameter(
        account_id=instances.ACCOUNT,
        name=IMAGE_PARAMETER,
        value=IMAGE,
        parameter_type="String",
        description=None,
        allowed_pattern=None,
        keyid=None,
        last_modified_date=datetime.datetime.now(datetime.UTC),
        version=1,
        data_type="aws:ec2:image",
    )
    # moto's own way to set one refuses what begins with /aws, as AWS does
    parameters: Any = ssm_backends[instances.ACCOUNT][region]._parameters
    parameters[IMAGE_PARAMETER].append(parameter)
    folder = HOME / ".aws"
    folder.mkdir(parents=True)
    (folder / "config").write_text(f"[default]\nregion = {region}\nendpoint_url = {ENDPOINT}\n")
    (folder / "credentials").write_text(
        f"[default]\naws_access_key_id = {key.access_key_id}\naws_secret_access_key = {key.secret_access_key}\n"
    )


def _spot_was_used_before(iam: Any) -> None:
    """AWS makes this role when an account first asks for a spot machine."""
    iam.create_role(
        "AWSServiceRoleForEC2Spot", "{}", "/aws-service-role/spot.amazonaws.com/", None, "", [], "3600", None
    )


def _laptop() -> None:
    """Give the user of this machine another home in the cloud's mounts: ssh looks there, and not where HOME says."""
    user = pwd.getpwuid(os.getuid())
    passwd = SCRATCH / "passwd"
    lines = Path("/etc/passwd").read_text().splitlines(keepends=True)
    passwd.write_text(
        "".join(
            line.replace(f":{user.pw_dir}:", f":{HOME}:") if line.startswith(f"{user.pw_name}:") else line
            for line in lines
        )
    )
    _cover(Path("/etc/passwd"), passwd)


def _cover(path: Path, by: Path) -> None:
    """Show `by` in the place of `path`, in the cloud's mounts only."""
    subprocess.run(["mount", "--bind", by, path], check=True)


if __name__ == "__main__":
    run(sys.argv[1], Path(sys.argv[2]))
