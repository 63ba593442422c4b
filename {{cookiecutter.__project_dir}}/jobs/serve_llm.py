"""Serves a model over an OpenAI-compatible API with vLLM replicas on Ray Serve.

python -m jobs.serve_llm            deploys [serve] of settings.toml, or updates what runs
python -m jobs.serve_llm --help     explains every option
"""

from pipeline.ray_support import cli
from pipeline.serving.options import APP, ServeOptions

if __name__ == "__main__":
    cli.parse(ServeOptions, "serve")  # before the imports below, which take seconds

import importlib.util
import logging
import os
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import ray
import requests
from ray import serve
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview
from transformers import AutoConfig

import settings
from pipeline.ray_support import job_secrets
from pipeline.ray_support.private import serve as private_serve
from pipeline.serving import canary
from pipeline.serving.accelerator import check_accelerator

SAY_EVERY_S = 15


def main(options: ServeOptions) -> None:
    """Serve a model over an OpenAI-compatible API, and return when it answers."""
    job_secrets.load()
    check(options)
    cli.connect(log_to_driver=False)  # vLLM's start fills screens; its log files keep it
    deploy(options)
    print(f"{options.served_name} is served at {options.url}\nnext: inv chat", flush=True)
    if os.environ.get("RAY_ADDRESS", "local") == "local":
        wait_for_interrupt()


def check(options: ServeOptions) -> None:
    """Refuse what can be known to fail before anything is started."""
    if not job_secrets.read(["SERVE_API_KEY"]):
        raise settings.UserError("SERVE_API_KEY is not set, and nothing is served without a key: put it into .env.")
    check_model(options)


def check_model(options: ServeOptions) -> None:
    """Refuse a machine without vLLM, what is no model, and more tokens than it was made for."""
    check_accelerator(options.accelerator)
    if importlib.util.find_spec("vllm") is None:
        raise settings.UserError("vLLM is not installed on this machine, and its CPU build exists for Linux only.")
    if "://" in options.source:
        return  # the replica that fetches it is the first who can look at it
    remedy = "train one with inv submit finetune_ddp, or set model in [serve] of settings.toml."
    if not options.is_hub_id and not os.path.isfile(f"{options.source}/config.json"):
        raise settings.UserError(f"{options.source} holds no model: {remedy}")
    try:
        limit = getattr(AutoConfig.from_pretrained(options.source), "max_position_embeddings", None)
    except (OSError, ValueError) as error:
        raise settings.UserError(f"{options.model} cannot be read ({str(error).splitlines()[0]}): {remedy}") from None
    if limit and options.max_model_len > limit:
        raise settings.UserError(
            f"max_model_len = {options.max_model_len} in settings.toml is more than the {limit} tokens that "
            f"{options.model} was made for; lower it."
        )


def deploy(options: ServeOptions) -> None:
    """Deploy the application, or update the one that runs, and return when it answers.

    Raises:
        settings.UserError: the port is taken, the cluster is too small, or the application fails to start.
    """
    check_cpus(options)
    check_address(options)
    print(f"serve_llm: loading vLLM to serve {options.served_name} from {options.source}", flush=True)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # what it says at INFO, wait_until_healthy says shorter
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    with ThreadPoolExecutor(1) as background:
        started = background.submit(start_serve, options)
        from pipeline.serving import app  # imports vLLM, which takes about as long as Serve takes to start

        started.result()
    options = as_place_demands(options)
    told = canary.actor()
    url = options.root + options.path.rstrip("/")
    is_update = answers(url)
    application = app.build(options, address(options))
    target = serve.RunTarget(application, name=options.app, route_prefix=options.path)
    serve.run_many([target], wait_for_applications_running=False)
    wait_until_healthy("serve_llm", options.app, options.served_name, url, options.start_timeout_s, is_update=is_update)
    if options.canary_percent:
        ray.get(told.give_canary.remote(options.canary_percent, options.model_dump()))


def as_place_demands(options: ServeOptions) -> ServeOptions:
    """A canary answers by the name of the model at the address; beside it, no other has that name.

    Raises:
        settings.UserError: nothing is served there, or the name is taken.
    """
    if options.path == canary.ROOT:
        return options
    apps = ray.get(canary.actor().apps.remote())
    if canary.ROOT not in apps:
        raise settings.UserError("nothing is served yet that this could stand beside: inv submit serve_llm")
    name = apps[canary.ROOT]["models"][0]
    if options.canary_percent:
        return options.model_copy(update={"model_name": name})
    if options.served_name == name:
        raise settings.UserError(f"{name} is served already: give this one another --model-name, or leave out --add.")
    return options


def address(options: ServeOptions) -> str:
    """The server's address as replicas on all machines reach it: it listens on the head."""
    head = ray.get_runtime_context().gcs_address.rpartition(":")[0]
    return f"http://{head}:{options.port}" if options.host == "0.0.0.0" else options.root


def check_cpus(options: ServeOptions) -> None:
    """Refuse more CPUs than the cluster has: no machine comes for them, and Serve would wait for ever."""
    if options.accelerator != "cpu":
        return  # machines with GPUs come when they are asked for
    wanted = options.tensor_parallel_size * options.pipeline_parallel_size + options.num_cpus
    there = ray.cluster_resources().get("CPU", 0)
    if options.min_replicas * wanted > there:
        raise settings.UserError(
            f"{options.min_replicas} replicas of {wanted:g} CPUs each do not fit the cluster's {there:g}: "
            "lower min_replicas in [serve] of settings.toml, or raise num_cpus in [local.ray] and start it again."
        )


def check_address(options: ServeOptions) -> None:
    """Refuse a port that somebody else has, and to move Serve away under another application."""
    current = current_address()
    if current == (options.host, options.port):
        return
    others = serve.status().applications.keys() - {options.app}
    if current and others:
        raise settings.UserError(
            f"Serve listens on port {current[1]} for {', '.join(others)} too: set port in [serve] of settings.toml "
            f"to {current[1]}, or end {', '.join(others)} first."
        )
    try:
        socket.create_server((options.host, options.port)).close()
    except OSError as error:
        raise settings.UserError(
            f"port {options.port} on {options.host} cannot be had ({error.strerror}): end what listens there, "
            "or set another port in [serve] of settings.toml."
        ) from None


def start_serve(options: ServeOptions) -> None:
    """Start Serve's HTTP server on the options' address, unless it listens there already."""
    current = current_address()
    if current == (options.host, options.port):
        return
    if current:  # Serve cannot change it while it runs
        print(f"serve_llm: moving from port {current[1]} to {options.port}", flush=True)
        serve.shutdown()
    serve.start(proxy_location="HeadOnly", http_options={"host": options.host, "port": options.port})


def current_address() -> tuple[str, int] | None:
    """Return host and port that this cluster's Serve listens on, or None if it does not run."""
    running = private_serve.client()
    return running and (running.http_config.host, running.http_config.port)


def wait_until_healthy(job: str, app: str, name: str, url: str, timeout_s: int, *, is_update: bool) -> None:
    """Wait for an application that answers at `url`, saying how far it is and how long it took; `job` deployed it.

    When it fails it is taken down, but for an update, before which it answered: that goes on.
    """
    started = time.monotonic()
    said, said_at = "", 0.0
    while True:
        status = serve.status().applications[app]
        waited = time.monotonic() - started
        if status.status == ApplicationStatus.RUNNING and answers(url):
            print(f"{job}: healthy after {waited:.0f} s", flush=True)
            return
        if status.status == ApplicationStatus.DEPLOY_FAILED or waited > timeout_s:
            if not is_update:
                stop(app)
            outcome = "what was served before goes on" if is_update else "it is stopped"
            raise settings.UserError(
                f"{name} was not healthy after {waited:.0f} s, and {outcome}: {last_words(status)}; "
                f"correct that and try again: inv submit {job}"
            )
        if (state := _state(status)) != said or waited > said_at + SAY_EVERY_S:
            print(f"{job}: {waited:3.0f} s of at most {timeout_s}: {state}", flush=True)
            said, said_at = state, waited
        time.sleep(0.5)


def last_words(app: ApplicationStatusOverview) -> str:
    """What the first unhealthy deployment says, or the replica of it that failed, without the traceback."""
    messages = [deployment.message for deployment in app.deployments.values() if deployment.message.strip()]
    if not messages:
        return app.message or "Serve gives no reason; read the logs with: inv logs"
    lines = messages[0].strip().splitlines()
    return re.sub(r"^(\w+(Error|Exception): )+", "", lines[-1] if "Traceback" in messages[0] else " ".join(lines))


def _state(app: ApplicationStatusOverview) -> str:
    """Each deployment with the number of its replicas in each state."""
    parts = []
    for name, deployment in app.deployments.items():
        counts = [f"{count} {state.lower()}" for state, count in deployment.replica_states.items()]
        parts.append(f"{name} {' and '.join(counts) or 'waits for a worker'}")
    return ", ".join(parts)


def stop(app: str = APP) -> None:
    """End an application, and Serve with it when it serves no other."""
    if serve.status().applications.keys() - {app}:
        serve.delete(app)
        return
    serve.shutdown()
    ray.kill(canary.actor())


def wait_for_interrupt(app: str = APP) -> None:
    """Keep alive the Ray that this process started, until Ctrl-C."""
    print("serving until Ctrl-C", flush=True)
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        print("\nstopping", flush=True)
        serve.delete(app)  # engines end in order; the rest of Serve ends with Ray, and Ray with this process


def answers(url: str) -> bool:
    """Whether the application at that URL is healthy."""
    try:
        return requests.get(f"{url}/health", timeout=5).ok
    except requests.RequestException:
        return False


if __name__ == "__main__":
    cli.run(main)
