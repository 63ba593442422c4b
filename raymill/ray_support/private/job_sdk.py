"""Ray's client for jobs: a hook for its HTTP requests, and the names of its loggers."""

from typing import Any

import requests
from ray.job_submission import JobSubmissionClient

LOGGERS = ("ray", "ray.dashboard.modules.dashboard_sdk", "ray.dashboard.modules.job.sdk")
"""Loggers of Ray's client, named after its modules (Ray 2.60)."""


class HookedJobClient(JobSubmissionClient):
    """A JobSubmissionClient with a public hook for each request.

    Relies on `JobSubmissionClient._do_request`, through which all methods except the log stream send their requests
    (Ray 2.60).
    """

    def send(self, method: str, endpoint: str, **options: Any) -> requests.Response:
        """Send one request. `options` are `data`, `json_data` and options of `requests.request`."""
        return super()._do_request(method, endpoint, **options)

    def _do_request(self, method: str, endpoint: str, **options: Any) -> requests.Response:
        return self.send(method, endpoint, **options)
