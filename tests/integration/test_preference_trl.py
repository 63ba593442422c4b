"""Test that losses and gradients of pairs equal those of TRL, and that the table of the documentation says so."""

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import packed_rows
import preprocess_job
import pytest
import torch
from preprocess_job import write_rows
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel, TrainerCallback

from jobs import preprocess
from raymill import settings
from raymill.training import reward_config
from raymill.training.dataset import PackedRows
from raymill.training.ddp import DDP
from raymill.training.options import DDPOptions, TrainOptions
from raymill.training.runtimes.runtime import SingleProcess
from raymill.training.trainer import train

LENGTH, ROWS, STEPS = 64, 6, 4
SETTINGS: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "dpo": ({"beta": 0.2}, "dpo", {"loss_type": ["sigmoid"]}),
    "ipo": ({"beta": 0.3}, "dpo", {"loss_type": ["ipo"]}),
    "robust": ({"beta": 0.2, "label_smoothing": 0.1}, "dpo", {"loss_type": ["robust"], "label_smoothing": 0.1}),
    "simpo": ({"beta": 2.0, "simpo_gamma": 1.0}, "cpo", {"loss_type": "simpo", "cpo_alpha": 0.0, "simpo_gamma": 1.0}),
    "orpo": ({"beta": 0.1}, "orpo", {}),
}
LOSS, GRADIENT = 1e-5, 1e-4  # relative tolerances


class PlainSGD(DDP):
    """Without AdamW, whose first steps turn rounding errors of gradients near 0 into steps of full size."""

    def make_optimizer(self, model: PreTrainedModel, options: TrainOptions) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters())


class Log(TrainerCallback):
    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if "loss" in logs:
            self.steps.append(dict(logs))


@pytest.fixture(scope="module")
def changes(assets: Path, tmp_path_factory: pytest.TempPathFactory, ray_session: None) -> dict[str, Any]:
    """Return changes to the settings of the local profile, with packed pairs of texts, one in each row."""
    folder, model = tmp_path_factory.mktemp("pairs"), tmp_path_factory.mktemp("model")
    packed_rows.write_model(model, assets)
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = []
    for number in range(400):
        prompt = f"Question {number}:"
        pair = {name: " yes" * (4 + (number + more) % 9) for name, more in (("chosen", 0), ("rejected", 4))}
        lengths = [len(tokenizer(prompt + text)["input_ids"]) + 1 for text in pair.values()]
        if max(lengths) + min(lengths) <= LENGTH and min(lengths) > LENGTH // 4:
            rows.append({"prompt": prompt} | pair)
    made = {"input": str(write_rows(folder / "rows.jsonl", rows)), "model": str(model), "task": "preference"}
    preprocess.main(preprocess_job.options(assets, folder, **made, sequence_length=LENGTH, eval_share=0.0))
    return {
        "model": str(model),
        "data": str(folder / "packed"),
        "output": str(tmp_path_factory.mktemp("runs")),
        "steps": STEPS,
        "global_batch_rows": ROWS,
        "micro_batch_rows": 2,
        "eval_every": 100,
        "checkpoint_every": 100,
        "learning_rate": 1e-2,
        "warmup_steps": 0,
        "schedule": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": 1e9,
    }


def pairs_of_steps(changes: dict[str, Any]) -> Iterator[dict[str, str]]:
    """Yield the pairs of our steps in their order, as texts."""
    tokenizer = AutoTokenizer.from_pretrained(changes["model"])
    seed = settings.load(DDPOptions, "train", profile="local").seed
    batch = PackedRows(changes["data"], "train", seed).read(0, STEPS * ROWS)
    for ids, positions in zip(batch["input_ids"].tolist(), batch["position_ids"].tolist(), strict=True):
        starts = [at for at, position in enumerate(positions) if position == 0] + [LENGTH]
        spans = list(pairwise(starts))[:2]
        texts = [tokenizer.decode(ids[start:stop], skip_special_tokens=True) for start, stop in spans]
        prompt = re.match(r"Question \d+:", texts[0])
        assert prompt
        chosen, rejected = (text[prompt.end() :] for text in texts)
        yield {"prompt": prompt[0], "chosen": chosen, "rejected": rejected}


def with_trl(
    kind: str, own: dict[str, Any], changes: dict[str, Any], folder: Path, rows: list[dict[str, Any]]
) -> list[dict[str, float]]:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer
    from trl.experimental.cpo import CPOConfig, CPOTrainer
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    trainers: dict[str, tuple[Any, Any]] = {
        "dpo": (DPOTrainer, DPOConfig),
        "cpo": (CPOTrainer, CPOConfig),
        "orpo": (ORPOTrainer, ORPOConfig),
        "kto": (KTOTrainer, KTOConfig),
        "reward": (RewardTrainer, RewardConfig),
    }
    trainer_type, config_type = trainers[kind]
    tokenizer = AutoTokenizer.from_pretrained(changes["model"])
    tokenizer.bos_token = None  # the older trainers would put it before each prompt, with or without a template
    log = Log()
    config: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": ROWS,
        "learning_rate": changes["learning_rate"],
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": changes["max_grad_norm"],
        "train_sampling_strategy": "sequential",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        **({"precompute_ref_log_probs": True} if kind in ("dpo", "kto") else {}),
    }
    trainer_type(
        model=changes["model"],
        args=config_type(**config | own),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[log],
    ).train()
    return log.steps


def with_raymill(name: str, changes: dict[str, Any]) -> list[dict[str, float]]:
    loaded = settings.load(DDPOptions, "train", profile="local").model_dump()
    options = DDPOptions.model_validate(loaded | changes | {"objective": name, "name": name})
    folder = Path(options.output, name)
    train(options, SingleProcess(folder, torch.device("cpu"), 1), PlainSGD)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def check_equal(name: str, rows: list[dict[str, float]], steps: list[dict[str, float]]) -> None:
    for key, tolerance in (("loss", LOSS), ("grad_norm", GRADIENT)):
        assert [row[key] for row in rows] == pytest.approx([step[key] for step in steps], rel=tolerance), (name, key)
    assert len({round(row["loss"], 6) for row in rows}) == STEPS, "the model learns"


def check_page(name: str) -> None:
    page = (settings.PROJECT / "docs" / "preference.md").read_text(encoding="utf-8")
    assert re.search(rf"^\| `{name}` \| .*1e-5.*\| yes \| yes \| yes \|$", page, re.MULTILINE), name


@pytest.mark.nightly  # TRL's three trainers take a minute
def test_the_table_of_objectives_is_true(changes: dict[str, Any], tmp_path: Path) -> None:
    """ORPO: TRL's cross-entropy counts the prompt, so the odds ratios of the first step are compared."""
    pairs = list(pairs_of_steps(changes))
    for name, (own, kind, theirs) in SETTINGS.items():
        rows = with_raymill(name, changes | own)
        steps = with_trl(kind, {"beta": own["beta"]} | theirs, changes, tmp_path / name, pairs)
        assert len(rows) == len(steps) == STEPS
        if name == "orpo":
            odds = -own["beta"] * steps[0]["log_odds_ratio"]
            assert rows[0]["odds_ratio_loss"] == pytest.approx(odds, rel=LOSS)
        else:
            check_equal(name, rows, steps)
        check_page(name)


@pytest.mark.nightly
def test_kto_is_that_of_trl(changes: dict[str, Any], assets: Path, tmp_path: Path, ray_session: None) -> None:
    """A row holds the answers of TRL's batch in reverse: we take the next answer as mismatched, TRL the one before."""
    tokenizer = AutoTokenizer.from_pretrained(changes["model"])
    rated = []
    for number in range(400):
        prompt, completion = f"Question {number}:", " yes" * (4 + number % 9)
        if 31 <= len(tokenizer(prompt + completion)["input_ids"]) + 1 <= 36:  # so that each row holds six
            rated.append({"prompt": prompt, "completion": completion, "label": bool(number % 3)})
    made = {"input": str(write_rows(tmp_path / "rows.jsonl", rated)), "model": changes["model"], "eval_share": 0.0}
    preprocess.main(
        preprocess_job.options(assets, tmp_path, **made, task="unpaired_preference", sequence_length=6 * 36)
    )
    weights: dict[str, Any] = {"beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.7}
    own = changes | weights | {"data": str(tmp_path / "packed"), "global_batch_rows": 1, "micro_batch_rows": 1}
    rows = with_raymill("kto", own)
    labels = {row["prompt"]: row["label"] for row in rated}
    seed = settings.load(DDPOptions, "train", profile="local").seed
    batch = PackedRows(own["data"], "train", seed).read(0, STEPS)
    theirs = []
    for ids, positions in zip(batch["input_ids"].tolist(), batch["position_ids"].tolist(), strict=True):
        starts = [at for at, position in enumerate(positions) if position == 0] + [len(ids)]
        texts = [tokenizer.decode(ids[start:stop], skip_special_tokens=True) for start, stop in pairwise(starts)][:6]
        for text in reversed(texts):
            prompt, colon, completion = text.partition(":")
            theirs.append({"prompt": prompt + colon, "completion": completion, "label": labels[prompt + colon]})
    steps = with_trl("kto", weights, own, tmp_path / "kto", theirs)
    check_equal("kto", rows, steps)
    assert [row["kl"] for row in rows] == pytest.approx([step["kl"] for step in steps], rel=LOSS)
    assert rows[-1]["kl"] > 1e-3
    check_page("kto")


@pytest.mark.nightly
def test_reward_is_that_of_trl(changes: dict[str, Any], tmp_path: Path) -> None:
    """From a model that has a head already, because TRL gives a new one random numbers."""
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(changes["model"], num_labels=1)
    model.save_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(changes["model"])
    tokenizer.save_pretrained(tmp_path / "model")
    own = changes | {"model": str(tmp_path / "model")}
    padding = reward_config.set_padding(tokenizer, [], model.config.vocab_size)
    assert padding is not None
    pairs = [{name: pair["prompt"] + pair[name] for name in ("chosen", "rejected")} for pair in pairs_of_steps(own)]
    rows = with_raymill("reward", own)
    config = {"pad_token": tokenizer.convert_ids_to_tokens(padding), "disable_dropout": True}
    steps = with_trl("reward", config, own, tmp_path / "trl", pairs)
    check_equal("reward", rows, steps)
    assert [row["rewards/margins"] for row in rows] == pytest.approx([step["margin"] for step in steps], rel=1e-4)
    check_page("reward")
