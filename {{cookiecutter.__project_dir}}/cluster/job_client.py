"""Ray's own client for jobs, made to give up in time and to say why in one sentence."""

from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
import requests
from ray.job_submission import JobSubmissionClient

import settings

TIMEOUTS_S = (5, 30)  # to connect, and between two pieces of an answer; Ray's client would wait without end
REMEDY = "look with: inv status   where that fails too, start again: inv down, then inv up"


class Unreachable(settings.Refusal):
    """A cluster that was up does not answer, or not as Ray does."""

    exit_code = 69  # EX_UNAVAILABLE of sysexits.h, which no job ends with by chance


def reason(error: Exception) -> str:
    """In a few words, what an HTTP client raised."""
    if isinstance(error, requests.HTTPError) and error.response is not None:
        return f"it answers {error.response.status_code}"
    if isinstance(error, requests.Timeout):
        return "no answer in time"
    if isinstance(error, ValueError):
        return "its answer is cut off, or not Ray's"
    return "the connection failed"


class JobClient(JobSubmissionClient):
    """Raises `Unreachable` where Ray's client hangs, or raises what requests and aiohttp raise."""

    def __init__(self, address: str, headers: Mapping[str, str]) -> None:
        try:
            super().__init__(address, headers=dict(headers))
        except (requests.RequestException, OSError, KeyError, TypeError) as error:
            raise Unreachable(f"Ray does not answer ({reason(error)}); {REMEDY}") from None

    def _do_request(self, method: str, endpoint: str, **options: Any) -> requests.Response:
        try:
            response = super()._do_request(method, endpoint, timeout=TIMEOUTS_S, **options)
            if response.status_code >= 500:
                response.raise_for_status()
            if response.ok and response.headers.get("Content-Type", "").startswith("application/json"):
                response.json()  # raises where the answer was cut off
        except requests.RequestException as error:
            raise Unreachable(f"Ray does not answer ({reason(error)}); {REMEDY}") from None
        return response

    async def tail_job_logs(self, job_id: str) -> AsyncIterator[str]:
        """The log, piece by piece, as it grows."""
        try:
            async for lines in super().tail_job_logs(job_id):
                yield lines
        except (RuntimeError, OSError, aiohttp.ClientError) as error:
            raise Unreachable(f"Ray does not answer ({reason(error)}); {REMEDY}") from None

    def node_is_alive(self, node_id: str) -> bool:
        """Whether the cluster still counts that node in: the job server may outlive the node that runs the jobs."""
        query = f"filter_keys=node_id&filter_predicates=%3D&filter_values={node_id}"
        [node] = self._do_request("GET", f"/api/v0/nodes?{query}").json()["data"]["result"]["result"]
        return node["state"] == "ALIVE"
