"""The jobs of past clusters and their logs, from the copies that raymill/node/log_shipping.py makes in the bucket."""

import datetime
import json
from dataclasses import replace
from statistics import fmean
from typing import Any

from ray.job_submission import JobStatus

from raymill import job_client
from raymill.aws.saved_logs import SavedLogs
from raymill.common.cluster_file import ClusterFile
from raymill.node import gpu_use, log_shipping, state
from raymill.target import PastJob, PastLog

MAX_JOBS = 20


class PastJobs:
    """Reads the jobs and their logs from the project's bucket."""

    def __init__(self, file: ClusterFile) -> None:
        self._saved = SavedLogs(file)

    def latest(self) -> list[PastJob]:
        """Return the last MAX_JOBS jobs of all clusters, the oldest first."""
        jobs: list[PastJob] = []
        for session in self._saved.sessions():
            jobs = self._with_gpu_use(session, self._jobs(session)) + jobs
            if len(jobs) >= MAX_JOBS:
                break
        return jobs[-MAX_JOBS:]

    def log(self, job_id: str) -> PastLog | None:
        """Return the log of a job, or of the latest job if `job_id` is empty. Return None if there is no such job."""
        for session in self._saved.sessions():
            if jobs := [job for job in self._jobs(session) if job_id in ("", job.id)]:
                return PastLog(jobs[-1], self._saved.read(f"{session}{log_shipping.HEAD}/job-driver-{jobs[-1].id}.log"))
        return None

    def _jobs(self, session: str) -> list[PastJob]:
        """Return the jobs of one cluster, the oldest first."""
        copy = self._saved.read(f"{session}{log_shipping.HEAD}/{log_shipping.JOBS}")
        if copy is None:  # the cluster ended before its head made a copy
            return []
        return sorted((_past_job(job, copy.saved) for job in json.loads(copy.text)), key=lambda job: job.started)

    def _with_gpu_use(self, session: str, jobs: list[PastJob]) -> list[PastJob]:
        """Return the jobs of one cluster with how busy its GPUs were while each job ran."""
        tables = self._saved.of_all_nodes(session, gpu_use.FILE.name)
        uses = [(one.seconds, one.busy_percent) for copy in tables for one in gpu_use.read(copy.text.splitlines())]
        found = []
        for job in jobs:
            busy = [percent for seconds, percent in uses if job.started <= seconds <= job.ended]
            found.append(replace(job, gpu_busy_percent=fmean(busy) if busy else None))
        return found


def _past_job(job: dict[str, Any], saved: datetime.datetime) -> PastJob:
    """Convert a job as Ray describes it. `saved` is when the cluster last saved this description."""
    status = JobStatus(job["status"])
    age_s = (datetime.datetime.now(datetime.UTC) - saved).total_seconds()
    ended_with_cluster = not status.is_terminal() and age_s > state.SILENT_S
    return PastJob(
        id=job["submission_id"],
        owner=job_client.owner(job.get("metadata")),
        command=job["entrypoint"],
        state="ended with the cluster" if ended_with_cluster else status.value.lower(),
        started=(job["start_time"] or 0) / 1000,
        ended=job["end_time"] / 1000 if job["end_time"] else saved.timestamp(),
        exit_code=0 if status == JobStatus.SUCCEEDED else job["driver_exit_code"] or 1,
        message=job["message"] or "",
    )
