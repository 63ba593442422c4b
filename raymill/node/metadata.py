"""The instance metadata service (IMDSv2), which tells an instance about itself."""

import json
import urllib.request

URL = "http://169.254.169.254/latest/"


def read(path: str) -> str:
    """Return an entry below meta-data/. Raises OSError if there is none, or if this machine is not an instance."""
    return _get(f"meta-data/{path}")


def identity() -> dict[str, str]:
    """Return the instance identity document, with the keys `accountId`, `region` and others. Raises OSError."""
    return json.loads(_get("dynamic/instance-identity/document"))


def _get(path: str) -> str:
    headers = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    request = urllib.request.Request(f"{URL}api/token", method="PUT", headers=headers)
    with urllib.request.urlopen(request, timeout=2) as answer:
        token = answer.read().decode()
    request = urllib.request.Request(f"{URL}{path}", headers={"X-aws-ec2-metadata-token": token})
    with urllib.request.urlopen(request, timeout=2) as answer:
        return answer.read().decode()
