"""Test the main path on a real Ray: preprocess a few rows, train on them with two workers, and ask the model."""

import json
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from jobs import finetune_ddp, generate, preprocess
from raymill import settings
from raymill.data.options import PreprocessOptions
from raymill.generation.options import GenerateOptions
from raymill.training.options import DDPOptions


@pytest.fixture(scope="module")
def run(ray_session: None, assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Preprocess the rows, train for a few steps, and return the folder of the run."""
    folder = tmp_path_factory.mktemp("runs")
    rows, model, packed = str(assets / "data/pairs.jsonl"), str(assets / "model"), str(folder / "packed")
    options = settings.load(PreprocessOptions, "preprocess", profile="local")
    preprocess.main(options.model_copy(update={"input": rows, "output": packed, "model": model}))
    changes = {"model": model, "data": packed, "output": str(folder), "name": "smoke", "stop_after": 4}
    finetune_ddp.main(settings.load(DDPOptions, "train", profile="local").model_copy(update=changes))
    return folder / "smoke"


def test_rows_become_a_trained_model(run: Path) -> None:
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    losses = [row["loss"] for row in rows if row["step"]]
    assert losses[-1] < losses[0]
    assert (run / "model" / "model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="vLLM's CPU build exists for Linux only")
def test_vllm_answers_with_the_trained_model(run: Path, tmp_path: Path) -> None:
    prompts = [json.dumps({"id": str(number), "prompt": "What does ENOENT mean?"}) for number in range(4)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(prompts))
    changes = {"input": str(tmp_path / "prompts.jsonl"), "output": str(tmp_path / "out"), "model": str(run / "model")}
    options = settings.load(GenerateOptions, "generate", profile="local")
    generate.main(options.model_copy(update=changes | {"max_tokens": 8}))
    answers = pq.read_table(tmp_path / "out" / "answers").to_pylist()
    assert sorted(answer["id"] for answer in answers) == ["0", "1", "2", "3"]
    assert all(answer["answer_tokens"] for answer in answers)
