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


def latest(file: ClusterFile) -> list[PastJob]:
    """Return the last MAX_JOBS jobs of all clusters, the oldest first."""
    jobs: list[PastJob] = []
    for session in _sessions(file):
        jobs = _jobs(file, session) + jobs
        if len(jobs) >= MAX_JOBS:
            break
    return jobs[-MAX_JOBS:]


def log(file: ClusterFile, job_id: str) -> PastLog | None:
    """Return the log of a job, or of the latest job if `job_id` is empty. Return None if there is no such job."""
    for session in _sessions(file):
        if jobs := [job for job in _jobs(file, session) if job_id in ("", job.id)]:
            return PastLog(jobs[-1], _read(file, f"{session}{log_shipping.HEAD}/job-driver-{jobs[-1].id}.log"))
    return None


def _sessions(file: ClusterFile) -> list[str]:
    """Return the prefix of each cluster's logs, the latest first. Their names start with the time of the start."""
    pages = file.client("s3").get_paginator("list_objects_v2")
    try:
        found = [
            prefix["Prefix"]
            for page in pages.paginate(Bucket=bucket.name(file), Prefix=bucket.LOGS, Delimiter="/")
            for prefix in page.get("CommonPrefixes", [])
        ]
    except botocore.exceptions.ClientError as error:
        if error.response["Error"]["Code"] == "NoSuchBucket":
            return []
        raise
    return sorted(found, reverse=True)


def _jobs(file: ClusterFile, session: str) -> list[PastJob]:
    """Return the jobs of one cluster, the oldest first."""
    copy = _read(file, f"{session}{log_shipping.HEAD}/{log_shipping.JOBS}")
    if copy is None:  # the cluster ended before its head made a copy
        return []
    return sorted((_past_job(job, copy.saved) for job in json.loads(copy.text)), key=lambda job: job.started)


def _past_job(job: dict[str, Any], saved: datetime.datetime) -> PastJob:
    """Convert a job as Ray describes it. `saved` is when the cluster last saved this description."""
    status = JobStatus(job["status"])
    age_s = (datetime.datetime.now(datetime.UTC) - saved).total_seconds()
    has_ended_with_cluster = not status.is_terminal() and age_s > state.SILENT_S
    return PastJob(
        id=job["submission_id"],
        command=job["entrypoint"],
        state="ended with the cluster" if has_ended_with_cluster else status.value.lower(),
        started=(job["start_time"] or 0) / 1000,
        ended=job["end_time"] / 1000 if job["end_time"] else saved.timestamp(),
        exit_code=0 if status == JobStatus.SUCCEEDED else job["driver_exit_code"] or 1,
        message=job["message"] or "",
    )


def _read(file: ClusterFile, key: str) -> Copy | None:
    """Return the copy with this key, or None if there is no such copy."""
    try:
        answer = file.client("s3").get_object(Bucket=bucket.name(file), Key=key)
    except botocore.exceptions.ClientError as error:
        if error.response["Error"]["Code"] == "NoSuchKey":
            return None
        raise
    return Copy(answer["Body"].read().decode(errors="replace"), answer["LastModified"])
