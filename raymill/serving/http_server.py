"""The HTTP server of Ray Serve, which all applications share."""

import logging
import socket

import ray
from ray import serve

from raymill.errors import UserError
from raymill.ray_support.private import serve as private_serve
from raymill.serving import drain
from raymill.serving.options import ServeOptions


def current_address() -> tuple[str, int] | None:
    """Return the host and port of the cluster's HTTP server, or None if Serve is not running.

    Serve has no public API for this.
    """
    running = private_serve.client()
    return running and (running.http_config.host, running.http_config.port)


def check_address(options: ServeOptions) -> None:
    """Check that Serve can listen on the address in the options.

    Raises:
        UserError: another program uses the port, or Serve already serves another application at another address.
    """
    current = current_address()
    if current == (options.host, options.port):
        return
    others = ", ".join(serve.status().applications.keys() - {options.app})
    if current and others:
        raise UserError(
            f"Serve already listens on {current[0]}:{current[1]} for {others}, and all applications share one address. "
            f"Set host and port in [serve] of settings.toml to {current[0]} and {current[1]}, or stop {others} first."
        )
    try:
        socket.create_server((options.host, options.port)).close()
    except OSError as error:
        raise UserError(
            f"port {options.port} on {options.host} is not available ({error.strerror}). "
            "Stop the program that listens there, or set another port in [serve] of settings.toml."
        ) from None


def start(options: ServeOptions) -> None:
    """Start the HTTP server on the address in the options. Restart it if it listens on another address."""
    current = current_address()
    if current == (options.host, options.port):
        return
    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # Serve's INFO lines repeat what the jobs print
    if current:  # Serve cannot change its address while it runs
        print(f"serve_llm: moving from {current[0]}:{current[1]} to {options.host}:{options.port}", flush=True)
        for app in serve.status().applications:
            drain.stop(app, app)
        serve.shutdown()
    serve.start(proxy_location="HeadOnly", http_options={"host": options.host, "port": options.port})


def cluster_address(options: ServeOptions) -> str:
    """Return the server's URL for replicas on any machine. The server listens on the head."""
    head = ray.get_runtime_context().gcs_address.rpartition(":")[0]
    return f"http://{head}:{options.port}" if options.host == "0.0.0.0" else options.root
