"""Test the main path on a real Ray: preprocess a few rows, and train on them with two workers."""

import json
from pathlib import Path

import pytest

from jobs import finetune_ddp, preprocess
from raymill import settings
from raymill.data.options import PreprocessOptions
from raymill.training.options import DDPOptions


@pytest.mark.usefixtures("ray_session")
def test_rows_become_a_trained_model(assets: Path, tmp_path: Path) -> None:
    rows, model, packed = str(assets / "data/pairs.jsonl"), str(assets / "model"), str(tmp_path / "packed")
    options = settings.load(PreprocessOptions, "preprocess", profile="local")
    preprocess.main(options.model_copy(update={"input": rows, "output": packed, "model": model}))
    changes = {"model": model, "data": packed, "output": str(tmp_path), "name": "smoke", "stop_after": 4}
    train = settings.load(DDPOptions, "train", profile="local")
    finetune_ddp.main(train.model_copy(update=changes))
    losses = [json.loads(line)["loss"] for line in (tmp_path / "smoke/metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0]
    assert (tmp_path / "smoke/model/model.safetensors").is_file()
