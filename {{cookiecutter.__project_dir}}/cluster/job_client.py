"""Ray's own client for jobs, which gives up in time and says why in one sentence."""

import io
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
import requests
from ray.exceptions import RayError
from ray.job_submission import JobDetails

import settings
from pipeline.ray_support.private.job_sdk import HookedJobClient

TIMEOUTS_S = (5, 30)  # to connect or send a block, and between two blocks of an answer; Ray's client has none
UPLOAD_TIMEOUTS_S = (30, 300)  # through a tunnel, which may still be sending megabytes when the client has sent all
PROBE_JOB = "probe"
"""The empty job that `up` runs. It is not deleted: Ray, still monitoring it, would list it again, as failed."""


class Unreachable(settings.UserError):
    """A cluster that was up gives no answer, or one that is not Ray's."""

    exit_code = 69  # EX_UNAVAILABLE of sysexits.h, which no job exits with by chance


def unreachable(error: Exception, where: str = "") -> Unreachable:
    """Return the error to raise for one of an HTTP client; `where`: the target's option, with a space before it."""
    return Unreachable(
        f"no valid response from Ray ({_reason(error)}). "
        f"Try again. If it keeps failing: inv down{where}, then inv up{where}"
    )


def is_submitted(job_id: str | None) -> bool:
    """Whether `inv submit` started the job: Ray also lists the probe, and programs that connect by themselves."""
    return bool(job_id) and job_id != PROBE_JOB


def _reason(error: Exception) -> str:
    if isinstance(error, requests.HTTPError) and error.response is not None:
        return f"status {error.response.status_code}"
    if isinstance(error, requests.Timeout):
        return "timed out"
    if isinstance(error, RayError):
        return "another token: the cluster was restarted"
    if isinstance(error, ValueError | LookupError | TypeError | AttributeError):
        return "its answer is cut off, or not Ray's"
    return "the connection failed"


class JobClient(HookedJobClient):
    """Raises `Unreachable` where Ray's client hangs, or raises an error of requests, aiohttp or Ray."""

    def __init__(self, address: str, headers: Mapping[str, str], where: str = "") -> None:
        self._where = where
        try:
            super().__init__(address, headers=dict(headers))
        except (requests.RequestException, OSError, LookupError, TypeError) as error:
            raise unreachable(error, where) from None

    def send(self, method: str, endpoint: str, **options: Any) -> requests.Response:
        """Send one request. Raises `Unreachable` if there is no valid response in time."""
        timeouts = TIMEOUTS_S
        if data := options.get("data"):  # as a file it is sent in blocks, each within the timeout, and not as a whole
            options["data"], timeouts = io.BytesIO(data), UPLOAD_TIMEOUTS_S
        try:
            response = super().send(method, endpoint, timeout=timeouts, **options)
            if response.status_code >= 500:
                response.raise_for_status()
            if response.ok and response.headers.get("Content-Type", "").startswith("application/json"):
                response.json()  # raises if the answer was cut off
        except (requests.RequestException, RayError) as error:
            raise unreachable(error, self._where) from None
        return response

    def get_job_info(self, job_id: str) -> JobDetails:
        """Return what Ray knows of a job. Raises `Unreachable` if that is nothing: the cluster was restarted."""
        try:
            return super().get_job_info(job_id)
        except RuntimeError:  # status 404
            raise Unreachable(f"the cluster does not know {job_id}: it was restarted") from None
        except (ValueError, TypeError) as error:
            raise unreachable(error, self._where) from None

    async def tail_job_logs(self, job_id: str) -> AsyncIterator[str]:
        """Yield the log piece by piece, as it grows."""
        try:
            async for lines in super().tail_job_logs(job_id):
                yield lines
        except (RuntimeError, OSError, aiohttp.ClientError, RayError) as error:
            raise unreachable(error, self._where) from None

    def node_is_alive(self, node_id: str) -> bool:
        """Return whether the node is part of the cluster: the job server may outlive the node that runs the jobs."""
        query = f"filter_keys=node_id&filter_predicates=%3D&filter_values={node_id}"
        try:
            nodes = self.send("GET", f"/api/v0/nodes?{query}").json()["data"]["result"]["result"]
            return any(node["state"] == "ALIVE" for node in nodes)
        except (ValueError, LookupError, TypeError) as error:
            raise unreachable(error, self._where) from None
