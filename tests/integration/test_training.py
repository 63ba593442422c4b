"""Test the training loop in a single process, without Ray: data, numerics, checkpoints, adapters and errors."""

import json
import math
import multiprocessing
import os
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import types
from collections import namedtuple
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import packed_rows
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ranks
import torch
from peft import PeftModel
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    optimization,
)

from raymill import settings
from raymill.data.tokenization import NOT_TRAINED
from raymill.errors import UserError
from raymill.training import checkpoints, deepspeed_zero, model_io, preflight, schedule, storage, weight_files
from raymill.training.dataset import COLUMNS, Batch, PackedRows, read_manifest
from raymill.training.ddp import DDP
from raymill.training.options import DDPOptions, DeepSpeedOptions, TrainOptions
from raymill.training.runtimes.runtime import Metrics, SingleProcess, WriteCheckpoint
from raymill.training.strategy import StateCopier
from raymill.training.trainer import train
from raymill.training.training_rows import PackedSource

SEQUENCE_LENGTH = 64
TRAIN_ROWS, EVAL_ROWS = 13 + 8, 5  # neither is a multiple of the batch size

WSD = (0.25, 0.5, 0.75, 1, 1, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0)
"""Shares of the peak learning rate: 12 steps, of which 4 are warmup, and 6 decay."""

Finetune = Callable[..., list[dict[str, float]]]


@pytest.fixture(scope="module")
def model(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model with dropout, so that random states matter."""
    folder = tmp_path_factory.mktemp("model")
    packed_rows.write_model(folder, assets, attention_dropout=0.1)
    return folder


@pytest.fixture(scope="module")
def packed(assets: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of packed rows: two training shards, with row groups of a few rows."""
    folder = tmp_path_factory.mktemp("packed")
    documents = packed_rows.tokenize(assets, model, SEQUENCE_LENGTH)
    packed_rows.write(folder, documents, model, SEQUENCE_LENGTH, train=[13, 8], evaluated=EVAL_ROWS)
    return folder


@pytest.fixture
def options(model: Path, packed: Path, tmp_path: Path) -> DDPOptions:
    return DDPOptions(
        model=str(model),
        data=str(packed),
        output=str(tmp_path),
        num_workers=1,
        use_gpu=False,
        device="cpu",
        cpus_per_worker=1,
        max_failures=0,
        global_batch_rows=8,
        micro_batch_rows=4,
        precision="fp32",
        learning_rate=1e-2,
        warmup_steps=4,
        min_lr_ratio=0.1,
        weight_decay=0.01,
        max_grad_norm=1.0,
        steps=12,
        eval_every=6,
        checkpoint_every=6,
        keep_checkpoints=1,
        log_every=3,
        seed=0,
    )


@pytest.fixture
def finetune(options: DDPOptions) -> Finetune:
    """Return a function that trains with changed options and returns the lines of metrics.jsonl."""

    def run(
        runtime_type: type[SingleProcess] = SingleProcess, strategy: type[DDP] = DDP, **changes: Any
    ) -> list[dict[str, float]]:
        changed = options.model_validate(options.model_dump() | changes)
        folder = Path(changed.output) / changed.name
        train(changed, runtime_type(folder, torch.device("cpu"), changed.keep_checkpoints), strategy)
        return [line for line in logged(folder) if line["step"]]

    return run


def logged(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


# ------------------------------------------------------------------------------------------ schedules and FLOPs


@pytest.mark.parametrize(("rows", "micro", "workers"), [(16, 8, 2), (16, 4, 1), (64, 1, 8), (12, 2, 3)])
def test_a_global_batch_is_split_evenly(rows: int, micro: int, workers: int) -> None:
    schedule.check_batches(rows, micro, workers, workers)
    plan = schedule.spread(rows, micro, workers)
    assert plan.rows_per_rank * workers == rows
    assert plan.accumulation * micro == plan.rows_per_rank


def test_an_uneven_batch_is_refused_with_the_nearest_valid_values() -> None:
    with pytest.raises(UserError) as refused:
        schedule.check_batches(20, 2, 3, 3)
    assert "--global-batch-rows 18 or 24" in str(refused.value)
    assert "--num-workers 2 or 5" in str(refused.value)
    for rows, workers in [(18, 3), (24, 3), (20, 2), (20, 5)]:
        schedule.check_batches(rows, 2, workers, workers)


def test_with_a_range_of_workers_each_runs_the_same_number_of_passes() -> None:
    schedule.check_batches(16, 4, 1, 4)
    assert [schedule.spread(16, 4, workers).accumulation for workers in (1, 2, 3, 4)] == [4, 2, 2, 1]
    for rows, micro, most in [(16, 4, 5), (18, 4, 2)]:  # a worker, or part of a micro-batch, would have no rows
        with pytest.raises(UserError, match=f"--global-batch-rows {micro * most}"):
            schedule.check_batches(rows, micro, 1, most)


@pytest.mark.parametrize(
    ("name", "ratio", "theirs"),
    [
        ("cosine", 0.1, partial(optimization.get_cosine_with_min_lr_schedule_with_warmup, min_lr_rate=0.1)),
        ("linear", 0.0, optimization.get_linear_schedule_with_warmup),
        (
            "constant",
            0.5,
            lambda optimizer, warmup, _: optimization.get_constant_schedule_with_warmup(optimizer, warmup),
        ),
        (
            "wsd",
            0.0,
            lambda optimizer, warmup, steps: optimization.get_wsd_schedule(
                optimizer, warmup, steps // 5, steps, min_lr_ratio=0.0, decay_type="linear"
            ),
        ),
    ],
)
def test_the_learning_rate_equals_that_of_transformers(name: Any, ratio: float, theirs: Callable[..., Any]) -> None:
    peak, warmup, steps = 3e-3, 7, 50
    share = theirs(torch.optim.SGD([torch.zeros(1)], lr=peak), warmup, steps).lr_lambdas[0]
    for step in range(1, steps + 1):
        ours = schedule.learning_rate_at(
            step, peak=peak, warmup_steps=warmup, steps=steps, min_ratio=ratio, schedule=name, decay_share=0.2
        )
        assert ours == pytest.approx(peak * share(step), rel=1e-9), step


def test_schedules_that_are_shorter_than_their_parts() -> None:
    rate = partial(schedule.learning_rate_at, peak=1.0, min_ratio=0.0)
    for name in get_args(schedule.Schedule):
        assert rate(5, warmup_steps=5, steps=5, schedule=name) == 1, "all is warmup"
    assert rate(10, warmup_steps=5, steps=10, schedule="wsd", decay_share=1.0) == 0


def test_the_schedule_of_the_options_is_used_and_cannot_change(finetune: Finetune) -> None:
    rows = finetune(schedule="wsd", decay_share=0.5, min_lr_ratio=0.0)
    assert [row["lr"] for row in rows] == pytest.approx([1e-2 * share for share in WSD])
    options = preflight.Identity({"schedule": "wsd"})
    with pytest.raises(UserError, match="was started with schedule = wsd, not cosine"):
        preflight._refuse_another_identity(options, {"schedule": "cosine"}, "mine")
    preflight._refuse_another_identity({}, {"schedule": "cosine", "decay_share": 0.1}, "of an older version")


def test_the_learning_rate_scales_with_the_batch() -> None:
    assert schedule.peak_learning_rate(1e-3, 64, 16) == pytest.approx(4e-3)
    assert schedule.peak_learning_rate(1e-3, 64, None) == 1e-3


# ------------------------------------------------------------------------------------------ rows by position


def _rows(packed: Path, part: str) -> list[tuple[int, ...]]:
    return [tuple(row) for row in pq.read_table(packed / part)["input_ids"].to_pylist()]


def test_every_epoch_has_each_row_once_in_another_order(packed: Path) -> None:
    rows = PackedRows(str(packed), "train", seed=0)
    epochs = [
        [tuple(row) for row in rows.read(epoch * TRAIN_ROWS, TRAIN_ROWS)["input_ids"].tolist()] for epoch in range(3)
    ]
    for epoch in epochs:
        assert sorted(epoch) == sorted(_rows(packed, "train"))
    assert all(one != other for one, other in pairwise([_rows(packed, "train"), *epochs]))


def test_a_position_holds_the_same_row_however_it_is_reached(packed: Path) -> None:
    whole = PackedRows(str(packed), "train", seed=1).read(0, 50)
    pieces = [PackedRows(str(packed), "train", seed=1).read(first, 5) for first in range(0, 50, 5)]
    for name in COLUMNS:
        assert torch.equal(whole[name], torch.cat([piece[name] for piece in pieces]))


def test_ranks_share_the_rows_that_one_process_reads(options: DDPOptions, tmp_path: Path) -> None:
    class Rank(SingleProcess):
        def __init__(self, rank: int, world_size: int) -> None:
            super().__init__(tmp_path, torch.device("cpu"), 1)
            self.rank, self.world_size = rank, world_size

    options = options.model_copy(update={"micro_batch_rows": 2})
    for step in (1, 2, 3, 9):  # TRAIN_ROWS is not a multiple of the batch, so step 3 spans two epochs
        alone = PackedSource(options, Rank(0, 1)).rows(step)
        shared = [PackedSource(options, Rank(rank, 4)).rows(step) for rank in range(4)]
        for name in COLUMNS:
            assert torch.equal(alone[name], torch.cat([batch[name] for batch in shared]))


def test_ranks_share_a_batch_that_does_not_divide_evenly(options: DDPOptions, tmp_path: Path) -> None:
    class Rank(SingleProcess):
        def __init__(self, rank: int) -> None:
            super().__init__(tmp_path, torch.device("cpu"), 1)
            self.rank, self.world_size = rank, 3

    eight = options.model_copy(update={"micro_batch_rows": 2})  # four micro-batches for three ranks
    alone = PackedSource(eight, SingleProcess(tmp_path, torch.device("cpu"), 1)).rows(2)
    shared = [PackedSource(eight, Rank(rank)).rows(2) for rank in range(3)]
    for name in COLUMNS:
        assert torch.equal(alone[name], torch.cat([batch[name] for batch in shared])[:8])
    assert torch.equal(shared[2]["labels"], torch.full_like(shared[2]["labels"], NOT_TRAINED))


def test_the_rows_of_the_next_step_are_read_ahead(
    options: DDPOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = PackedSource(options, SingleProcess(tmp_path, torch.device("cpu"), 1))
    reads: queue.SimpleQueue[int] = queue.SimpleQueue()
    read = source._rows.read

    def recorded(first: int, count: int) -> Batch:
        reads.put(first)
        return read(first, count)

    monkeypatch.setattr(source._rows, "read", recorded)
    for step in range(3, 6):
        source.rows(step)
    assert [reads.get(timeout=60) // options.global_batch_rows + 1 for _ in range(4)] == [3, 4, 5, 6]
    assert reads.empty()


def test_the_name_of_a_row_is_its_file_and_number(packed: Path) -> None:
    rows = PackedRows(str(packed), "train", seed=0)
    for name, row in zip(rows.names(17, 30), rows.read(17, 30)["input_ids"], strict=True):
        file, _, number = name.partition(":")
        assert pq.read_table(packed / "train" / file)["input_ids"][int(number)].as_py() == row.tolist()


def test_without_a_seed_rows_keep_their_order(packed: Path) -> None:
    rows = PackedRows(str(packed), "eval").read(0, EVAL_ROWS)
    assert [tuple(row) for row in rows["input_ids"].tolist()] == _rows(packed, "eval")


def test_data_without_evaluation_rows_is_no_error(packed: Path, tmp_path: Path) -> None:
    manifest = json.loads((packed / "manifest.json").read_text())
    manifest["eval"] = {"files": [], "rows": 0}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    assert len(PackedRows(str(tmp_path), "eval")) == 0


def test_epochs_are_passes_over_the_packed_rows(
    finetune: Finetune, options: DDPOptions, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = options.model_validate(options.model_dump() | {"steps": 0, "epochs": 1.5})
    assert preflight.with_steps(asked).steps == 4, "1.5 x 21 rows need 4 steps of 8 rows"
    assert preflight.with_steps(options) is options
    finetune(**preflight.with_steps(asked).model_dump(exclude={"epochs"}))
    assert "; 4 steps = 1.52 epochs of 21 rows; from the start" in capsys.readouterr().out
    for changes in ({"epochs": 1}, {"steps": 0}, {"steps": 0, "epochs": 1, "stream": True}):
        with pytest.raises(ValueError, match="steps"):
            options.model_validate(options.model_dump() | changes)


def test_the_base_model_is_evaluated_before_the_first_step(
    finetune: Finetune, options: DDPOptions, capsys: pytest.CaptureFixture[str]
) -> None:
    finetune(steps=6, learning_rate=1e-30, warmup_steps=0)
    folder = Path(options.output, options.name)
    before, *rows = logged(folder)
    assert (before["step"], set(before)) == (0, {"step", "time", "eval_loss", "eval_perplexity"})
    assert before["eval_loss"] == pytest.approx(rows[-1]["eval_loss"], abs=1e-6), "training changed nothing"
    assert f"before the first step: evaluation loss {before['eval_loss']:.4f}, perplexity" in capsys.readouterr().out
    events = EventAccumulator(f"{folder}/tensorboard").Reload()
    assert [event.step for event in events.Scalars("eval_loss")] == [0, 6]
    finetune(steps=6, learning_rate=1e-30, warmup_steps=0, stop_after=5)  # nothing to do
    assert [row["step"] for row in logged(folder)] == list(range(7))


def test_missing_rows_are_refused(packed: Path, tmp_path: Path) -> None:
    shutil.copytree(packed, tmp_path, dirs_exist_ok=True)
    shutil.copy(tmp_path / "train/part-00001.parquet", tmp_path / "train/part-00000.parquet")
    with pytest.raises(UserError, match="Run: inv submit preprocess"):
        PackedRows(str(tmp_path), "train")


# ------------------------------------------------------------------------------------------ the loop


def test_the_loss_falls_and_each_step_is_logged_once(finetune: Finetune, options: DDPOptions) -> None:
    rows = finetune(steps=24)
    assert [row["step"] for row in rows] == list(range(1, 25))
    assert rows[-1]["loss"] < 0.8 * rows[0]["loss"]
    assert [row["step"] for row in rows if "eval_loss" in row] == [6, 12, 18, 24]
    assert all(row["tokens_per_s"] > 0 and row["grad_norm"] > 0 for row in rows)
    events = EventAccumulator(f"{options.output}/{options.name}/tensorboard").Reload()
    assert [event.value for event in events.Scalars("loss")] == pytest.approx([row["loss"] for row in rows])


def test_a_subclass_of_the_strategy_changes_the_loss_the_optimizer_and_the_learning_rate(finetune: Finetune) -> None:
    class Mine(DDP):
        bounds_loss = False

        def loss(self, batch: Batch) -> torch.Tensor:
            return 3 * super().loss(batch)  # above the bound of the cross-entropy

        def make_optimizer(self, model: nn.Module, options: TrainOptions) -> torch.optim.Optimizer:
            made.append(torch.optim.SGD(model.parameters(), lr=0.0))
            return made[0]

        @staticmethod
        def learning_rate(options: TrainOptions, step: int) -> float:
            return step / 1000

    made: list[torch.optim.Optimizer] = []
    plain, mine = finetune(name="plain", steps=6), finetune(name="mine", steps=6, strategy=Mine)
    assert mine[0]["loss"] == pytest.approx(3 * plain[0]["loss"], rel=1e-6)
    assert mine[-1]["eval_loss"] > 2 * plain[-1]["eval_loss"]
    assert [row["lr"] for row in mine] == [step / 1000 for step in range(1, 7)]
    assert [group["lr"] for group in made[0].param_groups] == [0.006]


def test_the_documented_strategy_trains(finetune: Finetune) -> None:
    page = (settings.PROJECT / "docs" / "training.md").read_text(encoding="utf-8")
    code, *_ = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"__name__": "jobs.mine"}
    exec(code, names)
    plain, mine = finetune(name="plain", steps=6), finetune(name="mine", steps=6, strategy=names["STRATEGY"])
    assert mine[0]["loss"] == pytest.approx(0.5 * plain[0]["loss"], rel=1e-6)
    assert mine[3]["lr"] == pytest.approx(mine[0]["lr"] / 2)


def test_an_unknown_layer_for_adapters_is_refused(finetune: Finetune) -> None:
    with pytest.raises(UserError, match=r"is named qproj\. Set lora_targets to some of: down_proj, gate_proj, k_proj"):
        finetune(lora_rank=4, lora_targets=("q_proj", "qproj"))  # peft would ignore it


def test_an_optimizer_that_keeps_more_than_its_class_says_is_refused(finetune: Finetune) -> None:
    class Mine(DDP):
        def make_optimizer(self, model: nn.Module, options: TrainOptions) -> torch.optim.Optimizer:
            return torch.optim.AdamW(model.parameters(), amsgrad=True)

    said = "the optimizer of Mine keeps 3 numbers for each parameter, not 2. Set optimizer_values = 3 in the class."
    with pytest.raises(UserError, match=re.escape(said)):
        finetune(name="mine", strategy=Mine)
    Mine.optimizer_values = 3
    assert finetune(name="mine", steps=2, strategy=Mine)


def test_accumulated_micro_batches_equal_the_whole_batch(finetune: Finetune, model: Path, tmp_path: Path) -> None:
    still = _without_dropout(model, tmp_path / "model")
    whole = finetune(name="whole", model=still, micro_batch_rows=8)
    parts = finetune(name="parts", model=still, micro_batch_rows=1)
    assert [row["loss"] for row in parts] == pytest.approx([row["loss"] for row in whole], abs=1e-5)


def test_gradient_checkpointing_changes_no_number(finetune: Finetune) -> None:
    plain = finetune(name="plain")
    for interval in (1, 2):
        again = finetune(
            name=f"again-{interval}", gradient_checkpointing=True, gradient_checkpointing_interval=interval
        )
        assert [row["loss"] for row in again] == pytest.approx([row["loss"] for row in plain], abs=1e-6)


def test_bf16_is_close_to_fp32(finetune: Finetune, monkeypatch: pytest.MonkeyPatch, options: DDPOptions) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    full = finetune(name="full", steps=6)
    half = finetune(name="half", steps=6, precision="bf16")
    difference = max(abs(one["loss"] - other["loss"]) for one, other in zip(full, half, strict=True))
    assert 0 < difference < 5e-2
    trained = AutoModelForCausalLM.from_pretrained(f"{options.output}/half/model", dtype="auto")
    assert trained.dtype == torch.bfloat16


def test_bf16_falls_back_to_fp32_if_it_is_emulated(
    finetune: Finetune, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full = finetune(name="full", steps=3)
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    fallen = finetune(name="fallen", steps=3, precision="bf16")
    assert [row["loss"] for row in fallen] == [row["loss"] for row in full]
    assert "training in fp32" in capsys.readouterr().out


def test_a_resumed_run_repeats_every_bit(finetune: Finetune, options: DDPOptions) -> None:
    undisturbed = finetune(name="undisturbed")
    finetune(name="resumed", stop_after=7, checkpoint_every=5)  # stops in the middle of an epoch, after a checkpoint
    shutil.rmtree(Path(options.output) / "resumed/step-00000007")  # as if the run was killed after step 7 ...
    with Path(options.output, "resumed/metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "lo')  # ... while it wrote a line
    resumed = finetune(name="resumed")
    for name in ("step", "loss", "lr", "grad_norm"):
        assert [row[name] for row in resumed] == [row[name] for row in undisturbed]
    weights = [
        AutoModelForCausalLM.from_pretrained(f"{options.output}/{name}/model").state_dict()
        for name in ("undisturbed", "resumed")
    ]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_finished_run_does_not_change(finetune: Finetune) -> None:
    assert finetune() == finetune()


def test_training_continues_while_slow_storage_writes_the_copied_state(finetune: Finetune, options: DDPOptions) -> None:
    class Slow(SingleProcess):
        def _keep(self, metrics: Metrics, write: WriteCheckpoint) -> None:
            while metrics["step"] == 6 and _lines(self._folder / "metrics.jsonl") < 10:
                assert time.monotonic() < deadline, "the loop waits for its checkpoint"
                time.sleep(0.01)
            super()._keep(metrics, write)

    undisturbed = finetune(name="undisturbed")
    deadline = time.monotonic() + 60
    finetune(Slow, name="slow", stop_after=11, checkpoint_every=6, log_every=1, keep_checkpoints=2)
    shutil.rmtree(Path(options.output, "slow/step-00000011"))
    assert [row["loss"] for row in finetune(name="slow")] == [row["loss"] for row in undisturbed]


def test_each_copy_of_the_state_reuses_the_memory_of_the_previous_copy() -> None:
    state, copier = {"weights": torch.zeros(1000)}, StateCopier()
    first = copier.copy(state)["weights"]
    state["weights"] += 1
    assert not first.any()
    second = copier.copy(state)["weights"]
    assert second.data_ptr() == first.data_ptr()
    assert second.all()


def test_training_waits_while_an_uncopied_state_is_written(
    finetune: Finetune, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(DDP, "copies_state", False)
    lines_when_written = {}

    class Slow(SingleProcess):
        def _keep(self, metrics: Metrics, write: WriteCheckpoint) -> None:
            time.sleep(1)  # a loop that did not wait would log further steps
            lines_when_written[metrics["step"]] = len(logged(self._folder)) - 1  # the first is for step 0
            super()._keep(metrics, write)

    finetune(Slow, name="waits", checkpoint_every=6, log_every=1)
    assert lines_when_written == {step: step for step in range(6, len(lines_when_written) * 6 + 1, 6)}
    assert re.search(r"training waited \d+ s to save the checkpoint after step 6\n", capsys.readouterr().out)


def test_an_incomplete_checkpoint_is_skipped(
    finetune: Finetune, options: DDPOptions, capsys: pytest.CaptureFixture[str]
) -> None:
    undisturbed = finetune(name="undisturbed")
    finetune(name="torn", stop_after=9, checkpoint_every=3, keep_checkpoints=3)
    folder = Path(options.output, "torn")
    os.truncate(folder / "step-00000009/ddp.pt", 1000)
    (folder / "step-00000006/random-00000.pt").unlink()
    rows = finetune(name="torn")
    printed = capsys.readouterr().out
    assert re.search(r"incomplete checkpoint step-00000009: ddp.pt has 1000 of \d+ bytes", printed)
    assert re.search(r"incomplete checkpoint step-00000006: random-00000.pt has 0 of \d+ bytes", printed)
    assert "resumed after step 3" in printed
    assert [row["loss"] for row in rows] == [row["loss"] for row in undisturbed]


def test_a_spot_notice_triggers_a_checkpoint(finetune: Finetune, options: DDPOptions) -> None:
    class Noticed(SingleProcess):
        notices = iter([False, True, False, False, False])

        def should_save(self) -> bool:
            return next(self.notices)

    finetune(Noticed, stop_after=11, checkpoint_every=100, keep_checkpoints=2)
    kept = sorted(folder.name for folder in Path(options.output, options.name).glob("step-*"))
    assert kept == ["step-00000003", "step-00000011"]


@pytest.mark.nightly
def test_twenty_kills_change_no_bit(finetune: Finetune, options: DDPOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill the run at random moments, mostly in the middle of a step or while it writes a checkpoint."""
    steps = 200  # a fast machine runs five or more steps between two kills, and the run must not finish
    undisturbed = finetune(name="undisturbed", steps=steps)
    killed = options.model_copy(update={"name": "killed", "steps": steps, "checkpoint_every": 1, "log_every": 1})
    moments = random.Random(0)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    processes = multiprocessing.get_context("forkserver")  # imports everything once for all starts
    processes.set_forkserver_preload([__name__])
    file = Path(killed.output, "killed/metrics.jsonl")
    for _ in range(20):
        process = processes.Process(target=_train_alone, args=(killed,))
        process.start()
        before = _lines(file)
        while _lines(file) < before + 2 and process.is_alive():  # until the process makes progress
            time.sleep(0.001)
        time.sleep(moments.uniform(0, 0.1))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL  # the process had not finished
    rows = finetune(name="killed", steps=steps)
    assert [(row["step"], row["loss"]) for row in rows] == [(row["step"], row["loss"]) for row in undisturbed]
    weights = [
        AutoModelForCausalLM.from_pretrained(f"{options.output}/{name}/model").state_dict()
        for name in ("undisturbed", "killed")
    ]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_the_best_and_the_last_checkpoint_are_kept(finetune: Finetune, options: DDPOptions) -> None:
    rows = finetune(steps=60, learning_rate=0.1, checkpoint_every=10, eval_every=10)
    losses = {row["step"]: row["eval_loss"] for row in rows if "eval_loss" in row}
    best = min(losses, key=lambda step: losses[step])
    kept = {int(folder.name.removeprefix("step-")) for folder in Path(options.output, options.name).glob("step-*")}
    assert best != 60  # at this learning rate the model overfits
    assert kept == {best, 60}


def test_a_run_that_is_asked_to_stop_saves_a_checkpoint(finetune: Finetune, options: DDPOptions) -> None:
    class Asked(SingleProcess):
        def should_stop(self) -> bool:
            return True

    undisturbed = finetune(name="undisturbed")
    stopped = finetune(Asked)
    assert [row["step"] for row in stopped] == [1]  # it is asked after step 1, then at least every log_every steps
    assert not Path(options.output, options.name, "model").exists()
    assert [row["loss"] for row in finetune()] == [row["loss"] for row in undisturbed]


def test_the_evaluation_loss_is_that_of_unpacked_documents(
    finetune: Finetune, packed: Path, options: DDPOptions
) -> None:
    """Compare with transformers' own loss over unpacked documents, because packing and batching must not matter."""
    row = finetune(steps=6, micro_batch_rows=2)[-1]
    model = AutoModelForCausalLM.from_pretrained(f"{options.output}/{options.name}/model").eval()
    loss, tokens = 0.0, 0
    for input_ids, labels in _documents_in(pq.read_table(packed / "eval")):
        count = int((labels[1:] != NOT_TRAINED).sum())
        with torch.no_grad():
            loss += model(input_ids=input_ids[None], labels=labels[None]).loss.item() * count
        tokens += count
    assert row["eval_loss"] == pytest.approx(loss / tokens, abs=1e-5)
    assert row["eval_perplexity"] == pytest.approx(math.exp(loss / tokens), rel=1e-5)


def test_the_model_folder_is_complete(finetune: Finetune, packed: Path, options: DDPOptions) -> None:
    finetune(steps=3)
    folder = Path(options.output, options.name, "model")
    assert (folder / "model.safetensors").exists()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    made_with = read_manifest(str(packed)).tokenizer
    assert tokenizer.chat_template == made_with.chat_template
    assert GenerationConfig.from_pretrained(folder).eos_token_id == made_with.eos_ids, "a server stops at these tokens"
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Name HTTP status code 404."}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    answer = AutoModelForCausalLM.from_pretrained(folder).generate(**prompt, max_new_tokens=3, do_sample=False)
    assert answer.shape[1] > prompt["input_ids"].shape[1]


@pytest.mark.parametrize(
    "published",
    [
        {"temperature": 0.9, "top_p": 0.6, "do_sample": False},
        {"top_k": 20, "min_p": 0.05},
        {"early_stopping": True, "length_penalty": 0.8},
        {"pad_token_id": -1},
        {"output_scores": True},
    ],
)
@pytest.mark.parametrize("changes", [{}, {"lora_rank": 4}], ids=["full", "lora"])
def test_a_contradictory_generation_config_is_exported_as_published(
    finetune: Finetune,
    model: Path,
    packed: Path,
    options: DDPOptions,
    tmp_path: Path,
    published: dict[str, Any],
    changes: dict[str, Any],
) -> None:
    shutil.copytree(model, tmp_path / "published")
    (tmp_path / "published/generation_config.json").write_text(json.dumps(published | {"eos_token_id": 2}))
    finetune(model=str(tmp_path / "published"), steps=1, **changes)
    exported = json.loads(Path(options.output, options.name, "model/generation_config.json").read_text())
    assert exported.pop("eos_token_id") == read_manifest(str(packed)).tokenizer.eos_ids
    assert published.items() <= exported.items() | {("do_sample", False)}  # the default, which is left out


def test_generation_parameters_in_the_model_config_are_exported(
    finetune: Finetune, model: Path, options: DDPOptions, tmp_path: Path
) -> None:
    shutil.copytree(model, tmp_path / "old")
    (tmp_path / "old/generation_config.json").unlink()
    config = json.loads((model / "config.json").read_text()) | {"temperature": 0.7}
    (tmp_path / "old/config.json").write_text(json.dumps(config))
    finetune(model=str(tmp_path / "old"), steps=1)
    folder = Path(options.output, options.name, "model")
    assert GenerationConfig.from_pretrained(folder).temperature == 0.7


@pytest.mark.parametrize("part", [LlamaConfig, PreTrainedTokenizerBase])
def test_a_model_that_cannot_be_exported_is_refused_before_the_first_step(
    finetune: Finetune, options: DDPOptions, monkeypatch: pytest.MonkeyPatch, part: type
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("one\ntwo")

    monkeypatch.setattr(part, "save_pretrained", fail)
    with pytest.raises(UserError, match=r"could not be exported \(ValueError: one two\)"):
        finetune()
    assert not Path(options.output, options.name, "metrics.jsonl").read_text()


def test_a_failed_export_leaves_a_run_that_exports_without_training(
    finetune: Finetune, options: DDPOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(options.output, options.name)
    with monkeypatch.context() as patch:
        patch.setattr(weight_files, "save_file", lambda *_, **__: Path("/nowhere/file").write_text(""))
        with pytest.raises(UserError, match=r"export failed \(FileNotFoundError.*the same command again to"):
            finetune()
        with pytest.raises(UserError, match="the same command again without --fresh to export"):
            finetune(fresh=True)
    assert not (folder / "model").exists()
    assert not list(folder.glob(".model*"))
    rows = folder.joinpath("metrics.jsonl").read_text()
    monkeypatch.setattr(DDP, "step", None)
    finetune()
    assert folder.joinpath("metrics.jsonl").read_text() == rows
    assert AutoModelForCausalLM.from_pretrained(folder / "model")


def test_a_run_at_a_uri_has_the_losses_of_one_in_a_folder(
    finetune: Finetune, options: DDPOptions, tmp_path: Path
) -> None:
    undisturbed = finetune(name="undisturbed")
    remote = options.model_copy(update={"name": "remote", "output": f"file://{tmp_path}/bucket"})
    for stop in (6, 12):  # the second start resumes the run
        runtime = SingleProcess(tmp_path / "checkpoints", torch.device("cpu"), 1)
        train(remote.model_copy(update={"stop_after": stop}), runtime, DDP)
    folder = tmp_path / "bucket/remote"
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["loss"] for line in lines[1:]] == [row["loss"] for row in undisturbed]
    assert (folder / "model/model.safetensors").exists()
    assert list((folder / "tensorboard").iterdir())


# ------------------------------------------------------------------------------------------ adapters


LORA = {"lora_rank": 4, "lora_alpha": 8, "lora_dropout": 0.1}


def test_lora_trains_adapters_and_the_merged_model_has_their_logits(
    finetune: Finetune, model: Path, options: DDPOptions, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = finetune(**LORA)
    assert rows[-1]["loss"] < rows[0]["loss"]
    trained, whole = re.findall(r"([\d,]+) trained of ([\d,]+) parameters", capsys.readouterr().out)[0]
    assert int(trained.replace(",", "")) < int(whole.replace(",", "")) / 2
    run = Path(options.output, options.name)
    base = AutoModelForCausalLM.from_pretrained(model)
    prompt = torch.arange(40)[None]
    with torch.no_grad():
        before = base(prompt).logits
        unmerged = PeftModel.from_pretrained(base, str(run / "adapter")).eval()(prompt).logits
        merged = AutoModelForCausalLM.from_pretrained(run / "model").eval()(prompt).logits
    torch.testing.assert_close(merged, unmerged, atol=1e-5, rtol=0)
    assert (merged - before).abs().max() > 1e-2


def test_a_resumed_lora_run_repeats_every_bit_and_saves_no_base_model(finetune: Finetune, options: DDPOptions) -> None:
    undisturbed = finetune(name="undisturbed", **LORA)
    finetune(name="resumed", stop_after=6, **LORA)
    resumed = finetune(name="resumed", **LORA)
    assert [row["loss"] for row in resumed] == [row["loss"] for row in undisturbed]
    state = torch.load(next(Path(options.output, "resumed").glob("step-*/ddp.pt")), weights_only=True)
    assert state["model"]
    assert all("lora" in name for name in state["model"])


def test_with_lora_in_bf16_frozen_weights_are_bf16_and_adapters_fp32(
    finetune: Finetune, options: DDPOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frozen weights in fp32 take twice the memory, and autocast would keep copies of them in bf16."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    model = model_io.load_model(options.model_copy(update=LORA | {"precision": "bf16"}))
    dtypes = {(parameter.requires_grad, parameter.dtype) for parameter in model.parameters()}
    assert dtypes == {(False, torch.bfloat16), (True, torch.float32)}
    lora = LORA | {"lora_dropout": 0, "steps": 6}
    full = finetune(name="full", **lora)
    half = finetune(name="half", precision="bf16", **lora)
    assert 0 < max(abs(one["loss"] - other["loss"]) for one, other in zip(full, half, strict=True)) < 5e-2


def test_adapters_train_on_4_bit_weights(finetune: Finetune, model: Path, options: DDPOptions, tmp_path: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    shape = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 128}  # bitsandbytes quantizes blocks of 64 numbers
    shutil.copytree(model, tmp_path / "wide")
    wide = LlamaForCausalLM(LlamaConfig(**config | shape))
    wide.save_pretrained(tmp_path / "wide")
    lora = LORA | {"model": str(tmp_path / "wide"), "steps": 24}
    whole = finetune(name="whole", **lora)
    rows = finetune(name="quantized", quantize_base=True, **lora)
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert 0 < abs(rows[0]["loss"] - whole[0]["loss"]) < 0.1  # 4-bit weights are rounded
    merged = AutoModelForCausalLM.from_pretrained(f"{options.output}/quantized/model")
    assert merged.num_parameters() == wide.num_parameters()


@pytest.fixture
def wide(model: Path, tmp_path: Path) -> Path:
    """Return the folder of a model whose matrices consist of whole blocks of 64 x 64 numbers."""
    shutil.copytree(model, tmp_path / "wide-base")
    config = json.loads((model / "config.json").read_text())
    shape = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 128, "num_key_value_heads": 4}
    LlamaForCausalLM(LlamaConfig(**config | shape)).save_pretrained(tmp_path / "wide-base")
    return tmp_path / "wide-base"


def test_a_quantized_checkpoint_is_not_read_as_plain_numbers(finetune: Finetune, wide: Path, tmp_path: Path) -> None:
    quantized = tmp_path / "quantized"
    shutil.copytree(wide, quantized)
    int8 = BitsAndBytesConfig(load_in_8bit=True)
    AutoModelForCausalLM.from_pretrained(wide, quantization_config=int8).save_pretrained(quantized)
    for changes in ({}, LORA, LORA | {"quantize_base": True}):
        with pytest.raises(UserError, match=r"the weights of .*quantized are quantized, .*--quantize-base"):
            finetune(model=str(quantized), **changes)


def test_a_checkpoint_that_is_dequantized_is_exported_with_plain_weights(
    finetune: Finetune, wide: Path, options: DDPOptions
) -> None:
    """On a CPU, transformers dequantizes 8-bit floats."""
    weights = load_file(wide / "model.safetensors")
    for name in [name for name in weights if "_proj" in name]:
        weights[name] = (weights[name] * 8).to(torch.float8_e4m3fn)
        weights[f"{name}_scale_inv"] = torch.full((1, 1), 1 / 8)
    save_file(weights, wide / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((wide / "config.json").read_text())
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    (wide / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    finetune(model=str(wide), **LORA)
    run = Path(options.output, options.name)
    base = AutoModelForCausalLM.from_pretrained(wide, dtype=torch.float32)
    prompt = torch.arange(40)[None]
    with torch.no_grad():
        unmerged = PeftModel.from_pretrained(base, str(run / "adapter")).eval()(prompt).logits
        merged = AutoModelForCausalLM.from_pretrained(run / "model").eval()(prompt).logits
    torch.testing.assert_close(merged, unmerged, atol=1e-5, rtol=0)
    assert "quantization_config" not in json.loads((run / "model/config.json").read_text())


def test_dropout_on_the_experts_of_a_mixture_is_refused(
    finetune: Finetune, model: Path, options: DDPOptions, tmp_path: Path
) -> None:
    shutil.copytree(model, tmp_path / "mixture")
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_local_experts": 2}
    vocabulary = preflight.load_config(str(model)).vocab_size
    MixtralForCausalLM(MixtralConfig(vocab_size=vocabulary, **shape)).save_pretrained(tmp_path / "mixture")
    with pytest.raises(UserError, match=r"mixture cannot have such adapters .* Add --lora-dropout 0"):
        finetune(model=str(tmp_path / "mixture"), **LORA)


# ------------------------------------------------------------------------------------------ errors


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_rows(
    finetune: Finetune, packed: Path, options: DDPOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    token, steps = _token_of_few_rows(options)
    load = model_io.load_model

    def load_with_overflow(options: DDPOptions, output: str) -> PreTrainedModel:
        model = load(options)
        model.get_input_embeddings().weight.data[token] = math.inf
        return model

    monkeypatch.setattr(model_io, "load_model", load_with_overflow)
    with pytest.raises(UserError, match="--fresh and a lower --learning-rate") as refused:
        finetune(micro_batch_rows=1, checkpoint_every=1, log_every=1)
    assert f"step {min(steps)} diverged" in str(refused.value)
    assert "the loss is nan" in str(refused.value)
    assert f"the last good checkpoint is from step {min(steps) - 1}" in str(refused.value)
    named = re.findall(r"(part-\d+\.parquet):(\d+)", str(refused.value))
    assert len(named) == steps[min(steps)]
    for file, row in named:
        assert token in pq.read_table(packed / "train" / file)["input_ids"][int(row)].as_py()


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_weights_that_are_not_finite_are_named(finetune: Finetune, model: Path, tmp_path: Path, value: float) -> None:
    shutil.copytree(model, tmp_path / "broken")
    broken = LlamaForCausalLM.from_pretrained(model)
    broken.model.layers[1].mlp.up_proj.weight.data[3, 5] = value
    broken.save_pretrained(tmp_path / "broken")
    expected = r"step 1 diverged \(the loss is nan\), because model\.layers\.1\.mlp\.up_proj\.weight of .*/broken has"
    with pytest.raises(UserError, match=expected):
        finetune(model=str(tmp_path / "broken"))


def test_missing_weights_are_refused_before_training(options: DDPOptions, model: Path, tmp_path: Path) -> None:
    preflight.check_packed(options)
    broken = shutil.copytree(model, tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"its files lack model\.norm\.weight"):
        preflight.check_packed(options.model_copy(update={"model": str(broken)}))


def test_a_loss_that_explodes_stops_the_run(finetune: Finetune) -> None:
    with pytest.raises(
        UserError,
        match=r"diverged on rows part-.*: the loss is .*, more than twice the loss of random guessing",
    ):
        finetune(learning_rate=30.0, max_grad_norm=1e3, warmup_steps=0)


def test_a_full_disk_is_refused_before_writing(finetune: Finetune, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(2**30, 2**30, 2**10))
    with pytest.raises(UserError, match=r"no room for a checkpoint .* has 0 MiB left"):
        finetune()


@pytest.mark.parametrize("scratch", [False, True])
def test_a_large_checkpoint_is_announced_with_the_seconds_of_slow_storage(
    finetune: Finetune,
    options: DDPOptions,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    scratch: bool,
) -> None:
    """The storage takes 0.2 s for a hundredth of a checkpoint."""
    write = storage.write_bytes

    def write_slowly(location: str, content: bytes) -> None:
        time.sleep(0.2)
        write(location, content)

    finetune(name="small", stop_after=1)
    assert "to store" not in capsys.readouterr().out
    monkeypatch.setattr(storage, "write_bytes", write_slowly)
    monkeypatch.setattr(SingleProcess, "scratch", Path(options.output) if scratch else None)
    monkeypatch.setattr(checkpoints, "LARGE", 1)
    parameters = AutoModelForCausalLM.from_pretrained(options.model).num_parameters()
    monkeypatch.setattr(checkpoints, "SAMPLE", 12 * parameters // 100)
    finetune(stop_after=1)
    (seconds,) = re.findall(r"a checkpoint has 0\.0 GiB and takes about (\d+) s to store", capsys.readouterr().out)
    assert 20 <= int(seconds) <= 80
    assert not list(Path(options.output).rglob(".sample*"))
    finetune(stop_after=1)
    assert "to store" not in capsys.readouterr().out, "a finished run stores nothing"


def test_missing_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="inv submit preprocess"):
        read_manifest(str(tmp_path))


def test_rows_of_another_tokenizer_are_refused_with_both_names(
    options: DDPOptions, packed: Path, model: Path, tmp_path: Path
) -> None:
    other = packed_rows.write_other_tokenizer(model, tmp_path / "other")
    preflight.check_data(options, read_manifest(str(packed)))
    with pytest.raises(UserError, match=rf"{model}.*{other}"):
        preflight.check_data(options.model_copy(update={"model": str(other)}), read_manifest(str(packed)))


def test_a_model_that_does_not_fit_the_rows_is_refused(model: Path, packed: Path) -> None:
    config, manifest = preflight.load_config(str(model)), read_manifest(str(packed))
    size = config.vocab_size
    # only the tokens that occur need an embedding: Gemma 3 1B has none for the last token of its tokenizer
    manifest.tokenizer.vocabulary = size + 1
    manifest.largest_id = size - 1
    preflight.check_model("m", config, manifest)
    manifest.largest_id = size
    with pytest.raises(UserError, match=f"token id {size}, but m has embeddings only for ids below {size}"):
        preflight.check_model("m", config, manifest)
    manifest.largest_id = None  # written by an earlier version
    with pytest.raises(UserError, match=f"{size + 1} tokens, .* inv submit preprocess -- --overwrite"):
        preflight.check_model("m", config, manifest)
    manifest.tokenizer.vocabulary = size
    preflight.check_model("m", config, manifest)
    with pytest.raises(UserError, match="context of m is 128 tokens"):
        preflight.check_context("m", config, 129)


def test_a_missing_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot load the model"):
        preflight.load_config(str(tmp_path / "nothing"))


def test_a_generation_config_that_transformers_cannot_load_is_refused(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "odd")
    (tmp_path / "odd/generation_config.json").write_text('{"max_new_tokens": 0}')
    with pytest.raises(UserError, match=r"cannot load the model .*odd \(`max_new_tokens` must be greater"):
        preflight.load_config(str(tmp_path / "odd"))


def test_liger_refuses_an_architecture_that_it_does_not_know(
    options: DDPOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Liger runs only on CUDA, so the tests have only a stub of it."""
    known = types.SimpleNamespace(MODEL_TYPE_TO_APPLY_LIGER_FN={"qwen3": print})
    monkeypatch.setitem(sys.modules, "liger_kernel", types.ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", types.ModuleType("liger_kernel.transformers"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.monkey_patch", known)
    with pytest.raises(UserError, match=r"Liger has no kernels for llama\. Set liger = false in \[train\]"):
        model_io.load_model(options.model_copy(update={"liger": True}))


def test_a_run_resumes_only_with_the_same_settings(options: DDPOptions, model: Path, tmp_path: Path) -> None:
    config = preflight.load_config(str(model))
    identity = preflight.identify(options, config, "rows")
    preflight.claim(options, identity)
    preflight.claim(options.model_copy(update={"log_every": 1, "num_workers": 4}), identity)  # these may differ

    wider = LlamaConfig(**{**config.to_dict(), "hidden_size": 64})
    trained = shutil.copytree(model, tmp_path / "trained" / model.name)
    other_weights = LlamaForCausalLM.from_pretrained(trained)
    other_weights.model.norm.weight.data += 0.01
    other_weights.save_pretrained(trained)
    for other in (
        preflight.identify(options, wider, "rows"),
        preflight.identify(options.model_copy(update={"model": str(trained)}), config, "rows"),
        preflight.identify(options, config, "other rows"),
        preflight.identify(options.model_copy(update={"learning_rate": 0.5}), config, "rows"),
    ):
        with pytest.raises(UserError, match=r"was started with (model|weights .*|data|learning_rate) = .*--fresh"):
            preflight.claim(options, other)
    (tmp_path / options.name / "step-00000001").mkdir()
    preflight.claim(options.model_copy(update={"fresh": True}), other)
    assert {file.name for file in (tmp_path / options.name).iterdir()} == {"run.json", "data.json"}


@pytest.mark.parametrize(
    "wrong",
    [{"device": "cuda"}, {"liger": True}, {"name": "../elsewhere"}, {"global_batch_rows": 0}, {"learning_rate": -1.0}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_wrong_options_are_refused(options: DDPOptions, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        DDPOptions.model_validate(options.model_dump() | wrong)


# ------------------------------------------------------------------------------------------ settings and imports


@pytest.mark.parametrize("profile", settings.PROFILES)
def test_both_profiles_hold_valid_options_that_divide(profile: str) -> None:
    for options_type, sections in ((DDPOptions, ["train"]), (DeepSpeedOptions, ["train", "deepspeed"])):
        options = settings.load(options_type, *sections, profile=profile)
        workers = options.min_workers, options.max_workers
        schedule.check_batches(options.global_batch_rows, options.micro_batch_rows, *workers)


def test_the_deepspeed_config_follows_the_settings() -> None:
    assert '"auto"' not in deepspeed_zero.CONFIG_FILE.read_text()
    options = settings.load(DeepSpeedOptions, "train", "deepspeed", profile="local")
    options = options.model_copy(update={"zero_stage": 3, "offload_parameters": True, "max_grad_norm": 0.5})
    runtime: Any = ranks.Alone()
    config = deepspeed_zero.config(options, runtime, schedule.BatchPlan(rows_per_rank=8, accumulation=2))
    assert config["zero_optimization"]["stage"] == 3
    assert config["zero_optimization"]["offload_param"]["device"] == "cpu"
    assert "offload_optimizer" not in config["zero_optimization"]
    assert config["gradient_accumulation_steps"] == 2
    assert config["gradient_clipping"] == 0.5


@pytest.mark.parametrize(("local_world_size", "partition"), [(8, 8), (16, None)])
def test_hpz_has_no_effect_on_a_single_machine(local_world_size: int, partition: int | None) -> None:
    options = settings.load(DeepSpeedOptions, "train", "deepspeed", profile="local")
    options = options.model_copy(update={"zero_stage": 3, "hpz": True})
    runtime: Any = ranks.Rank(0, 16, local_world_size)
    config = deepspeed_zero.config(options, runtime, schedule.BatchPlan(rows_per_rank=8, accumulation=2))
    assert config["zero_optimization"].get("zero_hpz_partition_size") == partition


@pytest.mark.parametrize("option", ["offload_parameters", "hpz"])
def test_options_for_sharded_parameters_need_stage_3(option: str) -> None:
    options = settings.load(DeepSpeedOptions, "train", "deepspeed", profile="local")
    with pytest.raises(ValidationError, match=f"{option} needs zero_stage = 3"):
        DeepSpeedOptions.model_validate(options.model_dump() | {option: True, "zero_stage": 2})


def test_the_loop_does_not_import_ray() -> None:
    modules = "raymill.training.trainer, raymill.training.deepspeed_zero, raymill.training.preflight"
    code = f"import sys; sys.modules['ray'] = None; import {modules}"
    environment = os.environ | {"PYTHONPATH": str(settings.PROJECT)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


# ------------------------------------------------------------------------------------------ helpers


def _token_of_few_rows(options: DDPOptions) -> tuple[int, dict[int, int]]:
    """Return a token that is not in the rows of the first step, and how many rows of each later step have it."""
    rows = PackedRows(options.data, "train", options.seed).read(0, 12 * 8)["input_ids"].view(12, 8, -1)
    for token in rows[3].flatten().unique().tolist():
        steps = {step: int((row == token).any(1).sum()) for step, row in enumerate(rows, 1) if (row == token).any()}
        if min(steps) > 1:
            return token, steps
    raise AssertionError("every token is in the first step")


def _train_alone(options: DDPOptions) -> None:
    runtime = SingleProcess(Path(options.output, options.name), torch.device("cpu"), options.keep_checkpoints)
    train(options, runtime, DDP)


def _lines(file: Path) -> int:
    return len(file.read_text().splitlines()) if file.exists() else 0


def _without_dropout(model: Path, folder: Path) -> str:
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.0}))
    return str(folder)


def _documents_in(rows: pa.Table) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the token ids and labels of each trained document. A document starts where positions restart."""
    documents = []
    for row in rows.to_pylist():
        starts = [at for at, position in enumerate(row["position_ids"]) if position == 0]
        for start, end in pairwise([*starts, len(row["input_ids"])]):
            labels = torch.tensor(row["labels"][start:end])
            if (labels != NOT_TRAINED).any():
                documents.append((torch.tensor(row["input_ids"][start:end]), labels))
    return documents
