"""Test reward models: their loss and gradient, each strategy, LoRA, the export, and that others refuse them."""

from pathlib import Path
from typing import Any

import packed_rows
import preprocess_job
import pytest
import torch
from preference_runs import EXACT, WAYS, Row, alone, documents, options_of, spread
from preprocess_job import write_rows
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

from jobs import preprocess
from raymill import settings
from raymill.training.dataset import PackedRows
from raymill.training.options import DDPOptions


@pytest.fixture(scope="module")
def changes(assets: Path, tmp_path_factory: pytest.TempPathFactory, ray_session: None) -> dict[str, Any]:
    """Return changes to the settings of the local profile, with packed pairs of answers of different lengths."""
    folder, model = tmp_path_factory.mktemp("pairs"), tmp_path_factory.mktemp("model")
    packed_rows.write_model(model, assets, num_hidden_layers=2, attention_dropout=0.3)  # which pairs turn off
    rows = [
        {
            "prompt": [{"role": "user", "content": f"What is number {n}?"}],
            "chosen": [{"role": "assistant", "content": f"It is {n}. " + "Sure. " * (n % 5)}],
            "rejected": [{"role": "assistant", "content": "No idea. " * (1 + n % 3)}],
        }
        for n in range(150)
    ]
    made = {"input": str(write_rows(folder / "rows.jsonl", rows)), "model": str(model), "task": "preference"}
    preprocess.main(preprocess_job.options(assets, folder, **made, eval_share=0.1))
    return {
        "model": str(model),
        "data": str(folder / "packed"),
        "output": str(tmp_path_factory.mktemp("runs")),
        "objective": "reward",
        "learning_rate": 1e-3,
        "warmup_steps": 0,
        "steps": 8,
        "global_batch_rows": 8,
        "micro_batch_rows": 2,
        "eval_every": 4,
        "checkpoint_every": 4,
    }


def plain_scores(model: PreTrainedModel, batch: dict[str, Tensor]) -> Tensor:
    """Return the score of each document as transformers computes it, one by one, without packing."""
    return torch.stack([model(ids[None]).logits[0, 0] for ids, _ in documents(batch)])


def exported(changes: dict[str, Any], name: str) -> PreTrainedModel:
    model, info = AutoModelForSequenceClassification.from_pretrained(
        f"{changes['output']}/{name}/model", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return model.eval()


def test_loss_and_gradient_are_those_of_the_formula(changes: dict[str, Any]) -> None:
    rows = alone(changes | {"name": "formula", "steps": 3, "max_grad_norm": 1e9})
    model = AutoModelForSequenceClassification.from_pretrained(changes["model"], num_labels=1, attention_dropout=0.0)
    model.config.pad_token_id = None
    with torch.no_grad():
        model.score.weight.zero_()
    optimizer = torch.optim.AdamW(
        [
            {"params": [one for one in model.parameters() if one.dim() >= 2], "weight_decay": 0.01},
            {"params": [one for one in model.parameters() if one.dim() < 2], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
    )
    seed = settings.load(DDPOptions, "train", profile="local").seed
    for step in (1, 2, 3):
        batch = PackedRows(changes["data"], "train", seed).read(8 * (step - 1), 8)
        chosen, rejected = plain_scores(model, batch).view(-1, 2).T
        loss = -functional.logsigmoid(chosen - rejected).mean()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        row = next(one for one in rows if one["step"] == step)
        assert row["loss"] == pytest.approx(loss.item(), abs=1e-5)
        assert row["grad_norm"] == pytest.approx(norm.item(), rel=1e-3)
        assert row["rewards/chosen"] == pytest.approx(chosen.mean().item(), abs=1e-5)
        assert row["rewards/accuracies"] == float((chosen > rejected).float().mean())
        for group in optimizer.param_groups:
            group["lr"] = row["lr"]
        optimizer.step()
    batch = PackedRows(changes["data"], "train", seed).read(0, 8)
    with torch.no_grad():
        torch.testing.assert_close(
            plain_scores(exported(changes, "formula"), batch), plain_scores(model, batch), atol=1e-4, rtol=0
        )
