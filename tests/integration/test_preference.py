"""Test objectives of pairs: their losses and gradients against plain formulas, each strategy, and a resumed run."""

import math
import shutil
from pathlib import Path
from typing import Any

import packed_rows
import preprocess_job
import pytest
import torch
from preference_runs import EXACT, WAYS, Row, alone, options_of, pairs, plain_adamw, plain_logps, settings_of, spread
from preprocess_job import write_rows
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from jobs import preprocess
from raymill import settings
from raymill.errors import UserError
from raymill.evaluation import scoring
from raymill.training import preflight, reference
from raymill.training.dataset import PackedRows
from raymill.training.ddp import DDP
from raymill.training.objectives import Objective
from raymill.training.options import DDPOptions, TrainOptions
from raymill.training.pairs import DPO

OBJECTIVES: dict[str, dict[str, Any]] = {
    "dpo": {"beta": 0.2},
    "ipo": {"beta": 0.3},
    "robust": {"beta": 0.2, "label_smoothing": 0.1},
    "simpo": {"beta": 2.0, "simpo_gamma": 1.0},
    "orpo": {"beta": 0.1},
}


@pytest.fixture(scope="module")
def changes(assets: Path, tmp_path_factory: pytest.TempPathFactory, ray_session: None) -> dict[str, Any]:
    """Return changes to the settings of the local profile, with packed pairs of answers of different lengths."""
    folder, model = tmp_path_factory.mktemp("pairs"), tmp_path_factory.mktemp("model")
    packed_rows.write_model(model, assets, num_hidden_layers=2, attention_dropout=0.3)  # which pairs turn off
    made = {"input": str(write_rows(folder / "rows.jsonl", pairs())), "model": str(model), "task": "preference"}
    preprocess.main(preprocess_job.options(assets, folder, **made, eval_share=0.1, shard_mib=0.01))  # several files
    assert len(list((folder / "packed" / "train").iterdir())) > 2
    output = tmp_path_factory.mktemp("runs")
    return settings_of(model, folder / "packed", output, objective="dpo")


# ---------------------------------------------------------------- formulas


def plain_loss(name: str, own: dict[str, Any], logps: Tensor, reference: Tensor, tokens: Tensor) -> Tensor:
    """Return the loss as the papers write it."""
    beta, (up, down), (tokens_up, tokens_down) = own["beta"], (logps - reference).view(-1, 2).T, tokens.view(-1, 2).T
    margins = beta * (up - down)
    if name == "dpo":
        return -functional.logsigmoid(margins).mean()
    if name == "ipo":
        return ((up / tokens_up - down / tokens_down - 1 / (2 * beta)) ** 2).mean()
    if name == "robust":
        wrong = own["label_smoothing"]
        right = -functional.logsigmoid(margins) * (1 - wrong) + functional.logsigmoid(-margins) * wrong
        return (right / (1 - 2 * wrong)).mean()
    chosen, rejected = logps.view(-1, 2).T
    if name == "simpo":
        return -functional.logsigmoid(beta * (chosen / tokens_up - rejected / tokens_down) - own["simpo_gamma"]).mean()
    odds = [
        (value / count).exp() / (1 - (value / count).exp())
        for value, count in ((chosen, tokens_up), (rejected, tokens_down))
    ]
    return -chosen.sum() / tokens_up.sum() - beta * torch.log(torch.sigmoid(torch.log(odds[0] / odds[1]))).mean()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_loss_and_gradient_are_those_of_the_formula(name: str, changes: dict[str, Any]) -> None:
    """The second step: in the first, the model is its own reference."""
    own = changes | {"name": f"formula-{name}", "objective": name, "steps": 2, "max_grad_norm": 1e9} | OBJECTIVES[name]
    rows = alone(own)
    base = AutoModelForCausalLM.from_pretrained(changes["model"])
    model = AutoModelForCausalLM.from_pretrained(changes["model"])
    seed = settings.load(DDPOptions, "train", profile="local").seed
    optimizer = plain_adamw(model)
    for step in (1, 2):
        batch = PackedRows(changes["data"], "train", seed).read(8 * (step - 1), 8)
        with torch.no_grad():
            before, _ = plain_logps(base, batch)
        logps, tokens = plain_logps(model, batch)
        loss = plain_loss(name, OBJECTIVES[name], logps, before, tokens)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        row = next(one for one in rows if one["step"] == step)
        assert row["loss"] == pytest.approx(loss.item(), abs=1e-5)
        assert row["grad_norm"] == pytest.approx(norm.item(), rel=1e-3)
        chosen, rejected = logps.view(-1, 2).T
        assert row["logps/chosen"] == pytest.approx(chosen.mean().item(), rel=1e-5)
        assert row["logps/rejected"] == pytest.approx(rejected.mean().item(), rel=1e-5)
        for group in optimizer.param_groups:
            group["lr"] = row["lr"]
        optimizer.step()


# ---------------------------------------------------------------- strategies, adapters, a second start


@pytest.fixture(scope="module")
def dpo_alone(changes: dict[str, Any]) -> list[Row]:
    return alone(changes | {"name": "alone"})


@pytest.mark.parametrize(
    "way", ["ddp", "fsdp", "zero3", *(pytest.param(way, marks=pytest.mark.nightly) for way in ("zero1", "zero2"))]
)
def test_two_ranks_agree_with_one_process_and_resume(way: str, dpo_alone: list[Row], changes: dict[str, Any]) -> None:
    for stop in (4, None):
        rows = spread(changes | {"name": way, "stop_after": stop, "micro_batch_rows": 1}, way)
    for name in ("loss", "rewards/margins", "rewards/accuracies", "eval_loss", "eval_rewards/accuracies"):
        assert [row.get(name) for row in rows] == pytest.approx([row.get(name) for row in dpo_alone], abs=EXACT), name
    assert dpo_alone[1]["loss"] == pytest.approx(math.log(2), abs=1e-6), "the model is its own reference"
    assert dpo_alone[-1]["rewards/accuracies"] > 0.9
    assert dpo_alone[-1]["eval_loss"] < math.log(2) - 0.01
    assert "eval_perplexity" not in dpo_alone[-1]


@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name != "dpo"])
@pytest.mark.parametrize(
    "way", ["fsdp", *(pytest.param(way, marks=pytest.mark.nightly) for way in WAYS if way != "fsdp")]
)
def test_each_objective_agrees_on_two_ranks(way: str, name: str, changes: dict[str, Any]) -> None:
    own = changes | {"objective": name, "steps": 4} | OBJECTIVES[name]
    single = alone(own | {"name": f"alone-{name}-{way}"})
    rows = spread(own | {"name": f"{name}-{way}", "micro_batch_rows": 4}, way)
    for metric in (
        "loss",
        "grad_norm",
        "rewards/margins",
        *(("nll_loss", "odds_ratio_loss") if name == "orpo" else ()),
    ):
        found = [[row[metric] for row in some if row["step"]] for some in (rows, single)]
        assert found[0] == pytest.approx(found[1], abs=EXACT, rel=1e-4), metric


@pytest.mark.nightly
@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_each_objective_resumes_bit_for_bit(name: str, lora_rank: int, changes: dict[str, Any]) -> None:
    own = changes | {"objective": name, "lora_rank": lora_rank} | OBJECTIVES[name]
    for stop in (4, None):
        rows = alone(own | {"name": f"parts-{name}-{lora_rank}", "stop_after": stop})
    whole = alone(own | {"name": f"whole-{name}-{lora_rank}"})
    assert [row.get("loss") for row in rows] == [row.get("loss") for row in whole]
    assert rows[-1]["loss"] < rows[1]["loss"]


def test_adapters_have_the_base_model_as_reference(changes: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    own = changes | {"name": "lora", "lora_rank": 4, "learning_rate": 1e-2}
    for stop in (4, None):  # the second start loads adapters that are not those of the base model
        rows = alone(own | {"stop_after": stop})
    assert "before the first step: evaluation loss 0.6931, rewards/accuracies 0.0%" in capsys.readouterr().out
    whole = alone(own | {"name": "lora-whole"})
    assert [row.get("loss") for row in rows] == [row.get("loss") for row in whole]
    assert rows[1]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert rows[-1]["rewards/accuracies"] > 0.9


def test_the_reference_is_computed_once_for_rows_weights_and_precision(
    changes: dict[str, Any], dpo_alone: list[Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(changes["data"], "reference")
    options = preflight.with_absolute_paths(options_of(changes))
    names = [f"{reference._location(options, split).rpartition('/')[2]}-00000000.npz" for split in ("train", "eval")]
    files = {name: (folder / name).read_bytes() for name in names}
    monkeypatch.setattr(reference, "_compute", lambda *_: pytest.fail("computed again"))
    rows = alone(changes | {"name": "again"})
    assert [row.get("loss") for row in rows] == [row.get("loss") for row in dpo_alone]
    assert {name: (folder / name).read_bytes() for name in names} == files
    monkeypatch.undo()
    for damage in (lambda content: content[:-40], lambda content: content[:150] + b"xxxx" + content[154:]):
        for name, content in files.items():
            (folder / name).write_bytes(damage(content))
        rows = alone(changes | {"name": "damaged", "fresh": True})
        assert [row.get("loss") for row in rows[: len(dpo_alone)]] == [row.get("loss") for row in dpo_alone]
        assert {name: (folder / name).read_bytes() for name in names} == files, "written again"
        shutil.rmtree(Path(changes["output"], "damaged"))
    names = {
        reference._location(options.model_copy(update=other), split)
        for other in ({}, {"precision": "bf16"}, {"quantize_base": True}, {"lora_rank": 4})
        for split in ("train", "eval")
    }
    assert len(names) == 8


def test_a_killed_computation_of_the_reference_loses_at_most_one_section(
    changes: dict[str, Any], dpo_alone: list[Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With another precision, so that there are no files yet. The sections have more rows than a pass."""
    monkeypatch.setattr(reference, "SECTION_ROWS", 10)
    compute, sections = reference._compute, list[range]()

    def killed(*arguments: Any) -> Any:
        sections.append(arguments[4])
        if len(sections) == 3:
            raise KeyboardInterrupt
        return compute(*arguments)

    monkeypatch.setattr(reference, "_compute", killed)
    own = changes | {"name": "killed", "data": shutil.copytree(changes["data"], f"{changes['output']}/copied")}
    shutil.rmtree(f"{own['data']}/reference")
    with pytest.raises(KeyboardInterrupt):
        alone(own)
    rows = alone(own)
    assert [section.start for section in sections[:4]] == [0, 10, 20, 20], "the second start skips two sections"
    assert [row.get("loss") for row in rows] == [row.get("loss") for row in dpo_alone]


def test_evaluate_counts_pairs_whose_chosen_answer_is_likelier(changes: dict[str, Any]) -> None:
    model = AutoModelForCausalLM.from_pretrained(changes["model"])
    batch = PackedRows(changes["data"], "train").read(0, 8)
    with torch.no_grad():
        logps, tokens = plain_logps(model, batch)
    metrics = scoring.METRICS_OF_TASK["preference"]
    _, found = scoring.score(model, batch, metrics)
    for values, metric in zip((logps, logps / tokens), metrics, strict=True):
        chosen, rejected = values.view(-1, 2).T
        assert found[scoring.name_of(metric)] == (int((chosen > rejected).sum()), len(chosen))
    counts, _ = scoring.score(model, batch, metrics, "preference")
    assert counts.loss == pytest.approx(-float(logps[::2].sum()), rel=1e-5), "the loss is that of chosen answers"
    assert (counts.trained_tokens, counts.documents) == (int(tokens[::2].sum()), len(logps) // 2)
    assert found["chosen is likelier"] != found["chosen is likelier per token"], "the answers have different lengths"


def test_noise_that_is_left_in_a_model_is_refused(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    forward = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: forward(self, functional.dropout(x, 0.1, self.training)))
    with pytest.raises(UserError, match=r"has dropout or noise that could not be turned off"):
        alone(changes | {"name": "noise"})


class OwnDPO(DDP):
    """An objective of a job's script, which `objective` in the options does not name."""

    @staticmethod
    def make_objective(options: TrainOptions) -> Objective:
        return DPO(options)


class ScalarLoss(DDP):
    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return super().loss(batch).sum()


@pytest.mark.parametrize(
    ("strategy", "own", "problem"),
    [
        (OwnDPO, {"objective": "supervised", "lora_rank": 4, "lora_dropout": 0.5}, "needs packed rows and no dropout"),
        (ScalarLoss, {}, "loss of ScalarLoss returns 1 numbers, but its objective has 7"),
    ],
)
def test_own_strategies_cannot_bypass_what_pairs_need(
    strategy: type[DDP], own: dict[str, Any], problem: str, changes: dict[str, Any]
) -> None:
    with pytest.raises(UserError, match=problem):
        alone(changes | own | {"name": strategy.__name__}, strategy)


def test_rows_for_another_task_are_refused(changes: dict[str, Any]) -> None:
    options = options_of(changes)
    with pytest.raises(UserError, match=r"packed for the task preference, .* Pack rows .*--task supervised"):
        preflight.check_packed(options.model_copy(update={"objective": "supervised"}))
    preflight.check_packed(options, DDP.make_objective(options))


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"objective": "robust"}, "objective = robust, and no other one, needs label_smoothing"),
        ({"label_smoothing": 0.1}, "objective = robust, and no other one, needs label_smoothing"),
        ({"lora_rank": 4, "lora_dropout": 0.1}, "compares models without dropout; set lora_dropout = 0"),
        ({"stream": True}, "needs packed rows; set stream = false"),
    ],
)
def test_settings_that_do_nothing_or_harm_are_refused(
    wrong: dict[str, Any], problem: str, changes: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=problem):
        options_of(changes | wrong)
