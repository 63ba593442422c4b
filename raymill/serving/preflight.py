"""Checks before a model is served, and the zone for replicas that span several machines.

Traffic between zones is slow, and AWS charges for it.
"""

import contextlib
import importlib.util
import os

import ray
from ray.util.accelerators import accelerators

from raymill import optional
from raymill.errors import UserError
from raymill.model_config import context_length, other_parts, refuse_classifier
from raymill.ray_support import capacity, hub_access, job_secrets, model_cache
from raymill.ray_support.private import serve as private_serve
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
    from transformers import AutoConfig  # imported late, because it takes seconds

    check_accelerator(options.accelerator)
    if importlib.util.find_spec("vllm") is None:
        raise UserError("vLLM is not installed on this machine. Its CPU build exists for Linux only.")
    _check_loader(options.engine.get("load_format", ""))
    if "://" in options.source:  # only a replica downloads the weights
        with contextlib.suppress(OSError, ValueError):
            folder = model_cache.on_this_node(options.source, weights=False)
            refuse_classifier(options.model, AutoConfig.from_pretrained(folder))
        return
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
    refuse_classifier(options.model, config)
    if "vision" in other_parts(config) and importlib.util.find_spec("torchvision") is None:
        raise UserError(
            f"{options.model} has a vision tower, for which vLLM needs torchvision, and this environment does not have "
            "it. Serve the model on AWS: inv submit serve_llm --target aws"
        )
    if options.accelerator == "cpu" and options.dtype == "float32" and hasattr(config, "quantization_config"):
        raise UserError(
            f"{options.model} is quantized, and on CPUs vLLM computes with quantized weights only in bfloat16. Pass "
            "--dtype bfloat16, or set dtype in [serve] of settings.toml."
        )
    limit = context_length(config)
    # hf_overrides may contain rope_parameters that raise the limit; then vLLM checks it
    if limit and options.max_model_len > limit and "hf_overrides" not in options.engine:
        raise UserError(
            f"max_model_len = {options.max_model_len} is more than the {limit} tokens that {options.model} supports. "
            "Lower it in [serve] of settings.toml."
        )


def _check_loader(load_format: str) -> None:
    if load_format.startswith("runai_streamer"):
        optional.check(STREAMER, "runai-model-streamer[s3]", f"load_format = {load_format} needs")


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


def check_accelerator(name: str) -> None:
    """Check that Ray knows this type of accelerator.

    Raises:
        UserError: Ray does not know this type.
    """
    known = {value for constant, value in vars(accelerators).items() if constant.isupper()}
    if name not in {"cpu", "gpu"} | known:
        raise UserError(
            f"Ray does not know the accelerator {name!r}. "
            f"Set accelerator in [serve] to one of: cpu, gpu, {', '.join(sorted(known))}."
        )


def find_zone(options: ServeOptions) -> dict[str, str] | None:
    """Return labels of one zone's machines, or None if a replica fits on one machine or the cluster has no zones.

    An update stays in the zone of the running replicas. Otherwise, wait until a zone has room for all replicas that
    start, as training does. The replicas stay in that zone, also when they are replaced.

    Raises:
        UserError: the cluster cannot hold a replica.
    """
    gpus, kind = options.tensor_parallel_size * options.pipeline_parallel_size, options.accelerator_type
    if options.accelerator == "cpu" or gpus <= capacity.max_gpus_per_node(kind):
        return None
    from raymill.ray_support import gang  # imports Ray Train, which takes a second

    offers = gang.serve_offers()
    if not offers:
        return None
    needs = {"GPU": 1.0} | ({f"accelerator_type:{kind}": 0.001} if kind else {})
    if gpus > (limit := capacity.max_workers(needs)):
        raise UserError(
            f"a replica needs {gpus} GPUs, which is more than the {limit} that this cluster can hold. Raise "
            "max_workers in cluster/cluster.yaml, or lower pipeline_parallel_size or tensor_parallel_size in [serve]."
        )
    keys, labels = offers[0].selector.keys(), _labels_of_replica(options.app)
    if keys <= labels.keys():  # not if the replica runs on another kind of machine, whose zones have another label
        return {key: labels[key] for key in keys}
    return gang.gather(gpus * max(1, options.min_replicas), needs, options.start_timeout_s, offers)


def _labels_of_replica(app: str) -> dict[str, str]:
    """Return the labels of a machine that runs a replica of this app, or {} if no replica runs."""
    client = private_serve.client()
    apps = client.get_serve_details()["applications"] if client else {}
    deployments = apps[app]["deployments"].values() if app in apps else []
    running = {
        replica["node_id"]
        for deployment in deployments
        for replica in deployment["replicas"]
        if replica["state"] == "RUNNING"
    }
    return next((node["Labels"] for node in ray.nodes() if node["Alive"] and node["NodeID"] in running), {})
