"""Test, on a CPU, that each objective trains on the rows that `inv fit` makes up for the fake GPU."""

from pathlib import Path
from typing import get_args

import packed_rows
import pytest
import torch

from raymill import settings
from raymill.training.ddp import DDP
from raymill.training.options import DDPOptions, ObjectiveName
from raymill.training.runtimes.fake_gpu import DOCUMENTS, STEPS, FakeRows
from raymill.training.runtimes.runtime import SingleProcess
from raymill.training.trainer import Trainer


@pytest.fixture(scope="module")
def model(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed_rows.write_model(tmp_path_factory.mktemp("model"), assets)


@pytest.mark.parametrize("objective", get_args(ObjectiveName))
def test_each_objective_trains(objective: str, model: Path, tmp_path: Path) -> None:
    loaded = settings.load(DDPOptions, "train", profile="local").model_dump()
    smoothing = {"label_smoothing": 0.1} if objective == "robust" else {}
    options = DDPOptions.model_validate(
        loaded | {"model": str(model), "output": str(tmp_path), "objective": objective, "patience": 2} | smoothing
    )
    rows = FakeRows(64, options.global_batch_rows)
    trainer = Trainer(options, SingleProcess(tmp_path, torch.device("cpu"), 1), DDP, rows)
    before = {name: one.detach().clone() for name, one in trainer.strategy.model.named_parameters()}
    for step in range(1, STEPS + 1):
        trainer.step(step)
    assert all(row["loss"] > 0 for row in trainer.meter.read())
    assert int((rows.rows(1)["position_ids"] == 0).sum()) == DOCUMENTS * options.global_batch_rows
    assert any(not torch.equal(one, before[name]) for name, one in trainer.strategy.model.named_parameters())
