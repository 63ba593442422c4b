"""Checks before a model is served: API key, accelerator, vLLM, model and CPUs."""

import importlib.util
import os

import ray
from transformers import AutoConfig

from raymill import settings
from raymill.errors import UserError
from raymill.model_config import context_length, other_parts
from raymill.ray_support import hub_access, job_secrets
from raymill.serving.accelerator import check_accelerator
from raymill.serving.options import ServeOptions
from raymill.settings import inv

STREAMER = ("runai_model_streamer", "runai_model_streamer_s3")
"""Modules that vLLM needs for `load_format = "runai_streamer"`."""


def check_api_key() -> None:
    """Check that the owner's API key is set.

    Raises:
        UserError: the key is not set.
    """
    if not job_secrets.read(["SERVE_API_KEY"]):
        raise UserError(
            "SERVE_API_KEY is not set, and the server needs a key. "
            "Run: echo SERVE_API_KEY=$(openssl rand -hex 32) >> .env"
        )


def check_model(options: ServeOptions) -> None:
    """Check that Ray knows the accelerator, and that vLLM and the loader of the weights are installed.

    Unless the model is at a URI, also check that it exists and supports `max_model_len` tokens.

    Raises:
        UserError: one of these checks fails.
    """
    check_accelerator(options.accelerator)
    if importlib.util.find_spec("vllm") is None:
        raise UserError("vLLM is not installed on this machine. Its CPU build exists for Linux only.")
    _check_loader(options.engine.get("load_format", ""))
    if "://" in options.source:
        return  # only a replica downloads the model
    remedy = f"Train one with {inv('submit finetune_ddp')}, or set model in [serve] of settings.toml."
    if not options.is_hub_id and not os.path.isfile(f"{options.source}/config.json"):
        raise UserError(f"no model in {options.source}. {remedy}")
    if options.is_hub_id:
        hub_access.check(options.source)
    try:
        config = AutoConfig.from_pretrained(options.source, trust_remote_code=options.trust_remote_code)
    except (OSError, ValueError) as error:
        raise hub_access.explain(error, options.model) or UserError(
            f"cannot read {options.model} ({str(error).splitlines()[0]}). {remedy}"
        ) from None
    if "vision" in other_parts(config) and importlib.util.find_spec("torchvision") is None:
        raise UserError(
            f"{options.model} has a vision tower, for which vLLM needs torchvision, and this environment does not have "
            "it. Serve the model on AWS: inv submit serve_llm --target aws"
        )
    limit = context_length(config)
    # hf_overrides may contain rope_parameters that raise the limit; then vLLM checks it
    if limit and options.max_model_len > limit and "hf_overrides" not in options.engine:
        raise UserError(
            f"max_model_len = {options.max_model_len} is more than the {limit} tokens that {options.model} supports. "
            "Lower it in [serve] of settings.toml."
        )


def _check_loader(load_format: str) -> None:
    if not load_format.startswith("runai_streamer") or all(map(importlib.util.find_spec, STREAMER)):
        return
    pins = f"requirements/{settings.active_profile()}"
    raise UserError(
        f"load_format = {load_format} needs the package runai-model-streamer, which is not installed. Add "
        f"runai-model-streamer[s3] to {pins}.in, run the command at the top of {pins}.txt, and then: {inv('up')}"
    )


def check_cpus(options: ServeOptions) -> None:
    """Check that `min_replicas` replicas fit on the CPUs. A local cluster does not grow, so Serve would wait forever.

    Raises:
        UserError: the replicas do not fit.
    """
    if options.accelerator != "cpu":
        return  # clusters with GPUs add machines on demand
    wanted = options.tensor_parallel_size * options.pipeline_parallel_size + options.num_cpus
    available = ray.cluster_resources().get("CPU", 0)
    if options.min_replicas * wanted > available:
        raise UserError(
            f"{options.min_replicas} replicas with {wanted:g} CPUs each do not fit on the cluster's {available:g}. "
            "Lower min_replicas in [serve] of settings.toml, or raise num_cpus in [local.ray] and restart the cluster."
        )
