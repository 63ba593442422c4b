"""Trains an image classifier, for people whose model is no LLM: a plain PyTorch script, on many workers.

`train` is that script. Comments with "many:" mark what one for a single GPU does not have; `main` starts the workers.
To train your own, put your model into `make_model` and your data into `draw_digits`.
"""

from pipeline.ray_support import cli
from pipeline.training.options import ClassifierOptions

if __name__ == "__main__":
    cli.parse(ClassifierOptions, "train", "classifier")  # before the imports below, which take seconds

import math
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
import ray.train
import torch
from ray.train import Checkpoint, CheckpointConfig, FailureConfig, LoggingConfig, RunConfig
from ray.train.torch import TorchConfig, TorchTrainer, get_device, prepare_data_loader, prepare_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import settings
from pipeline.ray_support import capacity, gang, ray_logging
from pipeline.training.collectives import total

STATE = "state.pt"
SIDE = 28  # pixels of an image
SEGMENTS = ("abcdef", "bc", "abdeg", "abcdg", "bcfg", "acdfg", "acdefg", "abc", "abcdefg", "abcdfg")
"""Strokes of each digit on a seven-segment display: a to f clockwise from the top, g in the middle."""


def main(options: ClassifierOptions) -> None:
    """Train a small image classifier on digits that are drawn here: your own loop on many workers."""
    options = options.model_copy(update={"output": settings.resolve(options.output)})
    cli.connect()
    ray_logging.driver()
    capacity.refuse_too_many_workers(options.min_workers, options.worker_resources)
    capacity.refuse_private_paths({"output": options.output}, options.shared_paths, "train")
    trainer = TorchTrainer(
        partial(train, options),
        torch_config=TorchConfig(backend=torch.distributed.get_default_backend_for_device(options.device)),
        scaling_config=gang.scaling(options),
        run_config=RunConfig(  # the same name in the same place goes on from its last checkpoint
            name=options.name,
            storage_path=options.output,
            logging_config=LoggingConfig(log_level="WARNING"),
            failure_config=FailureConfig(max_failures=options.max_failures),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )
    metrics = trainer.fit().metrics
    print(
        f"{metrics['accuracy']:.1%} of the test images are recognised after {metrics['epoch']} epochs; "
        f"the checkpoints are in {options.output}/{options.name}",
        flush=True,
    )


def train(options: ClassifierOptions) -> None:
    """What each worker runs, all of them at the same time."""
    ray_logging.worker()
    context = ray.train.get_context()
    rank, workers = context.get_world_rank(), context.get_world_size()  # many: which worker this is, and of how many
    device = torch.device("cpu") if options.device == "cpu" else get_device()  # many: the GPU that is this worker's

    torch.manual_seed(options.seed)
    model = make_model()
    # many: around the model, DDP averages the gradients over the workers. `model` itself stays the plain one, with the
    # same weights: it is what is tested and saved, so a checkpoint fits any number of workers
    parallel = prepare_model(model, move_to_device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)

    images = TensorDataset(*draw_digits(options.images, options.seed))
    # many: a DataLoader's batch is that of one worker
    loader = DataLoader(images, batch_size=math.ceil(options.batch_size / workers), shuffle=True)
    # many: each worker gets other images, as many as the others; on GPUs they are moved there too
    loader = prepare_data_loader(loader, move_to_device=device.type == "cuda")
    tests = math.ceil(options.images / 4)
    # many: a share of the tests too, but each of them once, and not some twice so that all workers have as many
    test_images, test_labels = (part[rank::workers].to(device) for part in draw_digits(tests, options.seed + 1))

    for epoch in range(resume(model, optimizer) + 1, options.epochs + 1):
        started = time.perf_counter()
        torch.manual_seed(options.seed + epoch)  # a resumed run takes the images in the order of an undisturbed one
        if workers > 1:
            loader.sampler.set_epoch(epoch)  # many: or every epoch would have the order of the first
        # many: `total` sums over the workers
        loss = float(total(train_epoch(parallel, optimizer, loader))) / workers
        accuracy = float(total(count_right(model, test_images, test_labels))) / tests
        seconds = time.perf_counter() - started
        if rank == 0:  # many: one of them speaks
            print(
                f"epoch {epoch}/{options.epochs}  loss {loss:.4f}  accuracy {accuracy:.1%}  "
                f"{options.images / seconds:,.0f} images/s  {seconds * (options.epochs - epoch):.0f} s left",
                flush=True,
            )
        report({"epoch": epoch, "loss": loss, "accuracy": accuracy}, model, optimizer, rank)


def train_epoch(parallel: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader) -> torch.Tensor:
    """One pass over this worker's images; returns their mean loss."""
    parallel.train()
    losses = []
    for images, labels in loader:
        loss = nn.functional.cross_entropy(parallel(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())  # left on the GPU: each look at a number waits for it
    return torch.stack(losses).mean()


@torch.no_grad()
def count_right(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """How many of the images are recognised."""
    model.eval()
    return (model(images).argmax(1) == labels).sum()


def resume(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the last checkpoint of this run, on every worker; returns its epoch, 0 where there is none."""
    checkpoint = ray.train.get_checkpoint()  # many: also there for the workers that replace dead ones
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as folder:
        state = torch.load(Path(folder, STATE), map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["epoch"]


def report(metrics: dict[str, float], model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    """Keep a checkpoint of this epoch in the run's folder: what a worker that dies costs at most is an epoch."""
    with tempfile.TemporaryDirectory() as folder:
        state = {"epoch": metrics["epoch"], "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        if rank == 0:  # many: all workers hold the same
            torch.save(state, Path(folder, STATE))
        # many: every worker reports, or the others would wait for it
        ray.train.report(metrics, checkpoint=Checkpoint.from_directory(folder) if rank == 0 else None)


def make_model() -> nn.Module:
    """A small convolutional network, from images to a score for each digit."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * math.ceil(SIDE / 8) ** 2, len(SEGMENTS)),
    )


def draw_digits(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy images of digits, (count, 1, SIDE, SIDE), and the digits, (count,); the same for the same seed."""
    random = np.random.default_rng(seed)
    digits = random.integers(len(SEGMENTS), size=count)
    images = random.normal(0, 0.3, (count, SIDE, SIDE)).astype(np.float32)
    for image, digit in zip(images, digits, strict=True):
        _draw(image, SEGMENTS[digit], random)
    return torch.from_numpy(images).unsqueeze(1), torch.from_numpy(digits)


def _draw(image: np.ndarray, segments: str, random: np.random.Generator) -> None:
    """Draw the segments of one digit, two pixels wide, somewhere in the image and of some size."""
    half, width = random.integers(5, 11), random.integers(6, 16)
    top, left = random.integers(SIDE - 2 * half - 1), random.integers(SIDE - width - 1)
    middle, bottom, right = top + half, top + 2 * half, left + width
    ends = {
        "a": (top, top, left, right),
        "b": (top, middle, right, right),
        "c": (middle, bottom, right, right),
        "d": (bottom, bottom, left, right),
        "e": (middle, bottom, left, left),
        "f": (top, middle, left, left),
        "g": (middle, middle, left, right),
    }
    for segment in segments:
        first_row, last_row, first_column, last_column = ends[segment]
        image[first_row : last_row + 2, first_column : last_column + 2] = 1


if __name__ == "__main__":
    cli.run(main)
