"""Ray's job client, extended with timeouts, and with errors that say what to do."""

import getpass
import io
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
import requests
from ray.exceptions import RayError
from ray.job_submission import JobDetails

from raymill.errors import UserError
from raymill.ray_support.private.job_sdk import HookedJobClient

# first, to connect or to send a block; second, to receive the next block. Ray's client has no timeouts.
TIMEOUTS_S = (5, 30)
UPLOAD_TIMEOUTS_S = (30, 300)  # a tunnel may still be sending megabytes when the client has finished
PROBE_JOB = "probe"
"""Id of the empty job with which `up` checks the local cluster. Do not delete it: Ray would then list it as failed."""


class Unreachable(UserError):
    """A cluster that was up does not answer, or the answer is not from Ray."""

    exit_code = 69  # EX_UNAVAILABLE in sysexits.h; no job exits with this code by chance


def unreachable(error: Exception, target_option: str = "") -> Unreachable:
    """Convert an HTTP client's error to `Unreachable`. For `target_option`, see `target.Connection`."""
    repair = f"inv up{target_option}, which sets the head up again" if target_option else "inv down, then inv up"
    return Unreachable(f"no valid response from Ray ({_reason(error)}). Try again. If it keeps failing: {repair}")


def is_submitted(job_id: str | None) -> bool:
    """Return whether `inv submit` started the job.

    Ray also lists the probe job, and programs that connect without a job.
    """
    return bool(job_id) and job_id != PROBE_JOB


def user() -> str:
    """Return the name under which this person's jobs are submitted."""
    return getpass.getuser()


def owner(metadata: Mapping[str, str] | None) -> str:
    """Return who submitted the job with this metadata, or "" for a job that `inv submit` did not submit."""
    return (metadata or {}).get("owner", "")


def _reason(error: Exception) -> str:
    if isinstance(error, requests.HTTPError) and error.response is not None:
        return f"status {error.response.status_code}"
    if isinstance(error, requests.Timeout):
        return "timed out"
    if isinstance(error, RayError):
        return "the token is not valid, because the cluster was restarted"
    if isinstance(error, ValueError | LookupError | TypeError | AttributeError):
        return "the response is truncated, or not from Ray"
    return "the connection failed"


class JobClient(HookedJobClient):
    """Raises `Unreachable` where Ray's client would hang or raise an error of requests, aiohttp or Ray."""

    def __init__(self, address: str, headers: Mapping[str, str], target_option: str = "") -> None:
        self._target_option = target_option
        try:
            super().__init__(address, headers=dict(headers))
        except (requests.RequestException, OSError, LookupError, TypeError) as error:
            raise unreachable(error, target_option) from None

    def send(self, method: str, endpoint: str, **options: Any) -> requests.Response:
        """Send one request. Raises `Unreachable` if there is no valid response in time."""
        timeouts = TIMEOUTS_S
        if data := options.get("data"):  # as a file, so that it is sent in blocks and the timeout applies to each block
            options["data"], timeouts = io.BytesIO(data), UPLOAD_TIMEOUTS_S
        try:
            response = super().send(method, endpoint, timeout=timeouts, **options)
            if response.status_code >= 500:
                response.raise_for_status()
            if response.ok and response.headers.get("Content-Type", "").startswith("application/json"):
                response.json()  # raises if the response was truncated
        except (requests.RequestException, RayError) as error:
            raise unreachable(error, self._target_option) from None
        return response

    def get_job_info(self, job_id: str) -> JobDetails:
        """Return a job's details. Raises `Unreachable` if a restarted cluster does not know the job."""
        try:
            return super().get_job_info(job_id)
        except RuntimeError:  # status 404
            raise Unreachable(f"the cluster was restarted and does not know {job_id}") from None
        except (ValueError, TypeError) as error:
            raise unreachable(error, self._target_option) from None

    async def tail_job_logs(self, job_id: str) -> AsyncIterator[str]:
        """Yield the log piece by piece, as it grows."""
        try:
            async for lines in super().tail_job_logs(job_id):
                yield lines
        except (RuntimeError, OSError, aiohttp.ClientError, RayError) as error:
            raise unreachable(error, self._target_option) from None

    def node_is_alive(self, node_id: str) -> bool:
        """Return whether the node is alive. The job server may outlive the node that runs a job."""
        query = f"filter_keys=node_id&filter_predicates=%3D&filter_values={node_id}"
        try:
            nodes = self.send("GET", f"/api/v0/nodes?{query}").json()["data"]["result"]["result"]
            return any(node["state"] == "ALIVE" for node in nodes)
        except (ValueError, LookupError, TypeError) as error:
            raise unreachable(error, self._target_option) from None
