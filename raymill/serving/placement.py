"""Finds a zone for replicas that span several machines. Traffic between zones is slow, and AWS charges for it."""

import ray

from raymill.errors import UserError
from raymill.ray_support import capacity
from raymill.ray_support.private import serve as private_serve
from raymill.serving.options import ServeOptions


def find_zone(options: ServeOptions) -> dict[str, str] | None:
    """Return labels of one zone's machines, or None if a replica fits on one machine or the cluster has no zones.

    An update stays in the zone of the running replicas. Otherwise, wait until a zone has room for all replicas that
    start, as training does. The replicas stay in that zone, also when they are replaced.

    Raises:
        UserError: the cluster cannot hold a replica.
    """
    gpus, kind = options.tensor_parallel_size * options.pipeline_parallel_size, options.accelerator_type
    if options.accelerator == "cpu" or gpus <= capacity.max_gpus_per_node(kind):
        return None
    from raymill.ray_support import gang  # imports Ray Train, which takes a second

    offers = gang.serve_offers()
    if not offers:
        return None
    needs = {"GPU": 1.0} | ({f"accelerator_type:{kind}": 0.001} if kind else {})
    if gpus > (limit := capacity.max_workers(needs)):
        raise UserError(
            f"a replica needs {gpus} GPUs, which is more than the {limit} that this cluster can hold. Raise "
            "max_workers in cluster/cluster.yaml, or lower pipeline_parallel_size or tensor_parallel_size in [serve]."
        )
    keys, labels = offers[0].selector.keys(), _labels_of_replica(options.app)
    if keys <= labels.keys():  # not if the replica runs on another kind of machine, whose zones have another label
        return {key: labels[key] for key in keys}
    return gang.gather(gpus * max(1, options.min_replicas), needs, options.start_timeout_s, offers)


def _labels_of_replica(app: str) -> dict[str, str]:
    """Return the labels of a machine that runs a replica of this app, or {} if no replica runs."""
    client = private_serve.client()
    apps = client.get_serve_details()["applications"] if client else {}
    deployments = apps[app]["deployments"].values() if app in apps else []
    running = {
        replica["node_id"]
        for deployment in deployments
        for replica in deployment["replicas"]
        if replica["state"] == "RUNNING"
    }
    return next((node["Labels"] for node in ray.nodes() if node["Alive"] and node["NodeID"] in running), {})
