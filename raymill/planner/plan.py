"""Plan how to train and serve a model before you rent anything. `inv plan MODEL` runs this."""

from collections.abc import Callable, Collection, Mapping

from rich.console import Console

from raymill import job, job_scripts, settings, settings_file
from raymill.common import cluster_file, gpu_types
from raymill.errors import UserError
from raymill.instance_types import INSTANCE_TYPES
from raymill.ray_support import job_secrets, model_cache

NOT_PLANNED = ("cpu_offload_gb", "gpu_memory_utilization", "kv_cache_dtype", "quantization", "speculative_config")
"""Arguments in [serve.engine] that change how much memory a served model needs or gets."""


def plan(
    model: str,
    console: Console,
    dollars_per_instance_hour: Callable[[Collection[str]], Mapping[str, float]],
    writes: bool = False,
) -> None:
    """Print the plan for a model, with the settings of the cluster profile.

    `dollars_per_instance_hour` is a target's method. If `writes`, write the recommendation to settings.toml.

    Raises:
        UserError: the model's configuration cannot be loaded, the model is not a causal language model, or a
            setting is wrong.
    """
    job_secrets.load()  # a gated model needs HF_TOKEN
    location = model_cache.find(model, retries=0)  # somebody waits for the answer
    # imported only now, because some import torch, which takes seconds
    from raymill.data.options import PreprocessOptions
    from raymill.planner import report
    from raymill.planner.estimate import estimate
    from raymill.serving.options import ServeOptions
    from raymill.training import preflight
    from raymill.training.options import DDPOptions

    train = settings.load(DDPOptions, "train", profile="cluster")
    serving = settings.load(ServeOptions, "serve", profile="cluster")
    file = cluster_file.load()
    types = gpu_types.for_training(file)
    estimated = estimate(
        preflight.load_config(location),
        sequence_length=settings.load(PreprocessOptions, "preprocess", profile="cluster").sequence_length,
        micro_batch_rows=train.micro_batch_rows,
        global_batch_rows=train.global_batch_rows,
        num_workers=train.max_workers,
        precision=train.precision,
        chunked_loss=train.chunked_loss or train.objective != "supervised",  # losses of pairs always are
        checkpointing_interval=train.gradient_checkpointing_interval,
        optimizer=train.optimizer,
        own_optimizers=_own_optimizers(),
        types=types,
        max_instances=file.max_workers,
        tokens=_tokens(settings.resolve(train.data)),
        context=serving.target_ongoing_requests * serving.max_model_len,
        serving_width=4 if serving.dtype == "float32" else 2,
        serving_cpus=serving.num_cpus,
        serving_types=[one for one in INSTANCE_TYPES.values() if one in types or file.region in one.family.regions],
        dollars_per_instance_hour=dollars_per_instance_hour,
    )
    report.show(estimated, console)
    if changed := [name for name in NOT_PLANNED if name in serving.engine]:
        console.print(
            f"note: the plan for serving does not know what {', '.join(changed)} in [serve.engine] changes",
            markup=False,
        )
    if writes and estimated.settings:
        settings_file.write(estimated.settings, settings.FILE)
        sections = " and ".join(f"[{section}]" for section in estimated.settings)
        console.print(
            f"Wrote these settings to {sections} in settings.toml. To see what changed, run: git diff settings.toml",
            markup=False,
        )


def _own_optimizers() -> tuple[tuple[str, float], ...]:
    """Return the numbers for each parameter that optimizers of the project's own strategies keep, by job."""
    kept = {name: job.load(name).STRATEGY.optimizer_values for name in job_scripts.fine_tuning()}
    return tuple((name, values) for name, values in kept.items() if values is not None)


def _tokens(data: str) -> int | None:
    from raymill.training.dataset import read_manifest  # imports torch

    try:
        manifest = read_manifest(data)
    except UserError:
        return None
    return manifest.train.rows * manifest.sequence_length
