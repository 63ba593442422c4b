"""The jobs of past clusters and their logs, from the copies that cluster/node/log_shipping.py makes in the bucket."""

import datetime
import json
from typing import Any

import botocore.exceptions
from ray.job_submission import JobStatus

from cluster.common import bucket
from cluster.common.cluster_file import ClusterFile
from cluster.node import log_shipping, state
from cluster.target import Copy, PastJob, PastLog

MAX_JOBS = 20


class PastJobs:
    """Reads the jobs and their logs from the project's bucket, which need not exist."""

    def __init__(self, file: ClusterFile) -> None:
        self._client, self._bucket = file.client("s3"), bucket.name(file)

    def latest(self) -> list[PastJob]:
        """Return the last MAX_JOBS jobs of all clusters, the oldest first."""
        jobs: list[PastJob] = []
        for session in self._sessions():
            jobs = self._jobs(session) + jobs
            if len(jobs) >= MAX_JOBS:
                break
        return jobs[-MAX_JOBS:]

    def log(self, job_id: str) -> PastLog | None:
        """Return the log of a job, or of the latest job if `job_id` is empty. Return None if there is no such job."""
        for session in self._sessions():
            if jobs := [job for job in self._jobs(session) if job_id in ("", job.id)]:
                return PastLog(jobs[-1], self._read(f"{session}{log_shipping.HEAD}/job-driver-{jobs[-1].id}.log"))
        return None

    def _sessions(self) -> list[str]:
        """Return the prefix of each cluster's logs, the latest first. It contains the time of the cluster's start."""
        pages = self._client.get_paginator("list_objects_v2")
        try:
            found = [
                prefix["Prefix"]
                for page in pages.paginate(Bucket=self._bucket, Prefix=bucket.LOGS, Delimiter="/")
                for prefix in page.get("CommonPrefixes", [])
            ]
        except botocore.exceptions.ClientError as error:
            if error.response["Error"]["Code"] == "NoSuchBucket":
                return []
            raise
        return sorted(found, reverse=True)

    def _jobs(self, session: str) -> list[PastJob]:
        """Return the jobs of one cluster, the oldest first."""
        copy = self._read(f"{session}{log_shipping.HEAD}/{log_shipping.JOBS}")
        if copy is None:  # the cluster ended before its head made a copy
            return []
        return sorted((_past_job(job, copy.saved) for job in json.loads(copy.text)), key=lambda job: job.started)

    def _read(self, key: str) -> Copy | None:
        """Return the copy with this key, or None if there is no such copy."""
        try:
            answer = self._client.get_object(Bucket=self._bucket, Key=key)
        except botocore.exceptions.ClientError as error:
            if error.response["Error"]["Code"] == "NoSuchKey":
                return None
            raise
        return Copy(answer["Body"].read().decode(errors="replace"), answer["LastModified"])


def _past_job(job: dict[str, Any], saved: datetime.datetime) -> PastJob:
    """Convert a job as Ray describes it. `saved` is when the cluster last saved this description."""
    status = JobStatus(job["status"])
    age_s = (datetime.datetime.now(datetime.UTC) - saved).total_seconds()
    ended_with_cluster = not status.is_terminal() and age_s > state.SILENT_S
    return PastJob(
        id=job["submission_id"],
        command=job["entrypoint"],
        state="ended with the cluster" if ended_with_cluster else status.value.lower(),
        started=(job["start_time"] or 0) / 1000,
        ended=job["end_time"] / 1000 if job["end_time"] else saved.timestamp(),
        exit_code=0 if status == JobStatus.SUCCEEDED else job["driver_exit_code"] or 1,
        message=job["message"] or "",
    )
