"""AWS's endpoint of the emulated cloud: moto's server, with a front that corrects it, refuses what it is told to, and
keeps a list of the calls.

What moto does not model, and this front does: every call is signed by a key that exists and allowed by its owner's
policies, conditions included; RunInstances starts as many as MaxCount asks for, not MinCount, and gives all of them
the instance profile; capacity runs out.
"""

import io
import json
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from moto.ec2.models import ec2_backends
from moto.server import DomainDispatcherApplication, create_backend_app

from cluster.emulator import fakes, iam, instances, needs
from cluster.emulator.instances import ACCOUNT

StartResponse = Callable[[str, list[tuple[str, str]]], Any]


@dataclass(frozen=True)
class Call:
    """One request, as the list of calls shows it."""

    at: float
    """Seconds since the epoch."""
    service: str
    action: str
    region: str
    source: str
    """Address of the caller."""
    parameters: dict[str, Any]
    caller: str = ""
    """ARN of who signed it; empty where nobody known did."""
    needs: list[iam.Need] = field(default_factory=list)
    """The permissions that it took."""
    refused: str = ""
    """AWS's error code, where this front refused it."""


@dataclass
class Faults:
    """What goes wrong on purpose; a test sets it through the cloud's control."""

    no_capacity: list[dict[str, Any]] = field(default_factory=list)
    """Launches to refuse: each entry may name a `zone`, a `market` ("spot", "on-demand") and a `type`, and how many
    machines are `left` there."""

    def grant(self, launch: dict[str, str], wanted: int) -> int:
        """How many of the wanted machines a launch, described by the same keys, finds."""
        for entry in self.no_capacity:
            if all(entry.get(key, value) == value for key, value in launch.items()):
                granted = min(wanted, entry.get("left", 0))
                entry["left"] = entry.get("left", 0) - granted
                return granted
        return wanted


class Api:
    """The WSGI application that answers for every AWS service."""

    def __init__(self) -> None:
        self.moto = DomainDispatcherApplication(create_backend_app)
        self.calls: list[Call] = []
        self.faults = Faults()
        self._lock = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        body = _read(environ)
        call = _describe(environ, body)
        try:
            principal = iam.authenticate(environ, body)
            call = replace(call, caller=principal.arn, needs=_needs(call, environ, body))
            iam.authorize(principal, call.needs)
            if call.action == "RunInstances":
                body = _with_count(body, self._grant(call))
        except iam.AwsError as refused:
            self._note(replace(call, refused=refused.code))
            return _refuse(call.service, refused, start_response)
        self._note(call)
        if (text := fakes.answer(call.service, call.action, call.parameters, principal)) is not None:
            return _send("200 OK", text, start_response)
        answer = self.moto(environ | {"wsgi.input": io.BytesIO(body), "CONTENT_LENGTH": str(len(body))}, start_response)
        if call.action == "RunInstances":
            instances.give_all_their_profile(call.parameters["IamInstanceProfile.Name"])
        return answer

    def as_json(self) -> list[dict[str, Any]]:
        """All calls so far, oldest first."""
        with self._lock:
            return [asdict(call) for call in self.calls]

    def _note(self, call: Call) -> None:
        with self._lock:
            self.calls.append(call)

    def _grant(self, call: Call) -> int:
        """How many machines a launch gets, which EC2 lets be fewer than MaxCount but not than MinCount."""
        launch = {
            "zone": zone_of(call.parameters),
            "market": call.parameters.get("InstanceMarketOptions.MarketType", "on-demand"),
            "type": call.parameters.get("InstanceType", ""),
        }
        granted = self.faults.grant(launch, int(call.parameters["MaxCount"]))
        if granted < int(call.parameters["MinCount"]):
            raise iam.AwsError(
                "InsufficientInstanceCapacity",
                f"We currently do not have sufficient {launch['type']} capacity in the Availability Zone you requested "
                f"({launch['zone']}).",
            )
        return granted


def zone_of(parameters: dict[str, str]) -> str:
    """Availability zone of a RunInstances request, by the subnet that it names."""
    subnet = parameters.get("SubnetId") or parameters.get("NetworkInterface.1.SubnetId")
    for backend in ec2_backends[ACCOUNT].values():
        for zone, subnets in backend.subnets.items():
            if subnet in subnets:
                return zone
    return ""


def _read(environ: dict[str, Any]) -> bytes:
    """The whole body, which the environment then says as one of a known length: large uploads come in chunks."""
    chunked = environ.pop("HTTP_TRANSFER_ENCODING", "") and environ.pop("wsgi.input_terminated", False)
    return environ["wsgi.input"].read(*([] if chunked else [int(environ.get("CONTENT_LENGTH") or 0)]))


def _describe(environ: dict[str, Any], body: bytes) -> Call:
    authorization = environ.get("HTTP_AUTHORIZATION") or ""
    _, _, region, service = [*authorization.partition("Credential=")[2].split("/")[:4], "", "", "", ""][:4]
    parameters: dict[str, Any] = {}
    action = (environ.get("HTTP_X_AMZ_TARGET") or "").rpartition(".")[2]
    if action:
        parameters = json.loads(body or b"{}")
        parameters.pop("SecretString", None)  # the list of calls goes into a file
    elif b"Action=" in body:
        parameters = dict(urllib.parse.parse_qsl(body.decode(), keep_blank_values=True))
        action = parameters["Action"]
    return Call(
        at=time.time(),
        service=service,
        action=action or f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}",
        region=region,
        source=environ.get("REMOTE_ADDR", ""),
        parameters=parameters,
    )


def _with_count(body: bytes, count: int) -> bytes:
    """The launch with as many machines; moto starts MinCount of them."""
    parameters = dict(urllib.parse.parse_qsl(body.decode(), keep_blank_values=True))
    return urllib.parse.urlencode(parameters | {"MinCount": count, "MaxCount": count}).encode()


def _needs(call: Call, environ: dict[str, Any], body: bytes) -> list[iam.Need]:
    http = {
        "method": environ["REQUEST_METHOD"],
        "path": environ["RAW_URI"].partition("?")[0],
        "query": environ["QUERY_STRING"],
        "body": body,
    }
    return needs.of(call.service, call.action, call.region, call.parameters, http)


def _refuse(service: str, refused: iam.AwsError, start_response: StartResponse) -> list[bytes]:
    """The refusal in the words and the shape of the service."""
    if service in ("ec2", ""):  # "": unsigned, so that nothing tells which it is for
        code = "UnauthorizedOperation" if refused.code == "AccessDenied" else refused.code
        error = f"<Errors><Error><Code>{code}</Code><Message>{refused.message}</Message></Error></Errors>"
        return _send("403 Forbidden", f"<Response>{error}<RequestID>0</RequestID></Response>", start_response)
    if service == "s3":
        error = f"<Error><Code>{refused.code}</Code><Message>{refused.message}</Message></Error>"
        return _send("403 Forbidden", error, start_response)
    if service in ("iam", "sts", "cloudformation"):
        error = f"<Error><Type>Sender</Type><Code>{refused.code}</Code><Message>{refused.message}</Message></Error>"
        return _send("403 Forbidden", f"<ErrorResponse>{error}</ErrorResponse>", start_response)
    error = {"__type": f"{refused.code}Exception", "message": refused.message}
    return _send("400 Bad Request", json.dumps(error), start_response)


def _send(status: str, text: str, start_response: StartResponse) -> list[bytes]:
    body = text.encode()
    kind = "application/x-amz-json-1.1" if text.startswith("{") else "text/xml"
    start_response(status, [("Content-Type", kind), ("Content-Length", str(len(body)))])
    return [body]
