"""The cluster's key-value store, which lives as long as the head."""

from ray.experimental import internal_kv


def get(key: str, namespace: str) -> bytes | None:
    """Return the value of a key, or None.

    Relies on `ray.experimental.internal_kv._internal_kv_get` (Ray 2.60).
    """
    return internal_kv._internal_kv_get(key, namespace=namespace)


def put(key: str, value: str, namespace: str) -> None:
    """Set the value of a key.

    Relies on `ray.experimental.internal_kv._internal_kv_put`, which replaces an existing value (Ray 2.60).
    """
    internal_kv._internal_kv_put(key, value, namespace=namespace)
