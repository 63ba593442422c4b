"""Ray Serve: its client for the controller, and a replica's HTTP server."""

from pathlib import Path
from typing import Any

from ray import serve
from ray._private.worker import global_worker
from ray.serve._private import logging_utils


def client() -> Any:
    """Return the client of the running Serve controller, or None if Serve is not running.

    Relies on `ray.serve.context._get_global_client`, and on the client's `http_config` (`host`, `port`) and
    `get_serve_details()` (Ray 2.60).
    """
    return serve.context._get_global_client(raise_if_no_controller_running=False)


def forget_dead_client() -> None:
    """Drop the cached client if its controller is gone. Otherwise `serve.status()` may ask a dead controller.

    Relies on `ray.serve.context._check_cached_client_alive` (Ray 2.60).
    """
    serve.context._check_cached_client_alive()


def own_http_server() -> Any:
    """Return the uvicorn server of the replica that runs in this process.

    Relies on `ray._private.worker.global_worker` (`actors`, `core_worker.get_actor_id()`), and on the attributes
    `_replica_impl` and `_direct_ingress_http_server` of Serve's replica actor (Ray 2.60).
    """
    actor = global_worker.actors[global_worker.core_worker.get_actor_id()]
    return actor._replica_impl._direct_ingress_http_server


def logs_folder() -> Path:
    """Return the folder of Serve's logs on this node.

    Relies on `ray.serve._private.logging_utils.get_serve_logs_dir` (Ray 2.60).
    """
    return Path(logging_utils.get_serve_logs_dir())
