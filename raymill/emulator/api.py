"""AWS's endpoint in the emulated cloud: a WSGI wrapper around moto's server.

The wrapper adds what moto lacks:
- It checks the signature of each call, and the caller's policies with their conditions.
- RunInstances starts up to MaxCount instances, and all of them get the instance profile. moto starts MinCount
  instances, and only the first gets the profile.
- Capacity can run out, and quotas can be too small.
- A zone refuses instance types that it does not offer (see launches.py).
- Some effects of a call are visible only later (see consistency.py).
- EC2 rejects calls at a higher rate than its limits (see throttling.py).
- Instances can start in capacity reservations (see reservations.py).
- EC2 ends some instances during their launch (see launches.py).
- It refuses launches as EC2 does (see launches.py), schedules as EventBridge Scheduler does (see schedules.py), and
  stacks with what is not modeled (see stack_resources.py).
- Resources vanish before they are deleted, or are still in use (see deletions.py).
- Operations on stacks take time (see stack_states.py), replace resources, and need permissions (see stack_updates.py).
- It answers calls that moto does not support (see stubs.py), and records every call.
"""

import io
import json
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from moto.ec2.models import ec2_backends
from moto.ec2.models.instance_types import INSTANCE_TYPES
from moto.server import DomainDispatcherApplication, create_backend_app

from raymill.aws import quotas
from raymill.emulator import (
    iam,
    launches,
    moto_instances,
    permissions,
    reservations,
    schedules,
    stack_resources,
    stack_states,
    stubs,
    throttling,
)
from raymill.emulator.consistency import CONFLICT, Consistency
from raymill.emulator.deletions import Deletions
from raymill.emulator.launches import LaunchFailures
from raymill.emulator.reservations import Reservations
from raymill.emulator.throttling import Throttle

StartResponse = Callable[[str, list[tuple[str, str]]], Any]


@dataclass(frozen=True)
class Call:
    """One recorded request."""

    at: float
    """Seconds since the epoch."""
    service: str
    action: str
    region: str
    source_ip: str
    parameters: dict[str, Any]
    caller: str = ""
    """ARN of the caller; empty if authentication failed."""
    permissions: list[iam.Permission] = field(default_factory=list)
    """The permissions that the call needs."""
    error_code: str = ""
    """AWS's error code, if the wrapper rejected the call."""

    @property
    def account(self) -> str:
        return iam.account_of(self.caller)

    @property
    def place(self) -> str:
        """The account and the region, which have separate resources."""
        return f"{self.account} {self.region}"


@dataclass
class InjectedFaults:
    """The faults to inject. Tests set them through the control API (see cloud.ControlApi)."""

    no_capacity: list[dict[str, Any]] = field(default_factory=list)
    """Which launches run out of capacity. An entry's keys `zone`, `market` ("spot" or "on-demand") and `type` select
    launches; a missing key matches all. `available` is the number of instances that can still start (default 0)."""
    quotas: dict[str, float | None] = field(default_factory=dict)
    """Values of quotas by their codes. None: AWS has no such quota. Those on vCPUs are enforced."""
    not_offered: list[dict[str, str]] = field(default_factory=list)
    """Pairs of `type` and `zone` that EC2 no longer offers (see launches.py)."""
    disabled_regions: list[str] = field(default_factory=list)
    """Regions that are not enabled in the account."""
    clock_s: float = 0.0
    """How far AWS's clock is ahead of this machine's."""
    organization_denies: list[str] = field(default_factory=list)
    """Patterns of actions that a service control policy denies."""
    prices: str = ""
    """Code of the error with which AWS answers questions about prices, such as "ThrottlingException"."""

    def allocate(self, launch: dict[str, str], count: int) -> int:
        """Return how many of `count` instances a launch gets. `launch` has the keys zone, market and type."""
        for entry in self.no_capacity:
            if all(entry.get(key, value) == value for key, value in launch.items()):
                allocated = min(count, entry.get("available", 0))
                entry["available"] = entry.get("available", 0) - allocated
                return allocated
        return count


class Api:
    """The WSGI application that answers calls to all AWS services."""

    def __init__(self) -> None:
        self.moto = DomainDispatcherApplication(create_backend_app)
        self.calls: list[Call] = []
        self.faults = InjectedFaults()
        self.throttle = Throttle()
        self.consistency = Consistency()
        self.reservations = Reservations()
        self.launch_failures = LaunchFailures()
        self.used_codes: set[str] = set()
        self.stacks = stack_states.StackStates()
        self.deletions = Deletions()
        self._lock = threading.Lock()
        self._stack_lock = threading.Lock()  # moto shows a stack before its creation is complete

    def __call__(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        body = _read_body(environ)
        call = _parse(environ, body)
        self.stacks.end_due()
        with self._stack_lock if call.service == "cloudformation" else nullcontext():
            return self._answer(call, environ, body, start_response)

    def _answer(
        self, call: Call, environ: dict[str, Any], body: bytes, start_response: StartResponse
    ) -> Iterable[bytes]:
        try:
            throttling.check_clock(environ, call.service, self.faults.clock_s)
            throttling.check_region(call.service, call.region, self.faults.disabled_regions)
            self.throttle.check(call.service, call.action)
            principal = iam.authenticate(environ, body)
            call = replace(call, caller=principal.arn)
            call = replace(call, permissions=_permissions(call, environ, body))
            iam.authorize(principal, call.permissions, self.faults.organization_denies)
            if self.faults.prices and call.action in ("GetProducts", "DescribeSpotPriceHistory"):
                raise iam.AwsError(self.faults.prices.removesuffix("Exception"), "Injected by a test")
            if code := call.parameters.get("TokenCode"):
                iam.use_code(code, self.used_codes)
            self.consistency.check(call.action, call.parameters, call.place)
            if call.service == "s3":
                permissions.refuse_foreign_bucket(principal.account, environ["PATH_INFO"])
            self.deletions.check(call.action)
            if call.service == "s3" and environ["REQUEST_METHOD"] in ("PUT", "DELETE"):
                self.consistency.check_write(environ)
            if call.service == "scheduler" and environ["REQUEST_METHOD"] in ("POST", "PUT"):
                schedules.check(json.loads(body))
            if "TemplateBody" in call.parameters:
                stack_resources.refuse_unmodeled(json.loads(call.parameters["TemplateBody"]))
            text = self._respond(call, principal)
            if call.action == "RunInstances":
                body = _with_count(body, self._allocate(call))
        except iam.AwsError as error:
            self._record(replace(call, error_code=error.code))
            return _send_error(call.service, error, start_response)
        self._record(call)
        if text is not None:
            return _send("200 OK", text, start_response)
        late = self.deletions.late(call.action)
        environ |= {"wsgi.input": io.BytesIO(body), "CONTENT_LENGTH": str(len(body))}
        answer = self.moto(environ, start_response if late is None else lambda *args: None)
        if late:
            return _send_error(call.service, late, start_response)
        if call.action == "RunInstances":
            started = moto_instances.complete(call.account, call.region, call.parameters)
            self.consistency.note_launch(started)
            self.launch_failures.note_launch(call.region, principal, started)
            self.reservations.note_launch(call.parameters.get(reservations.TARGET), started)
        if call.service == "cloudformation":
            self.stacks.note(call.action, call.region, call.parameters, call.account)
        if call.action == "ListSecrets":
            answer = [b"".join(answer)]
            self.consistency.keep_list(call.parameters, answer[0], call.place)
        return answer

    def _respond(self, call: Call, principal: iam.Principal) -> str | None:
        """Return the response to a call that moto does not support, or a stale one, or None. Raises `iam.AwsError`."""
        if (stale := self.consistency.stale_list(call.action, call.parameters, call.place)) is not None:
            return stale.decode()
        if call.service == "ec2":
            text = self.reservations.respond(call.action, call.region, call.parameters, call.account)
            if text is not None:
                return text
        if call.service == "cloudformation":
            return self.stacks.begin(call.action, call.region, call.parameters, principal)
        if call.action == "DescribeInstanceTypeOfferings":
            return launches.describe_offerings(call.region, call.parameters, self.faults.not_offered)
        if call.action == "GetServiceQuota":
            return stubs.service_quota(call.parameters["QuotaCode"], self.faults.quotas)
        return stubs.respond(call.service, call.action, call.region, call.parameters, principal)

    def as_json(self) -> list[dict[str, Any]]:
        """Return all calls so far as dictionaries, oldest first."""
        with self._lock:
            return [asdict(call) for call in self.calls]

    def _record(self, call: Call) -> None:
        with self._lock:
            self.calls.append(call)

    def _allocate(self, call: Call) -> int:
        """Return how many instances a launch gets: between MinCount and MaxCount, as on EC2."""
        launch = {
            "zone": _zone_of(call.account, call.parameters),
            "market": call.parameters.get("InstanceMarketOptions.MarketType", "on-demand"),
            "type": call.parameters.get("InstanceType", ""),
        }
        launches.check(call.region, call.parameters, call.account)
        launches.check_zone(call.region, launch["type"], launch["zone"], self.faults.not_offered)
        reservation = call.parameters.get(reservations.TARGET, "")
        if reservation or launch["market"] == "capacity-block":
            return self.reservations.admit(launch, reservation, call.parameters, call.account)
        self._check_quota(call, launch["type"], launch["market"])
        allocated = self.faults.allocate(launch, int(call.parameters["MaxCount"]))
        if allocated < int(call.parameters["MinCount"]):
            raise iam.AwsError(
                "InsufficientInstanceCapacity",
                f"We currently do not have sufficient {launch['type']} capacity in the Availability Zone you requested "
                f"({launch['zone']}).",
            )
        return allocated

    def _check_quota(self, call: Call, instance_type: str, market: str) -> None:
        """Refuse a launch beyond a quota that a test has set, with the errors of EC2.

        https://docs.aws.amazon.com/AWSEC2/latest/APIReference/errors-overview.html
        """
        quota = quotas.of(instance_type, market)
        vcpus = self.faults.quotas.get(quota.code) if quota else None
        if quota is None or vcpus is None:
            return
        own = [one for one in moto_instances.list_all() if (one.account, one.region) == (call.account, call.region)]
        running = [one for one in own if one.state in ("pending", "running") and quota.counts(one.type, one.market)]
        types = [one.type for one in running] + [instance_type] * int(call.parameters["MinCount"])
        if sum(INSTANCE_TYPES[name]["VCpuInfo"]["DefaultVCpus"] for name in types) <= vcpus:
            return
        if market == "spot":
            raise iam.AwsError("MaxSpotInstanceCountExceeded", "Max spot instance count exceeded")
        raise iam.AwsError(
            "VcpuLimitExceeded",
            f"You have requested more vCPU capacity than your current vCPU limit of {vcpus:g} allows for the instance "
            "bucket that the specified instance type belongs to.",
        )


def _zone_of(account: str, parameters: dict[str, str]) -> str:
    """Return the availability zone of the subnet in a RunInstances call, or "" if there is no such subnet."""
    subnet = parameters.get("SubnetId") or parameters.get("NetworkInterface.1.SubnetId")
    for backend in ec2_backends[account].values():
        for zone, subnets in backend.subnets.items():
            if subnet in subnets:
                return zone
    return ""


def _read_body(environ: dict[str, Any]) -> bytes:
    """Return the entire body. If it is chunked, delete the variables that say so from `environ`."""
    chunked = environ.pop("HTTP_TRANSFER_ENCODING", "") and environ.pop("wsgi.input_terminated", False)
    return environ["wsgi.input"].read(*([] if chunked else [int(environ.get("CONTENT_LENGTH") or 0)]))


def _parse(environ: dict[str, Any], body: bytes) -> Call:
    authorization = environ.get("HTTP_AUTHORIZATION") or ""
    _, _, region, service = [*authorization.partition("Credential=")[2].split("/")[:4], "", "", "", ""][:4]
    parameters: dict[str, Any] = {}
    action = (environ.get("HTTP_X_AMZ_TARGET") or "").rpartition(".")[2]
    if action:
        parameters = json.loads(body or b"{}")
        parameters.pop("SecretString", None)  # calls are saved to a file, which must contain no secrets
    elif b"Action=" in body:
        parameters = dict(urllib.parse.parse_qsl(body.decode(), keep_blank_values=True))
        action = parameters["Action"]
    return Call(
        at=time.time(),
        service=service,
        action=action or f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}",
        region=region,
        source_ip=environ.get("REMOTE_ADDR", ""),
        parameters=parameters,
    )


def _with_count(body: bytes, count: int) -> bytes:
    """Return the request's body with MinCount and MaxCount set to `count`, because moto starts MinCount instances."""
    parameters = dict(urllib.parse.parse_qsl(body.decode(), keep_blank_values=True))
    return urllib.parse.urlencode(parameters | {"MinCount": count, "MaxCount": count}).encode()


def _permissions(call: Call, environ: dict[str, Any], body: bytes) -> list[iam.Permission]:
    http = {
        "method": environ["REQUEST_METHOD"],
        "path": environ["RAW_URI"].partition("?")[0],
        "query": environ["QUERY_STRING"],
        "body": body,
    }
    return permissions.required_by(call.service, call.action, call.region, call.parameters, http, call.account)


def _send_error(service: str, error: iam.AwsError, start_response: StartResponse) -> list[bytes]:
    """Send the error in the format of the service."""
    if service in ("ec2", ""):  # "": the call is not signed, so its service is unknown
        code = "UnauthorizedOperation" if error.code == "AccessDenied" else error.code
        xml = f"<Errors><Error><Code>{code}</Code><Message>{error.message}</Message></Error></Errors>"
        return _send("403 Forbidden", f"<Response>{xml}<RequestID>0</RequestID></Response>", start_response)
    if service == "s3":
        xml = f"<Error><Code>{error.code}</Code><Message>{error.message}</Message></Error>"
        return _send("409 Conflict" if error.code == CONFLICT else "403 Forbidden", xml, start_response)
    if service in iam.QUERY_SERVICES:
        xml = f"<Error><Type>Sender</Type><Code>{error.code}</Code><Message>{error.message}</Message></Error>"
        return _send("403 Forbidden", f"<ErrorResponse>{xml}</ErrorResponse>", start_response)
    text = json.dumps({"__type": f"{error.code}Exception", "message": error.message})
    return _send("400 Bad Request", text, start_response)


def _send(status: str, text: str, start_response: StartResponse) -> list[bytes]:
    body = text.encode()
    content_type = "application/x-amz-json-1.1" if text.startswith("{") else "text/xml"
    start_response(status, [("Content-Type", content_type), ("Content-Length", str(len(body)))])
    return [body]
