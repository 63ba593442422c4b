"""Check that jobs can run on the cluster: their secrets, GPUs, upload, paths and limits."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dotenv import dotenv_values

from raymill import job_scripts, sections, settings, submission
from raymill.aws.capacity import possible_nodes
from raymill.aws.doctor.account import Account
from raymill.common import limits
from raymill.common.cluster_file import ClusterFile
from raymill.data.options import PreprocessOptions
from raymill.doctor import Finding, judge
from raymill.job_context import JobContext
from raymill.ray_support import aws_sections, capacity
from raymill.serving.keys import OWNER_SECRET
from raymill.serving.options import ServeOptions
from raymill.training.options import TrainOptions


def check_secrets(account: Account) -> Iterator[Finding]:
    """Check that Secrets Manager has the secrets, or will have them after `inv up`. Reads no values from AWS."""
    client = account.client("secretsmanager")
    env_file = settings.PROJECT / ".env"
    values = dotenv_values(env_file) if env_file.is_file() else {}
    for name in settings.load(submission.SecretsSection, "secrets", profile="cluster").names:
        secret = f"{account.slug}/{name}"
        try:
            is_deleted = "DeletedDate" in client.describe_secret(SecretId=secret)
        except client.exceptions.ResourceNotFoundException:
            will_be_stored = bool(values.get(name)) or name == OWNER_SECRET  # inv up generates this one
            state = "will be stored by inv up" if will_be_stored else "has no value, so jobs run without it"
            yield judge(will_be_stored, f"the secret {secret} {state}", f"Put {name}=... into .env", "warning")
        else:
            state = "is being deleted, so inv up will fail" if is_deleted else "is in Secrets Manager"
            restore = f"aws secretsmanager restore-secret --secret-id {secret} --region {account.region}"
            yield judge(not is_deleted, f"the secret {secret} {state}", f"Run: {restore}")


def check_gpus(account: Account) -> Iterator[Finding]:
    """Check that the cluster can provide the CPUs and GPUs that training needs, and the GPUs that serving needs."""
    nodes = possible_nodes(account)
    for train in _fine_tuning():
        with _cluster_nodes(nodes):
            each = {"CPU": train.cpus_per_worker} | ({"GPU": 1} if train.use_gpu else {})
            capacity.refuse_too_many_workers(train.min_workers, each)
    yield Finding("ok", f"the cluster has room for the num_workers of {', '.join(job_scripts.fine_tuning())}")
    serve = settings.load(ServeOptions, "serve", profile="cluster")
    served_on = aws_sections.load_gpu().serve_instance_type
    suitable = [node for node in nodes if served_on in ("", node["instance_type"])]
    available = max((node["count"] * node["resources"].get("GPU", 0) for node in suitable), default=0)
    gpus = serve.tensor_parallel_size * serve.pipeline_parallel_size
    yield judge(
        serve.max_replicas * gpus <= available,
        f"[serve]: max_replicas = {serve.max_replicas} needs {serve.max_replicas * gpus} GPUs, and the cluster can "
        f"have {available}",
        "Lower max_replicas, tensor_parallel_size or pipeline_parallel_size in [cluster.serve] of settings.toml, or "
        "raise max_workers in cluster/cluster.yaml",
        "error" if max(1, serve.min_replicas) * gpus > available else "warning",
    )


def check_settings(file: ClusterFile) -> Iterator[Finding]:
    """Check that settings.toml has no misspelled section or key."""
    sections.check()
    yield Finding("ok", "settings.toml has no unknown sections or keys")


def check_upload(file: ClusterFile) -> Iterator[Finding]:
    """Check that the project's folder is small enough to upload."""
    limit = settings.load(submission.UploadSection, "ray", profile="cluster").working_dir_mib
    submission.check_size(limit)
    yield Finding("ok", f"the project's folder is smaller than {limit} MiB, the limit for uploads")


def check_paths(file: ClusterFile) -> Iterator[Finding]:
    """Check that all nodes can read the paths in [train] and [preprocess]. Relative paths are in the bucket."""
    rows = settings.load(PreprocessOptions, "preprocess", profile="cluster")
    with _cluster_nodes([{"resources": {}, "count": file.max_workers}]):
        for train in _fine_tuning():
            paths = {"model": train.model, "data": train.data, "output": train.output}
            capacity.refuse_private_paths(paths, train.shared_paths, "train")
        mixed = (("mix", part.rpartition("=")[0]) for part in rows.mix)
        for setting, path in (("input", rows.input), *mixed, ("output", rows.output)):
            capacity.refuse_private_paths({setting: path}, rows.shared_paths, "preprocess")
    yield Finding("ok", "all nodes can read the paths in [train] and [preprocess] of settings.toml")


def check_limits(file: ClusterFile) -> Iterator[Finding]:
    """Report the limits of the cluster."""
    yield Finding("ok", f"the limits at which the cluster shuts itself down: {limits.load()}")


def _fine_tuning() -> Iterator[TrainOptions]:
    """Yield the options that the scripts of fine-tuning jobs read from settings.toml."""
    for job in job_scripts.fine_tuning():
        for entry in sections.declared_in(job):
            options = settings.load(entry.load_type(), *entry.names, profile="cluster")
            if isinstance(options, TrainOptions):
                yield options


@contextmanager
def _cluster_nodes(nodes: list[dict[str, Any]]) -> Iterator[None]:
    """Set the variable from which raymill/ray_support/capacity.py reads the nodes, as in a submitted job."""
    variables = JobContext(cluster_nodes=json.dumps(nodes)).variables()
    os.environ |= variables
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]
