"""Checks the table [serve.engine], whose keys are arguments of vLLM."""

import difflib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from raymill.serving import vllm_arguments

OWNED = {
    "model": "model",
    "model_weights": "model",
    "served_model_name": "model_name",
    "dtype": "dtype",
    "max_model_len": "max_model_len",
    "max_num_seqs": "max_num_seqs",
    "max_num_queued_reqs": "max_queued_requests",
    "enforce_eager": "enforce_eager",
    "tensor_parallel_size": "tensor_parallel_size",
    "pipeline_parallel_size": "pipeline_parallel_size",
    "data_parallel_size": "max_replicas",
    "kv_cache_memory_bytes": "kv_cache_gib",
    "enable_lora": "adapters",
    "lora_modules": "adapters",
    "max_loras": "max_loras",
    "max_lora_rank": "max_lora_rank",
    "enable_auto_tool_choice": "tool_parser",
    "tool_call_parser": "tool_parser",
    "reasoning_parser": "reasoning_parser",
}
"""Arguments that a setting of [serve] sets."""

SET_BY_RAY = {
    "distributed_executor_backend",
    "master_addr",
    "master_port",
    "nnodes",
    "node_rank",
    "data_parallel_address",
    "data_parallel_backend",
    "data_parallel_external_lb",
    "data_parallel_hybrid_lb",
    "data_parallel_multi_port_external_lb",
    "data_parallel_rank",
    "data_parallel_rpc_port",
    "data_parallel_size_local",
    "data_parallel_start_rank",
}

ONLY_TEXT = "the server reads only text"
NO_EFFECT = {
    "limit_mm_per_prompt": ONLY_TEXT,
    "allowed_media_domains": ONLY_TEXT,
    "structured_outputs_config": "the server compiles all schemas and grammars with llguidance",
}
"""Arguments that the server sets for all models, and why."""

UNSAFE = {
    "trust_remote_code": "runs code from the model's repository",
    "worker_cls": "runs other code",
    "worker_extension_cls": "runs other code",
    "scheduler_cls": "runs other code",
    "scheduling_policy": "lets API keys starve each other",
    "model_class_overrides": "runs other code",
    "logits_processors": "runs other code",
    "io_processor_plugin": "runs other code",
    "reasoning_parser_plugin": "runs other code",
    "tool_parser_plugin": "runs other code",
    "tool_server": "lets the model call other servers, or run code",
    "trust_request_chat_template": "lets clients run chat templates",
    "enable_prompt_embeds": "lets clients send tensors, which can crash the engine",
    "enable_mm_embeds": "lets clients send tensors, which can crash the engine",
    "allowed_local_media_path": "lets clients read files",
    "kv_transfer_config": "opens ports to other engines",
    "kv_connector_module_path": "runs other code",
    "kv_events_config": "opens a port",
    "ec_transfer_config": "opens ports to other engines",
    "otlp_traces_endpoint": "sends traces to another server",
    "profiler_config": "writes profiles to any folder",
    "enable_log_requests": "writes prompts to logs",
    "enable_log_outputs": "writes answers to logs",
    "log_config_file": "replaces the configuration of logs",
}
"""Arguments that let code, other servers or clients in, or data out, and why. They need a word in `allow_unsafe`."""


def check(arguments: Mapping[str, Any], allow_unsafe: Collection[str]) -> None:
    """Check the names and types of vLLM's arguments.

    Raises:
        ValueError: an argument does not exist, has another type, belongs to a setting of [serve] or to Ray, or is
            unsafe and not in `allow_unsafe`.
    """
    known = vllm_arguments.stored().engine | vllm_arguments.stored().frontend
    for name, value in arguments.items():
        if name in OWNED:
            raise ValueError(f"engine.{name} is set by {OWNED[name]} in [serve]; set that instead")
        if name in SET_BY_RAY:
            raise ValueError(f"engine.{name} is set by Ray; remove it")
        if name in NO_EFFECT:
            raise ValueError(f"engine.{name} has no effect, because {NO_EFFECT[name]}; remove it")
        if name == "hf_token":
            raise ValueError("engine.hf_token would be stored in settings.toml; put HF_TOKEN into .env instead")
        if name not in known:
            raise ValueError(f"vLLM has no argument {name}{meant(name, known.keys() - SET_BY_RAY)}")
        if not vllm_arguments.accepts(known[name], value):
            raise ValueError(f"engine.{name} takes {known[name]} (found {value!r})")
    for name in _unsafe(arguments):
        if name not in allow_unsafe:
            raise ValueError(
                f'engine.{name} {UNSAFE[name]}; if you want that, set allow_unsafe = ["{name}"] in [serve]'
            )
    for name in allow_unsafe:
        if name not in UNSAFE:
            raise ValueError(f"allow_unsafe has no argument {name}{meant(name, UNSAFE)}")


def of_engine(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of vLLM's engine."""
    return {name: value for name, value in arguments.items() if name in vllm_arguments.stored().engine}


def of_api(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of vLLM's HTTP API."""
    return {name: value for name, value in arguments.items() if name in vllm_arguments.stored().frontend}


def meant(name: str, known: Collection[str]) -> str:
    """Return a suggestion for a misspelled name, or "" if no known name is similar."""
    near = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {near[0]}?" if near else ""


def _unsafe(value: Any) -> Iterator[str]:
    """Yield the unsafe names in nested tables and lists."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if name in UNSAFE and inner not in (None, False, "", [], {}):
                yield name
            yield from _unsafe(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _unsafe(inner)
