"""The lease that a Ray job's driver holds on its output folder (see raymill/output_lease.py)."""

import functools
import os
import socket
import uuid
from contextlib import AbstractContextManager

import ray

from raymill import output_lease
from raymill.output_lease import Holder, Lease, NoLease
from raymill.ray_support.private import core


def hold(location: str, option: str) -> AbstractContextManager[Lease | NoLease]:
    """Hold the lease on a folder for the job of this process. For the arguments and errors, see `output_lease.hold`."""
    has_ended = functools.partial(core.job_has_ended, ray.get_runtime_context().gcs_address)
    return output_lease.hold(location, option, this_job(), lambda holder: has_ended(holder.job))


def this_job() -> Holder:
    """Return the job of this process as the holder of a new lease."""
    context = ray.get_runtime_context()
    submitted = core.submission_id(context.gcs_address, context.get_job_id())
    return Holder(
        cluster=context.get_session_name(),
        job=context.get_job_id(),
        name=submitted or f"process {os.getpid()} on {socket.gethostname()}",
        is_submitted=bool(submitted),
        token=uuid.uuid4().hex,
    )
