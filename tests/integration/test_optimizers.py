"""Test the optimizers that settings name: what each updates, what it keeps, and that a run with it resumes exactly."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import packed_rows
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from raymill import settings
from raymill.errors import UserError
from raymill.training import optimizers
from raymill.training.ddp import DDP
from raymill.training.options import DDPOptions, DeepSpeedOptions, FSDPOptions, OptimizerName, TrainOptions
from raymill.training.runtimes.runtime import SingleProcess
from raymill.training.trainer import train

NAMED: list[OptimizerName] = ["muon", "adamw_8bit"]


@pytest.fixture(scope="module")
def changes(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return changes to the settings of the local profile."""
    data, model = tmp_path_factory.mktemp("packed"), tmp_path_factory.mktemp("model")
    packed_rows.write_model(model, assets, attention_dropout=0.1)
    packed_rows.write(data, packed_rows.tokenize(assets, model, 64), model, 64, train=[40], evaluated=5)
    output = str(tmp_path_factory.mktemp("runs"))
    sizes = {"steps": 8, "checkpoint_every": 4, "warmup_steps": 2, "global_batch_rows": 8, "micro_batch_rows": 4}
    return {"model": str(model), "data": str(data), "output": output} | sizes


def run(changes: dict[str, Any], strategy: type[DDP] = DDP) -> list[dict[str, float]]:
    loaded = settings.load(DDPOptions, "train", profile="local")
    options = DDPOptions.model_validate(loaded.model_dump() | changes)
    folder = Path(options.output, options.name)
    train(options, SingleProcess(folder, torch.device("cpu"), options.keep_checkpoints), strategy)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["step"]]


def weights(changes: dict[str, Any]) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(Path(changes["output"], changes["name"], "model"))
    return dict(model.named_parameters())


@pytest.mark.parametrize("name", NAMED)
def test_a_resumed_run_changes_no_bit(name: OptimizerName, changes: dict[str, Any]) -> None:
    own = changes | {"optimizer": name}
    whole = run(own | {"name": f"{name}-whole"})
    for stop in (4, None):
        parts = run(own | {"name": f"{name}-parts", "stop_after": stop})
    assert [row["loss"] for row in parts] == [row["loss"] for row in whole]
    assert whole[-1]["loss"] < whole[0]["loss"] - 0.1
    others = weights(own | {"name": f"{name}-parts"})
    for key, value in weights(own | {"name": f"{name}-whole"}).items():
        assert torch.equal(value, others[key]), key


@pytest.mark.parametrize("lora_rank", [0, 4])
@pytest.mark.parametrize("name", NAMED)
def test_the_hidden_matrices_have_the_named_optimizer(
    name: OptimizerName, lora_rank: int, changes: dict[str, Any]
) -> None:
    made: list[torch.optim.Optimizer] = []
    models: list[PreTrainedModel] = []

    class Watched(DDP):
        def make_optimizer(self, model: PreTrainedModel, options: TrainOptions) -> torch.optim.Optimizer:
            models.append(model)
            made.append(super().make_optimizer(model, options))
            return made[0]

    run(changes | {"optimizer": name, "name": f"{name}-{lora_rank}", "lora_rank": lora_rank, "steps": 2}, Watched)
    key = {"muon": "momentum_buffer", "adamw_8bit": "absmax1"}[name]
    named = {parameter: parameter_name for parameter_name, parameter in models[0].named_parameters()}
    kinds = {named[parameter]: key in state for parameter, state in made[0].state.items()}
    for parameter_name, is_matrix in kinds.items():
        assert is_matrix == (".layers." in parameter_name and "norm" not in parameter_name), parameter_name
    assert set(kinds) == {parameter_name for parameter, parameter_name in named.items() if parameter.requires_grad}
    assert len({tuple(group["params"]) for group in made[0].param_groups}) == len(made[0].param_groups)
    assert {group["lr"] for group in made[0].param_groups} == {made[0].param_groups[0]["lr"]}


def test_muon_updates_as_torchs_own_does() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(6, 4)
    model = _Model(layer)
    gradients = [torch.randn(4, 6), torch.randn(4)]
    plain = nn.Parameter(layer.weight.detach().clone())
    theirs = torch.optim.Muon([plain], lr=0.1, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    ours = optimizers.make(model, "muon", 0.1)  # type: ignore[arg-type]
    for group in ours.param_groups:
        group["lr"] = 0.1
    before = layer.bias.detach().clone()
    for _ in range(2):
        layer.weight.grad, layer.bias.grad, plain.grad = (
            gradients[0].clone(),
            gradients[1].clone(),
            gradients[0].clone(),
        )
        ours.step()
        theirs.step()
    assert torch.equal(layer.weight, plain)
    torch.testing.assert_close(layer.bias, before - 0.2 * gradients[1].sign(), atol=1e-5, rtol=1e-5)


class _Model(nn.Module):
    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer

    def get_output_embeddings(self) -> None:
        return None


@pytest.mark.parametrize(
    ("name", "kind", "section", "commands"),
    [
        (
            "muon",
            DeepSpeedOptions,
            "deepspeed",
            "inv submit finetune_ddp -- --optimizer muon or inv submit finetune_fsdp",
        ),
        ("adamw_8bit", DeepSpeedOptions, "deepspeed", "inv submit finetune_ddp -- --optimizer adamw_8bit"),
    ],
)
def test_a_strategy_without_the_optimizer_refuses_it(
    name: str, kind: type[TrainOptions], section: str, commands: str
) -> None:
    loaded = settings.load(kind, "train", section, profile="local")
    with pytest.raises(ValueError, match=commands) as caught:
        kind.model_validate(loaded.model_dump() | {"optimizer": name})
    assert f"optimizer = {name} needs another job" in str(caught.value)


def test_shards_in_8_bits_need_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    options = settings.load(FSDPOptions, "train", "fsdp", profile="local").model_copy(
        update={"optimizer": "adamw_8bit"}
    )
    monkeypatch.setattr(importlib.util, "find_spec", {"torchao": True}.get)
    optimizers.check_installed(options)
    monkeypatch.setattr(importlib.util, "find_spec", {}.get)
    with pytest.raises(UserError, match=r"adamw_8bit with finetune_fsdp needs the package torchao, .* Add torchao to"):
        optimizers.check_installed(options)
    optimizers.check_installed(settings.load(DDPOptions, "train", profile="local"))


def test_an_optimizer_that_keeps_more_than_declared_is_refused() -> None:
    layer = nn.Linear(64, 64, bias=False)
    for name, keeps in (("muon", 1.0), ("adamw_8bit", 0.508)):
        optimizer = optimizers.make(_Model(layer), name, 0.0)  # type: ignore[arg-type]
        layer.weight.grad = torch.ones(64, 64)
        optimizer.step()
        declared = optimizers.kept_values(name, 1.0)  # type: ignore[arg-type]
        assert declared == pytest.approx(keeps, abs=1e-3)
        optimizers.check_values(optimizer, declared + 0.15, "Mine")  # the tables of a small matrix weigh as much
        with pytest.raises(UserError, match="keeps"):
            optimizers.check_values(optimizer, declared - 0.2, "Mine")
