"""Runs the training loop under Ray Train: the workers' side of the Run port, and the driver that starts them."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator import get_or_create_autoscaling_coordinator
from ray.train import Checkpoint, CheckpointConfig, FailureConfig, LoggingConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, get_device, prepare_model
from ray.train.v2._internal.execution import context as reporting
from torch import nn

from jobs import capacity, cli, gang, stream
from jobs.preprocessing.conversations import load_tokenizer
from jobs.training import preflight
from jobs.training.arithmetic import plan_batches
from jobs.training.loop import train
from jobs.training.options import TrainOptions
from jobs.training.packed import read_manifest
from jobs.training.run import Metrics
from jobs.training.strategies import MakeStrategy
from settings import Refusal


class RayRun:
    """The Run port in a worker of Ray Train."""

    def __init__(self, device: str) -> None:
        context = ray.train.get_context()
        self.rank = context.get_world_rank()
        self.world_size = context.get_world_size()
        self.device = torch.device("cpu") if device == "cpu" else get_device()

    def wrap(self, model: nn.Module) -> nn.Module:
        options = {"gradient_as_bucket_view": True}  # no second copy of the gradients
        return prepare_model(model, move_to_device=self.device, parallel_strategy_kwargs=options)

    def report(self, metrics: Metrics, checkpoint: Path) -> None:
        """Ray merges the ranks' folders into one under the run's, and keeps the best and the last."""
        name = f"step-{metrics['step']:08d}"
        ray.train.report(metrics, checkpoint=Checkpoint.from_directory(checkpoint), checkpoint_dir_name=name)

    @contextmanager
    def resume_from(self) -> Iterator[Path | None]:
        checkpoint = ray.train.get_checkpoint()
        if checkpoint is None:
            yield None
            return
        with checkpoint.as_directory() as folder:
            yield Path(folder)

    def should_stop(self) -> bool:
        """Never: Ray ends workers without asking, and a new start resumes from the last checkpoint."""
        return False


def fit(options: TrainOptions, make_strategy: MakeStrategy) -> None:
    """Check all that can be checked, start the workers, and wait for the trained model.

    Raises:
        Refusal: something does not fit, or the loop refused to go on.
    """
    options = preflight.with_absolute_paths(options)
    plan_batches(options.global_batch_rows, options.micro_batch_rows, options.num_workers)
    recipe = stream.read_recipe(options.model) if options.stream else None
    identity = _check_stream(options, recipe) if recipe else preflight.check_packed(options)
    cli.connect()
    get_or_create_autoscaling_coordinator()  # it starts meanwhile; Ray Train would wait 5 s and then log a traceback
    _check_cluster(options, recipe)
    preflight.claim(options, identity)
    os.environ["RAY_TRAIN_ENABLE_PRINT_PATCH"] = "0"  # Ray Train's own print shows each line twice
    zone = gang.gather(options.num_workers, options.worker_resources, options.gang_patience_s, gang.offers())
    result = _trainer(options, make_strategy, recipe, zone).fit()
    if result.return_value:
        raise Refusal(result.return_value)
    print(f"the trained model is in {options.output}/{options.name}/model", flush=True)


def _check_stream(options: TrainOptions, recipe: stream.Recipe) -> preflight.Identity:
    print(stream.NOTICE, flush=True)
    config = preflight.load_config(options.model)
    vocabulary = len(load_tokenizer(recipe.model, recipe.chat_template))
    preflight.check_model(options.model, config, vocabulary, recipe.sequence_length)
    return preflight.identify(options, config, f"stream of {recipe.input}")


def _check_cluster(options: TrainOptions, recipe: stream.Recipe | None) -> None:
    capacity.refuse_too_many_workers(options.num_workers, options.worker_resources)
    rows = {"input": recipe.input} if recipe else {"data": options.data}
    capacity.refuse_private_paths(
        {"model": options.model, "output": options.output} | rows, options.shared_paths, "train"
    )
    if recipe:
        capacity.refuse_workers_on_every_cpu(options.num_workers * options.cpus_per_worker)


def _trainer(
    options: TrainOptions, make_strategy: MakeStrategy, recipe: stream.Recipe | None, zone: dict[str, str] | None
) -> TorchTrainer:
    return TorchTrainer(
        _work,
        # a reference: Ray's controller, which only passes it on, would import torch and transformers to unpack it
        train_loop_config={"work": ray.put((options, make_strategy, recipe))},
        datasets={"train": stream.dataset(recipe)} if recipe else None,
        torch_config=TorchConfig(backend=torch.distributed.get_default_backend_for_device(options.device)),
        scaling_config=ScalingConfig(
            num_workers=options.num_workers,
            use_gpu=options.use_gpu,
            resources_per_worker=options.worker_resources,
            label_selector=zone,
        ),
        run_config=RunConfig(
            name=options.name,
            storage_path=options.output,
            logging_config=LoggingConfig(log_level="WARNING"),  # the loop's own lines say what happens
            failure_config=FailureConfig(max_failures=options.max_failures),
            checkpoint_config=CheckpointConfig(
                num_to_keep=options.keep_checkpoints,
                checkpoint_score_attribute="eval_loss" if _evaluates(options) else None,
                checkpoint_score_order="min",
            ),
        ),
    )


def _evaluates(options: TrainOptions) -> bool:
    return not options.stream and read_manifest(options.data).eval.rows > 0


def _work(config: dict[str, Any]) -> str | None:
    """What each worker runs. A refusal is returned, not raised: Ray would start the workers again."""
    # Ray names this logger by its file, so LoggingConfig's level does not reach it
    logging.getLogger(reporting.__file__).setLevel(logging.WARNING)
    options, make_strategy, recipe = ray.get(config["work"])
    run = RayRun(options.device)
    source = stream.StreamSource(recipe, options.global_batch_rows // run.world_size) if recipe else None
    try:
        train(options, run, make_strategy, source)
    except Refusal as refusal:
        return str(refusal)
    return None
