"""Ray Data: its hash partitioning, its error for a full disk, and its autoscaling coordinator."""

import pyarrow as pa
from ray.data._internal.arrow_ops.transform_pyarrow import hash_partition
from ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator import get_or_create_autoscaling_coordinator
from ray.data._internal.execution.operators.shuffle_operators.disk_shuffle_runtime import ShuffleDiskError

__all__ = ["ShuffleDiskError", "partition", "start_autoscaling_coordinator"]


def partition(table: pa.Table, column: str, partitions: int) -> dict[int, pa.Table]:
    """Split a table into hash partitions, as a groupby on `column` would. Return the partitions that are not empty.

    Relies on `hash_partition` of ray.data._internal.arrow_ops.transform_pyarrow (Ray 2.60).

    `ShuffleDiskError`, which a shuffle raises when a node's disk is full, is also private. It is in
    ray.data._internal.execution.operators.shuffle_operators.disk_shuffle_runtime (Ray 2.60).
    """
    return hash_partition(table, hash_cols=[column], num_partitions=partitions)


def start_autoscaling_coordinator() -> None:
    """Start the actor that Ray Train and Ray Data ask for resources.

    Relies on `get_or_create_autoscaling_coordinator` of
    ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator (Ray 2.60).
    """
    get_or_create_autoscaling_coordinator()
