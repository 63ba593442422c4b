"""What a user tunes about serving: the [serve] section of settings.toml, and the command line."""

import hashlib
import os
import re
from pathlib import PurePosixPath
from typing import Literal

from pydantic import Field, model_validator

import settings
from jobs.serving.limits import Rules

APP = "llm"
"""Name of Serve's application at the address itself; those of the others begin with it."""
ROOT, CANARY = "/", "/canary"
"""Paths of the app at the address itself, and of the one that gets a share of its requests."""


class ServeOptions(settings.Section):
    """[serve] of settings.toml."""

    model: str
    """Folder in Hugging Face format, hub id, or s3:// URI."""
    model_name: str = ""
    """Name by which clients ask for the model; empty: the run's name, or the model's own."""
    beside: bool = False
    """Serve the model beside what is served, at the same address, rather than in its place."""
    canary_percent: float = Field(default=0, ge=0, le=100)
    """Serve the model as a canary under the same name as the current one, with this percentage of its requests."""
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
    """Sequences in progress on one replica at most; requests for more wait."""
    max_queued_requests: int = Field(ge=0)
    """Requests that wait on one replica at most; more get 503."""
    max_request_sequences: int = Field(ge=1)
    """Sequences of one request at most: its prompts times the answers to each; more gets 400."""
    prefix_routing: bool = False
    """Hand requests that begin alike to the same replica, which still knows that beginning; asking which one that is
    takes a few milliseconds of each request."""
    max_surge_percent: int = Field(ge=0, le=100)
    """Replicas more, while an update starts those that replace the old ones, which answer until then; rounded up to
    whole ones. With 0 the old ones end first, and requests get 503 until a new one is up."""
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
    """Sequences in a minute that each key may ask of one replica; more get 429."""
    key_requests_at_once: int = Field(ge=1)
    """Sequences in progress that each key may have on one replica; more get 429."""
    max_body_mib: float = Field(gt=0)
    """MiB of one request at most; more gets 413."""
    body_timeout_s: float = Field(gt=0)
    """Seconds in which a request's body must arrive; after them it gets 408."""
    request_timeout_s: float = Field(gt=0)
    """Seconds in which a request must be answered whole, time in the queue included; then it is ended with 504."""

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
                    f"max_request_sequences = {self.max_request_sequences} is more than {name} = {getattr(self, name)}"
                )
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
            body_timeout_s=self.body_timeout_s,
            max_sequences=self.max_request_sequences,
            slots=self.max_ongoing_requests,
            max_waiting=self.max_queued_requests,
        )

    @property
    def root(self) -> str:
        """The server's address on the machine that listens, or behind a tunnel to it."""
        return f"http://{self.host.replace('0.0.0.0', '127.0.0.1')}:{self.port}"

    @property
    def path(self) -> str:
        """Where the application is, below the server's address."""
        if self.canary_percent:
            return CANARY
        return f"/models/{_path_segment(self.served_name)}" if self.beside else ROOT

    @property
    def app(self) -> str:
        """Name of Serve's application."""
        return app_name(self.path)

    @property
    def url(self) -> str:
        """Base URL for OpenAI clients."""
        return f"{self.root}/v1"


def app_name(path: str) -> str:
    """Name of Serve's application at the path."""
    return APP if path == ROOT else APP + path.replace("/", "-")


def _path_segment(name: str) -> str:
    """The name as it stands in a path and in an application's name; each name has its own."""
    plain = re.sub(r"[^a-zA-Z0-9._-]", "-", name)
    return plain if plain == name else f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


class ServedOptions(settings.Section):
    """What to do; nothing: show."""

    canary_percent: float | None = Field(default=None, ge=0, le=100)
    """Share of the requests that the canary gets from now on."""
    promote: bool = False
    """Put the canary in the place of the model that it was tried against."""
    roll_back: bool = False
    """End the canary."""
    end: str = ""
    """Name of a model that is served beside another, or `rag`, to be ended."""

    @model_validator(mode="after")
    def _one_thing(self) -> "ServedOptions":
        if sum((self.canary_percent is not None, self.promote, self.roll_back, bool(self.end))) > 1:
            raise ValueError("one thing at a time: --canary-percent, --promote, --roll-back or --end")
        return self
