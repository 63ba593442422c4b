"""The autoscaler's view of the cluster: nodes that are running, starting or idle, and launches that failed."""

from ray.autoscaler.v2.schema import ClusterStatus
from ray.autoscaler.v2.sdk import get_cluster_status

__all__ = ["ClusterStatus", "cluster_status"]


def cluster_status(gcs_address: str) -> ClusterStatus:
    """Return the state of the nodes and of the autoscaler.

    Relies on `ray.autoscaler.v2.sdk.get_cluster_status` and on these fields of its result (Ray 2.60):
    `active_nodes`, `idle_nodes` and `pending_nodes` (each with `ray_node_type_name`, `node_id`, `instance_id`,
    `ip_address`, `details`), `pending_launches` and `failed_launches` (each with `ray_node_type_name`, `count`,
    `details`, `failed_ts_s`), `resource_demands` and `stats.autoscaler_version`.
    """
    return get_cluster_status(gcs_address)
