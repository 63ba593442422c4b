"""The GPU instance types of the cluster, from [cluster.gpu] of settings.toml and from cluster.yaml."""

from raymill.common.cluster_file import ClusterFile
from raymill.errors import UserError
from raymill.instance_types import INSTANCE_TYPES, InstanceType
from raymill.ray_support import aws_sections


def for_training(file: ClusterFile) -> tuple[InstanceType, ...]:
    """Return the types for training, the preferred one first.

    Raises:
        UserError: a type is not in raymill/instance_types.py.
    """
    names = aws_sections.load_gpu().instance_types or [in_cluster_yaml(file)]
    return tuple(find(name) for name in names)


def in_cluster_yaml(file: ClusterFile) -> str:
    """Return the type of the GPU node types in cluster.yaml: the last ones, because settings add theirs before them."""
    return file.workers[-1].instance_type


def find(name: str) -> InstanceType:
    """Return the instance type with this name. Raises `UserError` if it is not in INSTANCE_TYPES."""
    if name not in INSTANCE_TYPES:
        raise UserError(
            f"{name}, an InstanceType in cluster/cluster.yaml, is not in raymill/instance_types.py. Add it there, "
            f"or use one of: {', '.join(INSTANCE_TYPES)}"
        )
    return INSTANCE_TYPES[name]
