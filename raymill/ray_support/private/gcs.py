"""The cluster's control store (GCS): finds the id of a node, drains idle nodes, and knows which nodes end
and which jobs have ended.
"""

from ray._raylet import GcsClient
from ray.core.generated.autoscaler_pb2 import DrainNodeReason
from ray.core.generated.gcs_pb2 import GcsNodeInfo, JobTableData


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
