"""The instance metadata service (IMDSv2) of the emulated cloud, at 169.254.169.254.

The service ignores the hop limit, and accepts a token from any instance, not only from the one that requested it.
"""

import datetime
import json
import secrets
import threading
from collections.abc import Iterable
from typing import Any

from moto.core.utils import unix_time
from moto.sts.models import sts_backends

from raymill.emulator.api import StartResponse
from raymill.emulator.moto_instances import MotoInstance, find_running

META_DATA = "/latest/meta-data/"
CREDENTIALS = META_DATA + "iam/security-credentials/"
SESSION_S = 6 * 3600


class MetadataService:
    """The WSGI application at 169.254.169.254."""

    def __init__(self) -> None:
        self.spot_notices: dict[str, datetime.datetime] = {}
        """Maps the id of an interrupted spot instance to the time at which AWS will terminate it."""
        self._tokens: set[str] = set()
        self._sessions: dict[str, dict[str, str]] = {}
        self._lock = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        status, text = self._answer(environ)
        body = text.encode()
        start_response(status, [("Content-Type", "text/plain"), ("Content-Length", str(len(body)))])
        return [body]

    def _answer(self, environ: dict[str, Any]) -> tuple[str, str]:
        path = environ["PATH_INFO"]
        if environ["REQUEST_METHOD"] == "PUT" and path == "/latest/api/token":
            self._tokens.add(token := secrets.token_urlsafe(32))
            return "200 OK", token
        if environ.get("HTTP_X_AWS_EC2_METADATA_TOKEN") not in self._tokens:
            return "401 Unauthorized", "IMDSv2 is required"  # HttpTokens: required
        instance = find_running(environ.get("REMOTE_ADDR", ""))
        text = self._document(instance, path) if instance else None
        return ("404 Not Found", "") if text is None else ("200 OK", text)

    def _document(self, instance: MotoInstance, path: str) -> str | None:
        role = instance.role
        if path == "/latest/dynamic/instance-identity/document":
            return json.dumps(
                {"region": instance.region, "instanceId": instance.id, "accountId": instance.account}
                | {"availabilityZone": instance.zone, "instanceType": instance.type}
            )
        if path.rstrip("/") == CREDENTIALS.rstrip("/"):
            return role
        if role and path == CREDENTIALS + role:
            return json.dumps(self._session(instance, role))
        if path == META_DATA + "spot/instance-action":
            if not (when := self.spot_notices.get(instance.id)):
                return None
            return json.dumps({"action": "terminate", "time": when.strftime("%Y-%m-%dT%H:%M:%SZ")})
        return {
            "instance-id": instance.id,
            "instance-type": instance.type,
            "instance-life-cycle": instance.market,  # for spot and Capacity Blocks, EC2's value of InstanceLifecycle
            "local-ipv4": instance.private_ip,
            "public-ipv4": instance.public_ip,
            "placement/availability-zone": instance.zone,
            "placement/region": instance.region,
        }.get(path.removeprefix(META_DATA))

    def _session(self, instance: MotoInstance, role: str) -> dict[str, str]:
        """Return the credentials of the instance's STS session. Creates the session on first use."""
        with self._lock:
            if instance.id not in self._sessions:
                assumed = sts_backends[instance.account]["global"].assume_role(
                    region_name=instance.region,
                    role_session_name=instance.id,
                    role_arn=f"arn:aws:iam::{instance.account}:role/{role}",
                    policy="",
                    duration=SESSION_S,
                    external_id="",
                )
                self._sessions[instance.id] = {
                    "Code": "Success",
                    "Type": "AWS-HMAC",
                    "AccessKeyId": assumed.access_key_id,
                    "SecretAccessKey": assumed.secret_access_key,
                    "Token": assumed.session_token,
                    "LastUpdated": _timestamp(unix_time()),
                    "Expiration": _timestamp(unix_time() + SESSION_S),
                }
            return self._sessions[instance.id]


def _timestamp(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
