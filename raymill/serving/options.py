"""Options of `serve_llm` (section [serve] of settings.toml, which the command line overrides) and of `models`."""

import hashlib
import os
import re
from pathlib import PurePosixPath
from typing import Any, Literal

from pydantic import Field, model_validator

from raymill import settings
from raymill.instance_types import INSTANCE_TYPES
from raymill.ray_support import aws_sections
from raymill.serving import engine_arguments, haproxy, vllm_arguments
from raymill.serving.rate_limits import RequestLimits

APP = "llm"
"""Name of the Serve application at the root path. The names of the other models' applications start with it."""
ROOT, CANARY = "/", "/canary"
"""Paths of the main app, and of the canary that gets a share of its requests."""
RAG_APP, RAG_PATH = "rag", "/rag"
"""Name and path of the application of `serve_rag`."""
FOLDERS = ("models", "runs")
"""Folders for models. On AWS they are in the bucket, so `models/NAME` is no hub id there either."""
DRAIN_S = 20.0
"""Seconds that running answers get by default before a model is stopped."""
AUTO = "auto"
"""Choose a parser for the model's chat template."""


class ServeOptions(settings.Section):
    """The [serve] section of settings.toml."""

    model: str
    """Folder in Hugging Face format, hub id, or s3:// URI."""
    model_name: str = ""
    """Name that clients use for the model. Empty: the name of the run or of the model."""
    add: bool = False
    """Serve an additional model at the same address. Without this option, the model replaces the main model."""
    canary_percent: float = Field(default=0, ge=0, le=100)
    """Serve the model as a canary under the main model's name, with this percentage of that model's requests."""
    host: str
    """Address to listen on. Only this machine can reach the loopback address."""
    port: int = Field(ge=1, le=65535)
    """Port to listen on."""
    accelerator: str
    """`cpu`; `gpu`, which stands for the GPUs of [cluster.gpu]; or a type of GPU as Ray names it, such as A100."""
    tensor_parallel_size: int = Field(ge=1)
    """Devices that share each layer."""
    pipeline_parallel_size: int = Field(ge=1)
    """Pipeline stages: groups of devices, each of which computes some of the layers."""
    num_cpus: float = Field(default=1, ge=0)
    """Logical CPUs of each replica. With accelerator = "cpu", each device needs one more."""
    min_replicas: int = Field(ge=0)
    """Replicas that always run."""
    max_replicas: int = Field(ge=1)
    """Maximum number of replicas."""
    target_ongoing_requests: int = Field(ge=1)
    """Average number of requests in progress per replica above which replicas are added."""
    upscale_delay_s: float = Field(ge=0)
    """Seconds above target_ongoing_requests before a replica is added."""
    downscale_delay_s: float = Field(ge=0)
    """Seconds below target_ongoing_requests before a replica is removed."""
    max_ongoing_requests: int = Field(ge=1)
    """Maximum sequences in progress on one replica. Further requests wait."""
    max_queued_requests: int = Field(ge=0)
    """Maximum requests that wait on one replica. Further requests get 503."""
    max_request_sequences: int = Field(ge=1)
    """Maximum sequences of one request (prompts times `n`). Larger requests get 400."""
    prefix_routing: bool = False
    """Send requests with the same prefix to the replica that has it cached. This adds a few ms to each request."""
    share_prefix_cache: bool = False
    """Let keys use what the engine has computed for the prompts of other keys. Then a system prompt that keys have in
    common is computed once, but the time of an answer reveals whether another key has sent the same beginning."""
    max_surge_percent: int = Field(ge=0, le=100)
    """Percentage of extra replicas during an update, rounded up; the old ones answer until the new ones are ready.
    With 0 the old ones end first, and requests get 503 until a new one is up."""
    dtype: Literal["float32", "bfloat16", "float16"]
    """Data type of the weights and the computation."""
    max_model_len: int = Field(ge=2)
    """Maximum number of tokens of prompt and answer together."""
    max_num_seqs: int = Field(ge=1)
    """Maximum number of sequences that the engine decodes in one batch."""
    kv_cache_gib: float | None = Field(default=None, gt=0)
    """GiB for the KV cache. None: the free memory that vLLM finds on the device."""
    enforce_eager: bool = False
    """Run the model without compiling it. The engine starts faster, but answers more slowly."""
    tool_parser: str = AUTO
    """vLLM's name of the parser that finds tool calls in answers. auto: the one for the model's chat template. Empty:
    requests with tools get 400."""
    reasoning_parser: str = AUTO
    """vLLM's name of the parser that separates reasoning from answers. auto: the one for the model's chat template.
    Empty: reasoning stays in the answers."""
    engine: dict[str, Any] = Field(default_factory=dict)
    """More arguments of vLLM, by vLLM's names. On the command line as JSON: '{"quantization": "fp8"}'."""
    allow_unsafe: tuple[str, ...] = ()
    """Arguments in `engine` that let code, other servers or clients in, and that you want anyway."""
    adapters: str = ""
    """Folder or s3:// URI of runs. Their LoRA adapters for `model` are served too, each under its run's name. Empty:
    no adapters. The engine is slightly slower with adapters."""
    max_loras: int = Field(ge=1)
    """Maximum number of adapters in one batch. Requests for other adapters wait."""
    max_lora_rank: Literal[8, 16, 32, 64, 128, 256]
    """Maximum rank of an adapter. The engine reserves memory for this rank."""
    start_timeout_s: int = Field(ge=1)
    """Seconds to wait for the application to become healthy."""
    key_requests_per_minute: int = Field(ge=1)
    """Maximum sequences per minute that each key may request from one replica. Further requests get 429."""
    key_requests_at_once: int = Field(ge=1)
    """Maximum sequences that each key may have in progress on one replica. Further requests get 429."""
    key_tokens_per_minute: int = Field(default=0, ge=0)
    """Maximum tokens of prompts and answers per minute for each key on one replica. Requests get 429 once a key has
    used them up; those in progress finish. 0: no maximum."""
    max_body_mib: float = Field(gt=0)
    """Maximum MiB of a request's body. Larger requests get 413."""
    body_timeout_s: float = Field(gt=0)
    """Seconds within which a request's body must arrive. Slower requests get 408."""
    request_timeout_s: float = Field(gt=0, le=haproxy.MAX_REQUEST_TIMEOUT_S)
    """Seconds within which a request must be fully answered, including its time in the queue. Slower ones get 504."""

    @model_validator(mode="after")
    def _replicas_in_order(self) -> "ServeOptions":
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas = {self.min_replicas} is more than max_replicas = {self.max_replicas}")
        return self

    @model_validator(mode="after")
    def _room_for_the_largest_request(self) -> "ServeOptions":
        for name in ("max_ongoing_requests", "key_requests_at_once", "key_requests_per_minute"):
            if getattr(self, name) < self.max_request_sequences:
                raise ValueError(
                    f"max_request_sequences = {self.max_request_sequences} is more than "
                    f"{name} = {getattr(self, name)}; lower it, or raise {name}"
                )
        return self

    @model_validator(mode="after")
    def _add_or_canary(self) -> "ServeOptions":
        if self.add and self.canary_percent:
            raise ValueError("add = true and canary_percent cannot be combined: remove one of them")
        return self

    @model_validator(mode="after")
    def _parsers_exist(self) -> "ServeOptions":
        for name in ("tool_parser", "reasoning_parser"):
            if (parser := getattr(self, name)) in ("", AUTO):
                continue
            known = getattr(vllm_arguments.stored(), f"{name}s")
            if parser not in known:
                raise ValueError(f"vLLM has no {name} {parser}{engine_arguments.meant(parser, known)}")
        return self

    @model_validator(mode="after")
    def _engine_arguments_exist(self) -> "ServeOptions":
        engine_arguments.check(self.engine, self.allow_unsafe)
        return self

    @model_validator(mode="after")
    def _one_worker_extension(self) -> "ServeOptions":
        if self.adapters and self.accelerator == "cpu" and self.engine.get("worker_extension_cls"):
            raise ValueError(
                "adapters on a CPU need the project's worker extension; remove engine.worker_extension_cls or adapters"
            )
        return self

    @property
    def accelerator_type(self) -> str | None:
        """Type of the GPUs that a replica needs, as Ray names it. None: any type, or no GPU."""
        if self.accelerator == "gpu":
            name = aws_sections.load_gpu().serve_instance_type
            return INSTANCE_TYPES[name].gpu.accelerator if name else None
        return None if self.accelerator == "cpu" else self.accelerator

    @property
    def is_one_cpu(self) -> bool:
        """Whether an engine computes on the CPU, and does not split the model."""
        return self.accelerator == "cpu" and self.tensor_parallel_size == self.pipeline_parallel_size == 1

    @property
    def is_hub_id(self) -> bool:
        """Whether `model` looks like `owner/name` or `name`, and its first part is not a folder of this project."""
        looks_like_id = re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", self.model) is not None
        first = self.model.split("/")[0]
        return looks_like_id and first not in FOLDERS and not os.path.isdir(settings.resolve(first))

    @property
    def source(self) -> str:
        """Location from which vLLM loads the model: an absolute path, a URI or a hub id."""
        return self.model if self.is_hub_id else settings.resolve(self.model)

    @property
    def trust_remote_code(self) -> bool:
        """Whether code from the model's repository may run."""
        return bool(self.engine.get("trust_remote_code"))

    @property
    def served_name(self) -> str:
        """Name of the model in the API: `model_name`, or a default.

        The default is NAME for `runs/NAME/model`, the last part of another path, or the hub id.
        """
        if self.model_name or self.is_hub_id:
            return self.model_name or self.model
        parts = PurePosixPath(self.source).parts
        return parts[-2] if parts[-1] == "model" else parts[-1]

    @property
    def limits(self) -> RequestLimits:
        """The limits that a replica enforces."""
        return RequestLimits(
            per_minute=self.key_requests_per_minute,
            at_once=self.key_requests_at_once,
            max_body=int(self.max_body_mib * 2**20),
            timeout_s=self.request_timeout_s,
            body_timeout_s=self.body_timeout_s,
            max_sequences=self.max_request_sequences,
            slots=self.max_ongoing_requests,
            max_waiting=self.max_queued_requests,
            tokens_per_minute=self.key_tokens_per_minute,
        )

    @property
    def root(self) -> str:
        """The server's URL on the machine where it runs, or on a machine with a tunnel to it."""
        return f"http://{self.host.replace('0.0.0.0', '127.0.0.1')}:{self.port}"

    @property
    def path(self) -> str:
        """Path of the application."""
        if self.canary_percent:
            return CANARY
        return f"/models/{_path_segment(self.served_name)}" if self.add else ROOT

    @property
    def app(self) -> str:
        """Name of the Serve application."""
        return app_name(self.path)

    @property
    def url(self) -> str:
        """Base URL for OpenAI clients."""
        return f"{self.root}/v1"


def app_name(path: str) -> str:
    """Return the name of the Serve application at a path."""
    return APP if path == ROOT else APP + path.replace("/", "-")


def _path_segment(name: str) -> str:
    """Return a unique form of the name that is valid in paths and application names."""
    plain = re.sub(r"[^a-zA-Z0-9._-]", "-", name)
    return plain if plain == name else f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


class ModelsOptions(settings.Section):
    """A change to the served models. Without options, the job lists the models."""

    canary_percent: float | None = Field(default=None, ge=0, le=100)
    """Percentage of requests for the canary."""
    promote: bool = False
    """Replace the main model with the canary."""
    roll_back: bool = False
    """Stop the canary."""
    end: str = ""
    """Stop serving this additional model, or `rag`."""
    end_all: bool = False
    """Stop serving all models, and `rag`."""
    drain: float | None = Field(default=None, ge=0)
    """Seconds that running answers get before a model is stopped; then they are cut off. None: 20 seconds, and with
    `promote`, as long as a request may take."""

    @model_validator(mode="after")
    def _one_change(self) -> "ModelsOptions":
        if sum((self.canary_percent is not None, self.promote, self.roll_back, bool(self.end), self.end_all)) > 1:
            raise ValueError("use only one of --canary-percent, --promote, --roll-back, --end and --end-all")
        if self.drain is not None and not (self.promote or self.roll_back or self.end or self.end_all):
            raise ValueError("--drain stops nothing by itself; use it with --promote, --roll-back, --end or --end-all")
        return self

    @property
    def drain_s(self) -> float:
        """Seconds that running answers get before a model is stopped."""
        return DRAIN_S if self.drain is None else self.drain
