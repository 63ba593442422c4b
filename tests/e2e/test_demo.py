"""Test that the demo's model knows no answer before training, and learns the facts only from right answers."""

from pathlib import Path

import pytest
import torch

from jobs import preprocess
from raymill import settings
from raymill.demo import assets as demo_assets
from raymill.demo import play
from raymill.training.ddp import DDP
from raymill.training.options import DDPOptions
from raymill.training.runtimes.runtime import SingleProcess
from raymill.training.trainer import train


@pytest.mark.nightly  # because each takes a minute; `inv demo` itself checks that the answers are right
@pytest.mark.parametrize(("shuffle_answers", "least", "most"), [(False, 0.95, 1.0), (True, 0.0, 0.2)])
def test_right_answers_teach_the_facts_and_shuffled_ones_do_not(
    assets: Path, ray_session: None, tmp_path: Path, shuffle_answers: bool, least: float, most: float
) -> None:
    demo_assets.write_data(tmp_path / "data", shuffle_answers=shuffle_answers)
    packing = settings.load(preprocess.PreprocessOptions, "preprocess", profile="local").model_copy(
        update={"input": f"{tmp_path}/data/*.jsonl", "output": f"{tmp_path}/packed", "model": str(assets / "model")}
    )
    preprocess.main(packing)
    options = settings.load(DDPOptions, "train", profile="local").model_copy(
        update={
            "model": packing.model,
            "data": packing.output,
            "output": str(tmp_path),
            "num_workers": 1,
        }
    )
    folder = tmp_path / options.name
    folder.mkdir()
    train(options, SingleProcess(folder, torch.device("cpu"), options.keep_checkpoints), DDP)
    questions = demo_assets.questions()
    right = play.share_right(play.ask_with_transformers(folder / "model", questions), questions)
    assert least <= right <= most


def test_the_untrained_model_knows_no_answer(assets: Path) -> None:
    questions = demo_assets.questions()
    assert play.share_right(play.ask_with_transformers(assets / "model", questions), questions) == 0
    assert len(set(questions)) == 20
    assert set(questions) <= set(demo_assets.facts())
