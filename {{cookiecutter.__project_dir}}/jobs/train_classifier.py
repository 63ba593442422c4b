"""Trains an image classifier, as an example of how to run your own PyTorch loop on many workers.

`train` is a plain PyTorch loop. Comments that start with "many:" mark what a script for one GPU would not need.
To train your own model, replace `make_model` and `draw_digits`, which are in raymill/training/digits.py.
"""

from raymill.job import Job, connect
from raymill.training.options import ClassifierOptions

JOB = Job(ClassifierOptions, "train", "classifier")  # reads the options, before the slow imports below

import math
import tempfile
import time
from functools import partial
from pathlib import Path

import ray.train
import torch
from ray.train import Checkpoint, CheckpointConfig, FailureConfig, LoggingConfig, RunConfig
from ray.train.torch import TorchConfig, TorchTrainer, get_device, prepare_data_loader, prepare_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raymill import settings
from raymill.errors import UserError
from raymill.ray_support import capacity, gang, job_lease, ray_logging
from raymill.training import transport
from raymill.training.checkpoint_check import is_damaged
from raymill.training.collectives import total
from raymill.training.digits import count_correct, draw_digits, make_model

STATE = "state.pt"


def main(options: ClassifierOptions) -> None:
    """Train a small image classifier on generated images of digits."""
    options = options.model_copy(update={"output": settings.resolve(options.output)})
    connect()
    ray_logging.driver()
    capacity.refuse_too_many_workers(options.min_workers, options.worker_resources)
    capacity.refuse_private_paths({"output": options.output}, options.shared_paths, "train")
    folder = f"{options.output}/{options.name}"
    with job_lease.hold(folder, "--name"):  # many: no other job may write to this folder
        trainer = TorchTrainer(
            partial(train, options),
            torch_config=TorchConfig(backend=torch.distributed.get_default_backend_for_device(options.device)),
            scaling_config=gang.scaling(options),
            run_config=RunConfig(  # with the same name and storage_path, a run resumes
                name=options.name,
                storage_path=options.output,
                logging_config=LoggingConfig(log_level="WARNING"),
                failure_config=FailureConfig(max_failures=options.max_failures),
                worker_runtime_env={"env_vars": transport.LOG_VARIABLES} if options.device == "cuda" else None,
                checkpoint_config=CheckpointConfig(num_to_keep=2),
            ),
        )
        result = trainer.fit()
    if result.return_value:
        raise UserError(result.return_value)
    metrics = result.metrics
    print(f"test accuracy {metrics['accuracy']:.1%} after {metrics['epoch']} epochs; checkpoints: {folder}", flush=True)


def train(options: ClassifierOptions) -> str | None:
    """Train in one worker. All workers run this at the same time. Return why the workers cannot train, or None."""
    ray_logging.worker()
    context = ray.train.get_context()
    rank, workers = context.get_world_rank(), context.get_world_size()  # many: rank and number of workers
    device = torch.device("cpu") if options.device == "cpu" else get_device()  # many: the GPU of this worker
    try:  # many: the network between machines can be slow without an error
        transport.require_efa(device, workers, context.get_local_world_size())
    except UserError as error:
        return str(error)  # Ray would start the workers again if they raised it

    torch.manual_seed(options.seed)
    model = make_model()
    # many: DDP wraps the model and averages gradients. Test and save the plain `model`, because it shares DDP's weights
    # and its checkpoints fit any number of workers
    parallel = prepare_model(model, move_to_device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)

    # many: the batch size of a DataLoader is per worker
    batch_size = math.ceil(options.batch_size / workers)
    loader = DataLoader(TensorDataset(*draw_digits(options.images, options.seed)), batch_size, shuffle=True)
    # many: each worker gets a different, equally large part of the images, and moves its batches to its GPU
    loader = prepare_data_loader(loader, move_to_device=device.type == "cuda")
    tests = math.ceil(options.images / 4)
    # many: split the test images by hand, because a sampler would repeat some to make the parts equally large
    test_images, test_labels = (part[rank::workers].to(device) for part in draw_digits(tests, options.seed + 1))

    try:
        done = resume(model, optimizer)
    except UserError as error:
        return str(error)
    for epoch in range(done + 1, options.epochs + 1):
        started = time.perf_counter()
        torch.manual_seed(options.seed + epoch)  # so that a resumed run reads the images in the same order
        if workers > 1:
            loader.sampler.set_epoch(epoch)  # many: without this, every epoch would use the order of the first
        # many: `total` sums over the workers
        loss = float(total(train_epoch(parallel, optimizer, loader))) / workers
        accuracy = float(total(count_correct(model, test_images, test_labels))) / tests
        seconds = time.perf_counter() - started
        if rank == 0:  # many: only one worker prints
            print(
                f"epoch {epoch}/{options.epochs}  loss {loss:.4f}  accuracy {accuracy:.1%}  "
                f"{options.images / seconds:,.0f} images/s  {seconds * (options.epochs - epoch):.0f} s left",
                flush=True,
            )
        report({"epoch": epoch, "loss": loss, "accuracy": accuracy}, model, optimizer, rank)
    return None


def train_epoch(parallel: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader) -> torch.Tensor:
    """Train on this worker's images once, and return their mean loss."""
    parallel.train()
    losses = []
    for images, labels in loader:
        loss = nn.functional.cross_entropy(parallel(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())  # stays on the GPU, because reading it would wait for the GPU
    return torch.stack(losses).mean()


def resume(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the last checkpoint of this run on every worker. Return its epoch, or 0 if there is none.

    Raises:
        UserError: the checkpoint is damaged. All workers raise it.
    """
    checkpoint = ray.train.get_checkpoint()  # many: workers that replace dead ones also get the checkpoint
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as folder:
        file = Path(folder, STATE)
        if is_damaged(file):
            raise UserError(f"the checkpoint {checkpoint.path} is damaged. Start over with another --name.")
        state = torch.load(file, map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["epoch"]


def report(metrics: dict[str, float], model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    """Report the metrics of an epoch and save a checkpoint, so that a dead worker costs at most one epoch."""
    with tempfile.TemporaryDirectory() as folder:
        state = {"epoch": metrics["epoch"], "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        if rank == 0:  # many: one worker saves, because all hold the same state
            torch.save(state, Path(folder, STATE))
        # many: every worker must report, because the others wait for it
        ray.train.report(metrics, checkpoint=Checkpoint.from_directory(folder) if rank == 0 else None)


JOB.run(main)
