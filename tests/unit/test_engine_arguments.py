"""Test the checks of [serve.engine], which need no vLLM."""

import re
from pathlib import Path
from typing import Any

import pytest

from raymill import settings
from raymill.errors import UserError
from raymill.serving import engine_arguments
from raymill.serving.options import ServeOptions

ACCEPTED: list[dict[str, Any]] = [
    {},
    {"quantization": "fp8", "kv_cache_dtype": "fp8", "enable_prefix_caching": False, "gpu_memory_utilization": 0.8},
    {"gpu_memory_utilization": 1, "max_num_batched_tokens": 4096, "seed": 7},
    {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}},
    {"hf_overrides": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}},
    {"default_chat_template_kwargs": {"enable_thinking": False}},
    {"trust_remote_code": False},
]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"quantisation": "fp8"}, "vLLM has no argument quantisation; did you mean quantization?"),
    ({"nonsense": 1}, "vLLM has no argument nonsense"),
    ({"gpu_memory_utilization": "high"}, "engine.gpu_memory_utilization takes float (found 'high')"),
    ({"enable_prefix_caching": 1}, "engine.enable_prefix_caching takes bool (found 1)"),
    ({"seed": True}, "engine.seed takes int (found True)"),
    ({"speculative_config": "ngram"}, "engine.speculative_config takes table (found 'ngram')"),
    ({"max_model_len": 9}, "engine.max_model_len is set by max_model_len in [serve]; set that instead"),
    ({"kv_cache_memory_bytes": 9}, "engine.kv_cache_memory_bytes is set by kv_cache_gib in [serve]; set that instead"),
    ({"nnodes": 2}, "engine.nnodes is set by Ray; remove it"),
    ({"limit_mm_per_prompt": {"image": 1}}, "engine.limit_mm_per_prompt has no effect, because the server reads only"),
    ({"hf_token": "x"}, "engine.hf_token would be stored in settings.toml; put HF_TOKEN into .env instead"),
    (
        {"trust_remote_code": True},
        "engine.trust_remote_code runs code from the model's repository; if you want that, set allow_unsafe = "
        '["trust_remote_code"] in [serve]',
    ),
    ({"kv_transfer_config": {"kv_connector": "P2pNcclConnector"}}, "engine.kv_transfer_config opens ports"),
    (
        {"structured_outputs_config": {"backend": "xgrammar"}},
        "engine.structured_outputs_config has no effect, because the server compiles",
    ),
    ({"speculative_config": {"trust_remote_code": True}}, "engine.trust_remote_code runs code"),
    ({"otlp_traces_endpoint": "http://host"}, "engine.otlp_traces_endpoint sends traces to another server"),
]


@pytest.mark.parametrize("arguments", ACCEPTED, ids=str)
def test_valid_arguments_are_accepted(arguments: dict[str, Any]) -> None:
    engine_arguments.check(arguments, ())


@pytest.mark.parametrize(("arguments", "sentence"), REFUSED, ids=str)
def test_invalid_arguments_are_refused(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(sentence)):
        engine_arguments.check(arguments, ())


def test_unsafe_arguments_need_a_word() -> None:
    engine_arguments.check({"trust_remote_code": True}, ("trust_remote_code",))
    with pytest.raises(ValueError, match=r"allow_unsafe has no argument trust_code; did you mean trust_remote_code\?"):
        engine_arguments.check({"trust_remote_code": True}, ("trust_code", "trust_remote_code"))


def test_a_profile_adds_arguments_to_the_shared_ones(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(
        (settings.PROJECT / "settings.toml").read_text()
        + "\n[serve.engine]\nseed = 1\nenable_prefix_caching = false\n[local.serve.engine]\nseed = 2\n"
    )
    assert settings.load(ServeOptions, "serve", profile="local", file=file).engine == {
        "seed": 2,
        "enable_prefix_caching": False,
    }
    assert settings.load(ServeOptions, "serve", profile="cluster", file=file).engine["seed"] == 1


def test_adapters_on_a_cpu_allow_no_other_worker_extension(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    text = (settings.PROJECT / "settings.toml").read_text()
    added = 'adapters = "runs"\nallow_unsafe = ["worker_extension_cls"]\nmax_loras = 4'
    file.write_text(
        text.replace("max_loras = 4", added) + '\n[serve.engine]\nworker_extension_cls = "mine.Extension"\n'
    )
    with pytest.raises(UserError, match=r"remove engine\.worker_extension_cls or adapters"):
        settings.load(ServeOptions, "serve", profile="local", file=file)
    settings.load(ServeOptions, "serve", profile="cluster", file=file)


@pytest.mark.parametrize("name", ["tool_parser", "reasoning_parser"])
def test_a_misspelled_parser_is_refused(name: str, tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    text = (settings.PROJECT / "settings.toml").read_text()
    file.write_text(text.replace(f'{name} = "auto"', f'{name} = "mistrall"'))
    with pytest.raises(UserError, match=rf"vLLM has no {name} mistrall; did you mean mistral\?"):
        settings.load(ServeOptions, "serve", profile="local", file=file)
