"""Ray Core: starts Ray in a given folder, and what the head knows.

- the key-value store, which lives as long as the head
- the control store (GCS), which finds the id of a node, drains idle nodes, and knows which nodes end
- the autoscaler's view: nodes that are running, starting or idle, and launches that failed
"""

from typing import Any

import ray
from ray._raylet import GcsClient
from ray.autoscaler.v2.schema import ClusterStatus
from ray.autoscaler.v2.sdk import get_cluster_status
from ray.core.generated.autoscaler_pb2 import DrainNodeReason
from ray.core.generated.gcs_pb2 import GcsNodeInfo, JobTableData
from ray.experimental import internal_kv


def init(folder: str, **options: Any) -> None:
    """Call `ray.init`. Ray keeps its sockets, logs and spilled objects in `folder`.

    Relies on the parameter `_temp_dir` of `ray.init` (Ray 2.60).
    """
    ray.init(_temp_dir=folder, **options)


def get_value(key: str, namespace: str) -> bytes | None:
    """Return the value of a key, or None.

    Relies on `ray.experimental.internal_kv._internal_kv_get` (Ray 2.60).
    """
    return internal_kv._internal_kv_get(key, namespace=namespace)


def put_value(key: str, value: str, namespace: str) -> None:
    """Set the value of a key.

    Relies on `ray.experimental.internal_kv._internal_kv_put`, which replaces an existing value (Ray 2.60).
    """
    internal_kv._internal_kv_put(key, value, namespace=namespace)


def node_id(gcs_address: str, ip: str) -> str:
    """Return Ray's id of the live node with this IP address.

    Relies on `ray._raylet.GcsClient.get_all_node_info`, which returns a dict whose values have the fields `node_id`
    (bytes), `node_manager_address` and `state` of GcsNodeInfo (Ray 2.60).
    """
    nodes = GcsClient(address=gcs_address).get_all_node_info().values()
    return next(
        node.node_id.hex() for node in nodes if node.node_manager_address == ip and node.state == GcsNodeInfo.ALIVE
    )


def drain_idle(gcs_address: str, node_id: str, message: str) -> None:
    """Ask Ray to terminate an idle node. Ray refuses if the node is busy.

    Relies on `ray._raylet.GcsClient.drain_node` and on the reason DRAIN_NODE_REASON_IDLE_TERMINATION (Ray 2.60).
    """
    reason = DrainNodeReason.DRAIN_NODE_REASON_IDLE_TERMINATION
    GcsClient(address=gcs_address).drain_node(node_id, reason, message, deadline_timestamp_ms=0)


def draining_nodes(gcs_address: str) -> dict[str, float]:
    """Return when the draining nodes end, in seconds since 1970, keyed by their ids. 0: the node has no deadline.

    Relies on `ray._raylet.GcsClient.get_draining_nodes`, which returns a dict from ids to milliseconds (Ray 2.60).
    """
    return {node: end / 1000 for node, end in GcsClient(address=gcs_address).get_draining_nodes().items()}


def submission_id(gcs_address: str, job_id: str) -> str:
    """Return the id with which a job was submitted, or "" if its driver was started in another way.

    Relies on `ray._raylet.GcsClient.get_all_job_info`, which returns a dict whose values have the fields
    `config.metadata` and `is_dead` of JobTableData, and on the key `job_submission_id` of the metadata (Ray 2.60).
    """
    jobs = _jobs(gcs_address, job_id)
    return next((job.config.metadata.get("job_submission_id", "") for job in jobs), "")


def job_has_ended(gcs_address: str, job_id: str) -> bool:
    """Return whether a job's driver has ended. Ray forgets jobs that ended long ago."""
    return all(job.is_dead for job in _jobs(gcs_address, job_id))


def _jobs(gcs_address: str, job_id: str) -> list[JobTableData]:
    found = GcsClient(address=gcs_address).get_all_job_info(
        job_or_submission_id=job_id, skip_submission_job_info_field=True, skip_is_running_tasks_field=True
    )
    return list(found.values())


__all__ = ["ClusterStatus", "cluster_status"]


def cluster_status(gcs_address: str) -> ClusterStatus:
    """Return the state of the nodes and of the autoscaler.

    Relies on `ray.autoscaler.v2.sdk.get_cluster_status` and on these fields of its result (Ray 2.60):
    `active_nodes`, `idle_nodes` and `pending_nodes` (each with `ray_node_type_name`, `node_id`, `instance_id`,
    `ip_address`, `details`), `pending_launches` and `failed_launches` (each with `ray_node_type_name`, `count`,
    `details`, `failed_ts_s`), `resource_demands` and `stats.autoscaler_version`.
    """
    return get_cluster_status(gcs_address)
