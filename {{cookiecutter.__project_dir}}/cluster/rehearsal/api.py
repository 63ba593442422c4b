"""AWS's endpoint of the emulated cloud: moto's server, with a front that corrects it, refuses what it is told to, and
keeps a list of the calls.

What moto does not model, and this front does: RunInstances starts as many as MaxCount asks for, not MinCount; capacity
runs out.
"""

import io
import json
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from moto.ec2.models import ec2_backends
from moto.server import DomainDispatcherApplication, create_backend_app

from cluster.rehearsal import fakes
from cluster.rehearsal.instances import ACCOUNT

QUERY_ERROR = """<?xml version="1.0" encoding="UTF-8"?>
<Response><Errors><Error><Code>{code}</Code><Message>{message}</Message></Error></Errors><RequestID>0</RequestID></Response>"""

StartResponse = Callable[[str, list[tuple[str, str]]], Any]


@dataclass(frozen=True)
class Call:
    """One request, as the list of calls shows it."""

    at: float
    """Seconds since the epoch."""
    service: str
    action: str
    key: str
    """The access key that signed it; empty for an unsigned one."""
    source: str
    """Address of the caller."""
    parameters: dict[str, Any]
    refused: str = ""
    """AWS's error code, where this front refused it."""


@dataclass
class Faults:
    """What goes wrong on purpose; a test sets it through the cloud's control."""

    no_capacity: list[dict[str, str]] = field(default_factory=list)
    """Launches to refuse: each entry may name a `zone`, a `market` ("spot", "on-demand") and a `type`."""

    def refuses(self, launch: dict[str, str]) -> bool:
        """Whether a launch, described by the same keys, finds no capacity."""
        return any(all(launch.get(key) == value for key, value in entry.items()) for entry in self.no_capacity)


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
        if call.action == "RunInstances":
            if launch := self._refused_launch(call):
                self._note(call, refused="InsufficientInstanceCapacity")
                return _no_capacity(launch, start_response)
            body = _with_max_count(body)
        self._note(call)
        if (text := fakes.answer(call.service, call.action, call.parameters)) is not None:
            return _send("200 OK", text, start_response)
        environ["wsgi.input"] = io.BytesIO(body)
        environ["CONTENT_LENGTH"] = str(len(body))
        return self.moto(environ, start_response)

    def as_json(self) -> list[dict[str, Any]]:
        """All calls so far, oldest first."""
        with self._lock:
            return [asdict(call) for call in self.calls]

    def _note(self, call: Call, refused: str = "") -> None:
        with self._lock:
            self.calls.append(Call(**(asdict(call) | {"refused": refused})))

    def _refused_launch(self, call: Call) -> dict[str, str] | None:
        launch = {
            "zone": zone_of(call.parameters),
            "market": call.parameters.get("InstanceMarketOptions.MarketType", "on-demand"),
            "type": call.parameters.get("InstanceType", ""),
        }
        return launch if self.faults.refuses(launch) else None


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
    key, _, _, service = [*authorization.partition("Credential=")[2].split("/")[:4], "", "", "", ""][:4]
    parameters: dict[str, Any] = {}
    action = (environ.get("HTTP_X_AMZ_TARGET") or "").rpartition(".")[2]
    if action:
        parameters = json.loads(body or b"{}")
    elif b"Action=" in body:
        parameters = dict(urllib.parse.parse_qsl(body.decode(), keep_blank_values=True))
        action = parameters["Action"]
    return Call(
        at=time.time(),
        service=service,
        action=action or f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}",
        key=key,
        source=environ.get("REMOTE_ADDR", ""),
        parameters=parameters,
    )


def _with_max_count(body: bytes) -> bytes:
    parameters = dict(urllib.parse.parse_qsl(body.decode(), keep_blank_values=True))
    return urllib.parse.urlencode(parameters | {"MinCount": parameters["MaxCount"]}).encode()


def _no_capacity(launch: dict[str, str], start_response: StartResponse) -> list[bytes]:
    message = (
        f"We currently do not have sufficient {launch['type']} capacity in the Availability Zone you requested "
        f"({launch['zone']})."
    )
    text = QUERY_ERROR.format(code="InsufficientInstanceCapacity", message=message)
    return _send("500 Internal Server Error", text, start_response)


def _send(status: str, text: str, start_response: StartResponse) -> list[bytes]:
    body = text.encode()
    kind = "application/x-amz-json-1.1" if text.startswith("{") else "text/xml"
    start_response(status, [("Content-Type", kind), ("Content-Length", str(len(body)))])
    return [body]
