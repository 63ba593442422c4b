"""Ray Serve: its client for the controller, and a replica's HTTP server."""

import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray._private.worker import global_worker
from ray.serve._private import logging_utils
from ray.serve._private.common import ReplicaID
from ray.serve._private.constants import SERVE_NAMESPACE

COUNT_TIMEOUT_S = 5.0
"""Seconds within which a replica must say how many requests it processes."""


def client() -> Any:
    """Return the client of the running Serve controller, or None if Serve is not running.

    Relies on `ray.serve.context._get_global_client`, and on the client's `http_config` (`host`, `port`) and
    `get_serve_details()` (Ray 2.60).
    """
    return serve.context._get_global_client(raise_if_no_controller_running=False)


def shutdown_timeout_s(app: str) -> float:
    """Return the seconds that the app's replicas may take to finish their requests when they stop, or 0.

    Relies on `deployment_config` (`graceful_shutdown_timeout_s`) in the client's `get_serve_details()` (Ray 2.60).
    """
    running = client()
    apps = running.get_serve_details()["applications"] if running else {}
    deployments = apps[app]["deployments"].values() if app in apps else ()
    return max((each["deployment_config"]["graceful_shutdown_timeout_s"] for each in deployments), default=0.0)


def nodes_of_running_replicas(app: str) -> set[str]:
    """Return the ids of the nodes with running replicas of an app. A replica on a draining node may count as running.

    Relies on `replicas` (`state`, `node_id`) of the deployments in the client's `get_serve_details()` (Ray 2.60).
    """
    deployments = client().get_serve_details()["applications"][app]["deployments"].values()
    replicas = [replica for deployment in deployments for replica in deployment["replicas"]]
    return {replica["node_id"] for replica in replicas if replica["state"] == "RUNNING"}


def _replicas(app: str) -> Iterator[tuple[str, Any]]:
    """Yield the deployment and the actor of each replica of an app, also while Serve deletes the app.

    `get_serve_details()` does not show the replicas of an app that is being deleted. Relies on the names of Serve's
    actors, on SERVE_NAMESPACE, and on `ReplicaID.from_full_id_str` (Ray 2.60).
    """
    for named in ray.util.list_named_actors(all_namespaces=True):
        if named["namespace"] == SERVE_NAMESPACE and ReplicaID.is_full_id_str(named["name"]):
            deployment = ReplicaID.from_full_id_str(named["name"]).deployment_id
            if deployment.app_name == app:
                with contextlib.suppress(ValueError):  # it has just ended
                    yield deployment.name, ray.get_actor(named["name"], namespace=SERVE_NAMESPACE)


def ongoing_requests(app: str) -> int:
    """Return how many requests an app is processing. Replicas that do not respond count as idle.

    A request can be in several deployments of the app, so the deployment with the most requests counts.

    Relies on `get_num_ongoing_requests` of Serve's replica actor (Ray 2.60).
    """
    asked = {actor.get_num_ongoing_requests.remote(): name for name, actor in _replicas(app)}
    answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=COUNT_TIMEOUT_S) if asked else ([], [])
    counts = Counter[str]()
    for reference in answered:
        with contextlib.suppress(ray.exceptions.RayError):
            counts[asked[reference]] += ray.get(reference)
    return max(counts.values(), default=0)


def kill_replicas(app: str) -> None:
    """Kill the replicas of an app that Serve is deleting, as Serve does after `graceful_shutdown_timeout_s`."""
    for _, actor in _replicas(app):
        ray.kill(actor, no_restart=True)


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
