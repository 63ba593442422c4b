"""Test that a run stops early and exports its best checkpoint, whatever interrupts it, with each strategy."""

import json
import math
import os
import shutil
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import packed_rows
import pytest
import ranks
import ray
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

from raymill import settings
from raymill.errors import UserError
from raymill.training import history, preflight
from raymill.training.checkpoint_check import STATE
from raymill.training.dataset import Batch
from raymill.training.ddp import DDP
from raymill.training.deepspeed_zero import ZeRO
from raymill.training.fsdp import FSDP
from raymill.training.objectives import Objective, Supervised
from raymill.training.options import DDPOptions, DeepSpeedOptions, FSDPOptions, HFOptions, TrainOptions
from raymill.training.runtimes import ray_train
from raymill.training.runtimes.runtime import SingleProcess
from raymill.training.runtimes.torchrun import TorchrunRuntime
from raymill.training.strategy import MakeStrategy
from raymill.training.trainer import train
from raymill.tuning.options import TuneOptions

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import test modules

BEST, END = 6, 10
"""The best checkpoint, and the second one after it, at which a run with `patience = 2` stops."""

Row = dict[str, float]


class Turns:
    """Learns up to the best step, and then unlearns."""

    @staticmethod
    def learning_rate(options: TrainOptions, step: int) -> float:
        return options.learning_rate if step <= BEST else -options.learning_rate


class TurningDDP(Turns, DDP): ...


class TurningFSDP(Turns, FSDP): ...


class TurningZeRO(Turns, ZeRO): ...


WAYS: dict[str, Any] = {
    "ddp": (TurningDDP, DDPOptions, [], {}),
    "fsdp": (TurningFSDP, FSDPOptions, ["fsdp"], {}),
    "zero1": (TurningZeRO, DeepSpeedOptions, ["deepspeed"], {"zero_stage": 1}),
    "zero2": (TurningZeRO, DeepSpeedOptions, ["deepspeed"], {"zero_stage": 2}),
    "zero3": (TurningZeRO, DeepSpeedOptions, ["deepspeed"], {"zero_stage": 3}),
}


@pytest.fixture(scope="module")
def changes(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return changes to the settings of the local profile, for a model with dropout, so that random states matter."""
    model, data = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("packed")
    packed_rows.write_model(model, assets, attention_dropout=0.1)
    packed_rows.write(data, packed_rows.tokenize(assets, model, 64), model, 64, train=[21], evaluated=5)
    return {
        "model": str(model),
        "data": str(data),
        "learning_rate": 1e-2,
        "steps": 30,
        "global_batch_rows": 8,
        "micro_batch_rows": 4,
        "eval_every": 3,
        "checkpoint_every": 2,
        "keep_checkpoints": 1,
        "log_every": 1,
        "patience": 2,
    }


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path


Run = Callable[..., Path]


@pytest.fixture
def run(changes: dict[str, Any], runs: Path) -> Run:
    """Return a function that trains with changed options in this process, and returns the run's folder."""

    def start(
        name: str,
        strategy: MakeStrategy = TurningDDP,
        runtime_type: type[SingleProcess] = SingleProcess,
        **more: Any,
    ) -> Path:
        options = options_of(changes | {"output": str(runs), "name": name} | more)
        runtime = runtime_type(runs / name, torch.device("cpu"), options.keep_checkpoints)
        train(options, runtime, strategy)
        return runs / name

    return start


def options_of(changes: dict[str, Any], way: str = "ddp") -> TrainOptions:
    _, kind, sections, own = WAYS[way]
    loaded = settings.load(kind, "train", *sections, profile="local").model_dump()
    return kind.model_validate(loaded | own | changes)


def rows(folder: Path) -> list[Row]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def numbers(folder: Path) -> list[tuple[float | None, ...]]:
    names = ("step", "loss", "grad_norm", "eval_loss")
    return [tuple(row.get(name) for name in names) for row in rows(folder) if row["step"]]


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def kept(folder: Path) -> list[int]:
    return sorted(int(one.name.removeprefix("step-")) for one in folder.glob("step-*"))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


def assert_equal_weights(one: Path, other: Path) -> None:
    found, expected = weights(one), weights(other)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


# ---------------------------------------------------------------- one process


def test_a_run_stops_and_exports_its_best_checkpoint(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    until_best = run("until-best", patience=0, stop_after=BEST)
    folder = run("early")
    printed = capsys.readouterr().out
    assert f"stopped early after step {END}: no checkpoint is better than that of step {BEST} (evaluation" in printed
    assert [row["step"] for row in rows(folder)] == list(range(END + 1))
    assert kept(folder) == [BEST, END]
    assert_equal_weights(folder, until_best)
    exported, end = events(folder)[-2:]
    assert (exported["event"], exported["step"], exported["stopped_early"]) == ("export", BEST, True)
    assert (end["event"], end["step"]) == ("end", END)

    before = {name: (folder / name).read_text() for name in ("metrics.jsonl", "events.jsonl")}
    shutil.rmtree(folder / "model")
    with monkeypatch.context() as patch:
        patch.setattr(DDP, "step", None)
        run("early")
    assert f"stopped early after step {END}: no checkpoint is better" in capsys.readouterr().out
    assert {name: (folder / name).read_text() for name in before} == before
    assert kept(folder) == [BEST, END]
    assert_equal_weights(folder, until_best)

    run("early", patience=3)
    assert rows(folder)[-1]["step"] == END + 2, "a larger patience continues"
    assert_equal_weights(folder, until_best)


def test_the_best_checkpoint_is_exported_at_the_end_of_the_schedule(run: Run) -> None:
    folder = run("whole", steps=BEST + 3)
    until_best = run("until-best", patience=0, steps=BEST + 3, stop_after=BEST)
    assert rows(folder)[-1]["step"] == BEST + 3
    assert kept(folder) == [BEST, BEST + 3]
    assert_equal_weights(folder, until_best)
    assert [(event["step"], event["stopped_early"]) for event in events(folder) if event["event"] == "export"] == [
        (BEST, False)
    ]
    run("whole", steps=BEST + 3, patience=0)
    assert [event["step"] for event in events(folder) if event["event"] == "export"] == [BEST, BEST + 3]


class Interrupted(SingleProcess):
    """Asks to save after each step, and to stop after steps 3 and 8."""

    checks = 0

    def should_save(self) -> bool:
        return True

    def should_stop(self) -> bool:
        type(self).checks += 1
        return type(self).checks in (3, 8)


@pytest.mark.parametrize("stops", [(5,), (7,), (8,), (1, 9), (5, 6, 7, 8, 9, 10)])
def test_interruptions_change_nothing(stops: tuple[int, ...], run: Run) -> None:
    whole = run("whole")
    for stop in stops:
        run("parts", stop_after=stop)
    parts = run("parts")
    assert [row["step"] for row in rows(parts)] == list(range(END + 1))
    assert [row[1:3] for row in numbers(parts)] == [row[1:3] for row in numbers(whole)]
    assert_equal_weights(parts, whole)
    assert kept(parts) == kept(whole) == [BEST, END]


def test_checkpoints_for_leaving_machines_do_not_count(run: Run) -> None:
    whole = run("whole")
    Interrupted.checks = 0
    for _ in range(3):
        parts = run("parts", runtime_type=Interrupted)
    assert [event["step"] for event in events(parts) if event["event"] == "start"] == [0, 3, 8]
    assert [row[1:3] for row in numbers(parts)] == [row[1:3] for row in numbers(whole)]
    assert_equal_weights(parts, whole)
    assert kept(parts) == [BEST, END]


def test_a_kill_after_the_best_checkpoint_changes_nothing(run: Run) -> None:
    whole = run("whole")
    shutil.rmtree(run("killed", stop_after=9, keep_checkpoints=3) / "step-00000009")
    killed = run("killed")
    assert [row[1:3] for row in numbers(killed)] == [row[1:3] for row in numbers(whole)]
    assert_equal_weights(killed, whole)


def test_stop_after_a_step_exports_the_best_one_so_far(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run("parts", stop_after=1)
    assert "no regular checkpoint yet, so the model of step 1 is exported" in capsys.readouterr().out
    assert_equal_weights(folder, run("first", patience=0, stop_after=1))
    run("parts", stop_after=7)
    assert f"exporting the best checkpoint: step {BEST} (evaluation loss" in capsys.readouterr().out
    assert_equal_weights(folder, run("until-best", patience=0, stop_after=BEST))


class Constant(DDP):
    @staticmethod
    def learning_rate(options: TrainOptions, step: int) -> float:
        return 0.0


def test_of_equal_checkpoints_the_first_is_the_best(run: Run) -> None:
    folder = run("equal", Constant, patience=3)
    assert len({row["eval_loss"] for row in rows(folder) if "eval_loss" in row}) == 1
    assert rows(folder)[-1]["step"] == 8
    assert kept(folder) == [2, 8]
    assert [event["step"] for event in events(folder) if event["event"] == "export"] == [2]


@pytest.mark.parametrize("harm", ["damaged", "missing"])
def test_without_the_best_checkpoint_nothing_else_is_exported(harm: str, run: Run) -> None:
    folder = run("early")
    before = weights(folder)
    if harm == "damaged":
        os.truncate(folder / f"step-{BEST:08d}/ddp.pt", 1000)
    else:
        shutil.rmtree(folder / f"step-{BEST:08d}")
    with pytest.raises(UserError) as refused:
        run("early")
    assert f"the best checkpoint, that of step {BEST}, is missing or damaged" in str(refused.value)
    assert f"add --patience 0 --stop-after {END}." in str(refused.value)
    with pytest.raises(UserError, match=r"add --patience 0 --stop-after 10, without --fresh\."):
        run("early", fresh=True)  # the driver has deleted the run before; here, it still exists
    assert all(torch.equal(value, before[name]) for name, value in weights(folder).items())
    run("early", patience=0, stop_after=END)
    assert_equal_weights(folder, run("last", patience=0, stop_after=END))


def test_a_checkpoint_of_an_older_version_loads_without_patience(run: Run) -> None:
    folder = run("old", stop_after=4)
    (file,) = folder.glob(f"step-*/{STATE}")
    file.write_text('{"step":4,"world_size":1}')
    inventory = file.with_name("files-00000.json")
    sizes = json.loads(inventory.read_text())
    inventory.write_text(json.dumps(sizes | {STATE: file.stat().st_size}))
    with pytest.raises(UserError, match=r"the checkpoint of step 4 does not say which one is the best.*--patience 0"):
        run("old")
    run("old", patience=0, stop_after=8)
    assert rows(folder)[-1]["step"] == 8
    with pytest.raises(UserError, match=r"the checkpoint of step 8 does not say which one is the best"):
        run("old")


# ---------------------------------------------------------------- objectives


class Likelihood(Supervised):
    """Also measures the negative loss, of which large values are good."""

    metrics = ("likelihood",)
    best_metric, best_mode = "eval_likelihood", "max"

    def counts(self, batch: Batch) -> torch.Tensor:
        return super().counts(batch).repeat(2)

    def sums(self, module: nn.Module, model: PreTrainedModel, batch: Batch) -> torch.Tensor:
        loss = super().sums(module, model, batch)
        return torch.stack([loss, -loss.detach()])


class Likely(TurningDDP):
    @staticmethod
    def make_objective(options: TrainOptions) -> Objective:
        return Likelihood()


def test_large_values_of_a_metric_can_be_good(run: Run, runs: Path) -> None:
    folder = run("max", Likely)
    assert rows(folder)[-1]["step"] == END
    assert kept(folder) == [BEST, END]
    assert_equal_weights(folder, run("min"))
    (folder / "run.json").write_text("{}")
    found = history.read(str(runs), "max")
    assert found
    assert tuple(found.ranking) == ("eval_likelihood", "max")
    best = found.ranking.best(found.evaluations)
    assert best
    assert best["step"] == BEST


def test_an_unknown_metric_is_refused_before_the_first_step(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Likelihood, "best_metric", "eval_likelyhood")
    with pytest.raises(UserError, match=r"ranks models by eval_likelyhood, but .* has only eval_loss, eval_likelihood"):
        run("misspelled", Likely)


def strict(text: str) -> list[Row]:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


@pytest.mark.parametrize("value", [math.nan, math.inf, 800.0])
def test_evaluations_that_no_float_can_hold(
    value: float, run: Run, runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("raymill.training.held_out.total", lambda sums: torch.tensor([[value], [1.0]]))
    if math.isfinite(value):
        run("large")
    else:
        with pytest.raises(UserError, match=r"no evaluation had a finite eval_loss.*add --patience 0 --stop-after 4"):
            run("large")
        assert (
            f"warning: the evaluation on held-out rows is not finite (eval_loss is {value})" in capsys.readouterr().out
        )
    logged = strict((runs / "large/metrics.jsonl").read_text())
    assert not any("eval_perplexity" in row for row in logged)
    assert {row.get("eval_loss") for row in logged} == ({None, value} if math.isfinite(value) else {None})
    assert all(strict(file.read_text()) for file in (runs / "large").glob("step-*/metrics.json"))


# ---------------------------------------------------------------- two ranks, adapters


def spread(changes: dict[str, Any], way: str, runs: Path, **more: Any) -> Path:
    options = options_of(changes | {"output": str(runs), "micro_batch_rows": 2} | more, way)
    folder = runs / options.name
    folder.mkdir(exist_ok=True)
    ranks.run(_rank, (folder / f"meeting-{uuid.uuid4()}", options, way), 2)
    return folder


def _rank(number: int, meeting: Path, options: TrainOptions, way: str) -> None:
    os.environ |= {"LOCAL_RANK": str(number), "LOCAL_WORLD_SIZE": "2"}
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=number, world_size=2)
    runtime = TorchrunRuntime(Path(options.output, options.name), torch.device("cpu"), options.keep_checkpoints)
    train(options, runtime, WAYS[way][0])
    dist.destroy_process_group()


@pytest.mark.parametrize("lora_rank", [0, pytest.param(4, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    "way", ["fsdp", *(pytest.param(way, marks=pytest.mark.nightly) for way in WAYS if way != "fsdp")]
)
def test_two_ranks_export_the_best_checkpoint(way: str, lora_rank: int, changes: dict[str, Any], runs: Path) -> None:
    own = changes | ({"lora_rank": lora_rank, "learning_rate": 2e-3} if lora_rank else {})
    until_best = spread(own, way, runs, name="until-best", patience=0, stop_after=BEST)
    for stop in (7, None):
        folder = spread(own, way, runs, name="early", stop_after=stop)
        assert_equal_weights(folder, until_best)
    assert rows(folder)[-1]["step"] == END
    assert kept(folder) == [BEST, END]
    stored = {str(file): file.read_bytes() for file in folder.glob("step-*/**/*") if file.is_file()}
    shutil.rmtree(folder / "model")
    spread(own, way, runs, name="early")
    assert_equal_weights(folder, until_best)
    assert {str(file): file.read_bytes() for file in folder.glob("step-*/**/*") if file.is_file()} == stored


# ---------------------------------------------------------------- Ray Train


@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize(
    ("strategy", "best", "end"), [(TurningDDP, BEST, END), pytest.param(Constant, 2, 6, marks=pytest.mark.nightly)]
)
def test_ray_train_keeps_and_exports_the_best_checkpoint(
    strategy: MakeStrategy, best: int, end: int, changes: dict[str, Any], runs: Path
) -> None:
    options = options_of(changes | {"output": str(runs), "name": "ray"})
    folder = runs / "ray"
    for _ in range(2):  # the second start trains nothing
        ray_train.fit(options, strategy)
        assert rows(folder)[-1]["step"] == end
        assert kept(folder) == [best, end]
        stored = torch.load(folder / f"step-{best:08d}/ddp.pt", weights_only=True)["model"]
        last = torch.load(folder / f"step-{end:08d}/ddp.pt", weights_only=True)["model"]
        exported = weights(folder)
        assert stored.keys() == exported.keys()
        assert all(torch.equal(exported[name], stored[name]) for name in stored)
        assert strategy is Constant or any(not torch.equal(last[name], stored[name]) for name in stored)
        shutil.rmtree(folder / "model")
    assert [event["event"] for event in events(folder)].count("start") == 1


# ---------------------------------------------------------------- refusals


def test_patience_needs_held_out_rows(changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="patience needs held-out rows, which a stream does not have"):
        options_of(changes | {"stream": True})
    data = tmp_path / "packed"
    shutil.copytree(changes["data"], data)
    manifest = json.loads((data / "manifest.json").read_text())
    manifest["eval"] = {"files": [], "rows": 0}
    (data / "manifest.json").write_text(json.dumps(manifest))
    options = options_of(changes | {"data": str(data)})
    with pytest.raises(UserError, match=r"patience needs evaluation rows, but .* --eval-share"):
        preflight.check_packed(options)
    preflight.check_packed(options.model_copy(update={"patience": 0}))


@pytest.mark.parametrize(("kind", "sections"), [(HFOptions, ["hf"]), (TuneOptions, ["tune"])])
def test_jobs_that_cannot_stop_early_refuse_patience(kind: type[TrainOptions], sections: list[str]) -> None:
    loaded = settings.load(kind, "train", *sections, profile="local").model_dump()
    kind.model_validate(loaded)
    with pytest.raises(ValueError, match="patience"):
        kind.model_validate(loaded | {"patience": 2})
