"""Test the classifier on the shared Ray instance: two workers learn as well as a plain script, and a run resumes."""

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from jobs import train_classifier
from jobs.train_classifier import ClassifierOptions
from raymill import settings
from raymill.training import digits

torch.set_num_threads(1)  # with tensors this small, several threads would only wait for one another

EPOCHS = 4
CHANGES = {"epochs": EPOCHS, "batch_size": 32}


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> ClassifierOptions:
    """Return options for two workers on this machine."""
    options = settings.load(ClassifierOptions, "train", "classifier", profile="local")
    return options.model_copy(update=CHANGES | {"output": str(tmp_path_factory.mktemp("runs"))})


@pytest.fixture(scope="module")
def two(ray_session: None, options: ClassifierOptions) -> dict[str, Any]:
    """Train with two workers. Return the state in the last checkpoint, and the output."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        train_classifier.main(options)
    return _state(_checkpoints(options)[-1]) | {"output": output.getvalue()}


def test_two_workers_learn_as_well_as_a_plain_script(two: dict[str, Any], options: ClassifierOptions) -> None:
    plain = _plain_script(options)
    assert _accuracy(two) > 0.9
    assert f"test accuracy {_accuracy(two, options.seed + 1):.1%}" in two["output"]  # each image counts once
    assert _accuracy(two) == pytest.approx(_accuracy(plain), abs=0.03)
    assert _steps(two) == _steps(plain)  # the global batch is the same


@pytest.mark.nightly
def test_a_run_resumes_with_another_number_of_workers(two: dict[str, Any], options: ClassifierOptions) -> None:
    before = _checkpoints(options)
    train_classifier.main(options.model_copy(update={"epochs": EPOCHS + 1, "num_workers": 1}))
    *others, last = _checkpoints(options)
    assert others == before[1:]  # a new checkpoint replaced the oldest one
    assert _steps(_state(last)) == _steps(two) / EPOCHS * (EPOCHS + 1)


@pytest.mark.parametrize("profile", settings.PROFILES)
def test_both_profiles_hold_valid_options(profile: str) -> None:
    options = settings.load(ClassifierOptions, "train", "classifier", profile=profile)
    assert options.batch_size >= options.max_workers


def _plain_script(options: ClassifierOptions) -> dict[str, Any]:
    """Return the state after `options.epochs` epochs in this process, without Ray."""
    torch.manual_seed(options.seed)
    model = digits.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    images = TensorDataset(*digits.draw_digits(options.images, options.seed))
    loader = DataLoader(images, options.batch_size, shuffle=True)
    for _ in range(options.epochs):
        train_classifier.train_epoch(model, optimizer, loader)
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def _checkpoints(options: ClassifierOptions) -> list[Path]:
    """Return the checkpoints, oldest first. Ray names checkpoints by time."""
    return sorted(Path(options.output, options.name).glob("checkpoint_*/"))


def _state(checkpoint: Path) -> dict[str, Any]:
    return torch.load(checkpoint / train_classifier.STATE, weights_only=True)


def _accuracy(state: dict[str, Any], seed: int = 12345) -> float:
    """Return the accuracy on 1000 images, measured in this process. No run used the default seed."""
    model = digits.make_model()
    model.load_state_dict(state["model"])
    return float(digits.count_correct(model, *digits.draw_digits(1000, seed))) / 1000


def _steps(state: dict[str, Any]) -> int:
    """Return the number of optimizer steps."""
    return int(state["optimizer"]["state"][0]["step"])
