"""Serves a model over an OpenAI-compatible API with vLLM replicas on Ray Serve.

python -m jobs.serve_llm            deploys [serve] of settings.toml, or updates what runs
python -m jobs.serve_llm --help     explains every option
"""

import hashlib
import importlib.util
import logging
import os
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePosixPath
from typing import Literal

import ray
import requests
from pydantic import Field, field_validator, model_validator
from ray import serve
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview
from ray.util import accelerators
from transformers import AutoConfig

import settings
from jobs import cli, secrets
from jobs.serving import traffic
from jobs.serving.door import Rules

APP = "llm"
SAY_EVERY_S = 15


class ServeOptions(settings.Section):
    """[serve] of settings.toml."""

    model: str
    """Folder in Hugging Face format, hub id, or s3:// URI."""
    model_name: str = ""
    """Name by which clients ask for the model; empty: the run's name, or the model's own."""
    beside: bool = False
    """Serve the model beside what is served, at the same address, rather than in its place."""
    canary_percent: float = Field(default=0, ge=0, le=100)
    """Serve the model as a canary: beside the one at the address, by the same name, with this share of its requests."""
    host: str
    """Address to listen on; the loopback address keeps strangers out."""
    port: int = Field(ge=1, le=65535)
    """Port to listen on."""
    accelerator: str
    """`cpu`, or a type of GPU as Ray names it, such as A100."""
    tensor_parallel_size: int = Field(ge=1)
    """Devices that share each layer."""
    pipeline_parallel_size: int = Field(ge=1)
    """Groups of devices that share the layers in sequence."""
    num_cpus: float = Field(default=1, ge=0)
    """Logical CPUs of each replica, beside one for each device that is a CPU."""
    min_replicas: int = Field(ge=0)
    """Replicas that always run."""
    max_replicas: int = Field(ge=1)
    """Replicas that run at most."""
    target_ongoing_requests: int = Field(ge=1)
    """Requests in progress on one replica, on average, above which replicas are added."""
    upscale_delay_s: float = Field(ge=0)
    """Seconds of more requests than that before a replica is added."""
    downscale_delay_s: float = Field(ge=0)
    """Seconds of fewer before one is ended."""
    max_ongoing_requests: int = Field(ge=1)
    """Requests in progress on one replica at most; more wait."""
    prefix_routing: bool = False
    """Hand requests that begin alike to the same replica, which still knows that beginning; asking which one that is
    takes a few milliseconds of each request."""
    max_surge_percent: int = Field(ge=0, le=100)
    """Replicas more, while an update starts those that replace the old ones, which answer until then; rounded up to
    whole ones. With 0 the old ones end first."""
    dtype: Literal["float32", "bfloat16", "float16"]
    """Number format of the weights and the computation."""
    max_model_len: int = Field(ge=2)
    """Tokens of prompt and answer together at most."""
    max_num_seqs: int = Field(ge=1)
    """Sequences that the engine decodes in one batch at most."""
    kv_cache_gib: float | None = Field(default=None, gt=0)
    """GiB of memory for keys and values; none: what vLLM finds free on the device."""
    enforce_eager: bool = False
    """Run the model without compiling it: starts sooner, answers slower."""
    adapters: str = ""
    """Folder of runs, or its s3:// URI, whose LoRA adapters over `model` are served too, each by its run's name; empty:
    none. The engine is somewhat slower with them."""
    max_loras: int = Field(ge=1)
    """Adapters that share a batch at most; requests for more wait."""
    max_lora_rank: Literal[8, 16, 32, 64, 128, 256]
    """Rank of an adapter at most; the engine sets memory aside for it."""
    start_timeout_s: int = Field(ge=1)
    """Seconds until a deployment that is not healthy is given up."""
    key_requests_per_minute: int = Field(ge=1)
    """Requests in a minute that each key may ask of one replica; more get 429."""
    key_requests_at_once: int = Field(ge=1)
    """Requests in progress that each key may have on one replica; more get 429."""
    max_body_mib: float = Field(gt=0)
    """MiB of one request at most; more gets 413."""
    request_timeout_s: float = Field(gt=0)
    """Seconds in which a request must be answered whole; after them it is ended, and gets 504."""

    @field_validator("accelerator")
    @classmethod
    def _known_to_ray(cls, value: str) -> str:
        known = {name for constant, name in vars(accelerators).items() if constant.isupper()}
        if value != "cpu" and value not in known:
            raise ValueError(f"Ray knows no accelerator of that name; it knows cpu, {', '.join(sorted(known))}")
        return value

    @model_validator(mode="after")
    def _replicas_in_order(self) -> "ServeOptions":
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas = {self.min_replicas} is more than max_replicas = {self.max_replicas}")
        return self

    @model_validator(mode="after")
    def _in_one_place(self) -> "ServeOptions":
        if self.beside and self.canary_percent:
            raise ValueError("beside = true and canary_percent are two different things: leave one out")
        return self

    @property
    def is_hub_id(self) -> bool:
        """Whether `model` reads like `owner/name` and not like a path in this project."""
        reads_like_one = re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", self.model) is not None
        return reads_like_one and not os.path.isdir(settings.resolve(self.model.split("/")[0]))

    @property
    def source(self) -> str:
        """Where vLLM finds the model: an absolute folder, a URI or a hub id."""
        return self.model if self.is_hub_id else settings.resolve(self.model)

    @property
    def served_name(self) -> str:
        """Name of the model in the API: `runs/NAME/model` is NAME, another path its last part, a hub id itself."""
        if self.model_name or self.is_hub_id:
            return self.model_name or self.model
        parts = PurePosixPath(self.source).parts
        return parts[-2] if parts[-1] == "model" else parts[-1]

    @property
    def rules(self) -> Rules:
        """What each replica holds requests to."""
        return Rules(
            per_minute=self.key_requests_per_minute,
            at_once=self.key_requests_at_once,
            max_body=int(self.max_body_mib * 2**20),
            timeout_s=self.request_timeout_s,
        )

    @property
    def root(self) -> str:
        """The server's address on the machine that listens, or behind a tunnel to it."""
        return f"http://{self.host.replace('0.0.0.0', '127.0.0.1')}:{self.port}"

    @property
    def path(self) -> str:
        """Where the application is, below the server's address."""
        if self.canary_percent:
            return traffic.CANARY
        return f"/models/{_path_segment(self.served_name)}" if self.beside else traffic.ROOT

    @property
    def app(self) -> str:
        """Name of Serve's application."""
        return APP if self.path == traffic.ROOT else f"{APP}{self.path.replace('/', '-')}"

    @property
    def url(self) -> str:
        """Base URL for OpenAI clients."""
        return f"{self.root}/v1"


def _path_segment(name: str) -> str:
    """The name as it stands in a path and in an application's name; each name has its own."""
    plain = re.sub(r"[^a-zA-Z0-9._-]", "-", name)
    return plain if plain == name else f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def main(options: ServeOptions) -> None:
    """Serve a model over an OpenAI-compatible API, and return when it answers."""
    secrets.load()
    check(options)
    cli.connect(log_to_driver=False)  # vLLM's start fills screens; its log files keep it
    deploy(options)
    print(f"{options.served_name} is served at {options.url}\nnext: inv chat", flush=True)
    if os.environ.get("RAY_ADDRESS", "local") == "local":
        wait_for_interrupt()


def check(options: ServeOptions) -> None:
    """Refuse what can be known to fail before anything is started."""
    if not secrets.read(["SERVE_API_KEY"]):
        raise settings.Refusal("SERVE_API_KEY is not set, and nothing is served without a key: put it into .env.")
    check_model(options)


def check_model(options: ServeOptions) -> None:
    """Refuse a machine without vLLM, what is no model, and more tokens than it was made for."""
    if importlib.util.find_spec("vllm") is None:
        raise settings.Refusal("vLLM is not installed on this machine, and its CPU build exists for Linux only.")
    if "://" in options.source:
        return  # the replica that fetches it is the first who can look at it
    remedy = "train one with inv submit finetune_ddp, or set model in [serve] of settings.toml."
    if not options.is_hub_id and not os.path.isfile(f"{options.source}/config.json"):
        raise settings.Refusal(f"{options.source} holds no model: {remedy}")
    try:
        limit = getattr(AutoConfig.from_pretrained(options.source), "max_position_embeddings", None)
    except (OSError, ValueError) as error:
        raise settings.Refusal(f"{options.model} cannot be read ({str(error).splitlines()[0]}): {remedy}") from None
    if limit and options.max_model_len > limit:
        raise settings.Refusal(
            f"max_model_len = {options.max_model_len} in settings.toml is more than the {limit} tokens that "
            f"{options.model} was made for; lower it."
        )


def deploy(options: ServeOptions) -> None:
    """Deploy the application, or update the one that runs, and return when it answers.

    Raises:
        settings.Refusal: the port is taken, the cluster is too small, or the application fails to start.
    """
    check_cpus(options)
    check_address(options)
    print(f"serve_llm: loading vLLM to serve {options.served_name} from {options.source}", flush=True)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # what it says at INFO, wait_until_healthy says shorter
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    with ThreadPoolExecutor(1) as background:
        started = background.submit(start_serve, options)
        from jobs import openai_app  # imports vLLM, which takes about as long as Serve takes to start

        started.result()
    options = as_place_demands(options)
    told = traffic.actor()
    url = options.root + options.path.rstrip("/")
    is_update = answers(url)
    application = openai_app.build(options, address(options))
    target = serve.RunTarget(application, name=options.app, route_prefix=options.path)
    serve.run_many([target], wait_for_applications_running=False)
    wait_until_healthy("serve_llm", options.app, options.served_name, url, options.start_timeout_s, is_update=is_update)
    if options.canary_percent:
        ray.get(told.give_canary.remote(options.canary_percent, options.model_dump()))


def as_place_demands(options: ServeOptions) -> ServeOptions:
    """A canary answers by the name of the model at the address; beside it, no other has that name.

    Raises:
        settings.Refusal: nothing is served there, or the name is taken.
    """
    if options.path == traffic.ROOT:
        return options
    apps = ray.get(traffic.actor().apps.remote())
    if traffic.ROOT not in apps:
        raise settings.Refusal("nothing is served yet that this could stand beside: inv submit serve_llm")
    name = apps[traffic.ROOT]["models"][0]
    if options.canary_percent:
        return options.model_copy(update={"model_name": name})
    if options.served_name == name:
        raise settings.Refusal(f"{name} is served already: give this one another --model-name, or leave out --beside.")
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
        raise settings.Refusal(
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
        raise settings.Refusal(
            f"Serve listens on port {current[1]} for {', '.join(others)} too: set port in [serve] of settings.toml "
            f"to {current[1]}, or end {', '.join(others)} first."
        )
    try:
        socket.create_server((options.host, options.port)).close()
    except OSError as error:
        raise settings.Refusal(
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
    """Host and port that this cluster's Serve listens on, which it tells by no public call."""
    running = serve.context._get_global_client(raise_if_no_controller_running=False)
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
            raise settings.Refusal(
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
    ray.kill(traffic.actor())


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
    cli.run(main, ServeOptions, "serve")
