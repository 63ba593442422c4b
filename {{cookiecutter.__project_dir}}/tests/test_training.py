"""The training loop in this process alone, without Ray: its arithmetic, its data, its numbers, what it refuses."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from peft import LoraConfig, PeftModel
from pydantic import ValidationError
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.optimization import get_cosine_with_min_lr_schedule_with_warmup

import settings
from jobs import finetune_deepspeed
from jobs.preprocessing.conversations import NOT_TRAINED, Tokenize, padding_id, tokenizer_hash
from jobs.preprocessing.packing import pack
from jobs.training import arithmetic, preflight
from jobs.training.loop import PackedSource, train
from jobs.training.options import DDPOptions, DeepSpeedOptions
from jobs.training.packed import COLUMNS, PackedRows, read_manifest
from jobs.training.run import OneProcess
from jobs.training.strategies import DDP
from jobs.training.zero import fill_config

SEQUENCE_LENGTH = 64
TRAIN_ROWS, EVAL_ROWS = 21, 5  # neither fits a whole number of batches

Finetune = Callable[..., list[dict[str, float]]]


@pytest.fixture(scope="module")
def model(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of a few thousand parameters, with dropout, so that random states matter."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = AutoTokenizer.from_pretrained(assets / "model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        attention_dropout=0.1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def documents(assets: Path, model: Path) -> pa.Table:
    lines = (assets / "data/pairs.jsonl").read_text().splitlines()
    return Tokenize(str(model), SEQUENCE_LENGTH)(pa.Table.from_pylist([json.loads(line) for line in lines]))


@pytest.fixture(scope="module")
def packed(documents: pa.Table, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packed rows as preprocess leaves them: two training shards, row groups of a few rows."""
    folder = tmp_path_factory.mktemp("packed")
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = pack(documents, SEQUENCE_LENGTH, padding_id(tokenizer))
    parts = {"train": [rows.slice(0, 13), rows.slice(13, 8)], "eval": [rows.slice(TRAIN_ROWS, EVAL_ROWS)]}
    manifest: dict[str, Any] = {
        "sequence_length": SEQUENCE_LENGTH,
        "content_hash": "0" * 64,
        "tokenizer": {
            "model": str(model),
            "hash": tokenizer_hash(tokenizer),
            "vocabulary": len(tokenizer),
            "chat_template": tokenizer.chat_template + "{# as preprocessed #}",
        },
    }
    for part, tables in parts.items():
        (folder / part).mkdir()
        files = [{"name": f"part-{number:05d}.parquet", "rows": len(table)} for number, table in enumerate(tables)]
        for file, table in zip(files, tables, strict=True):
            pq.write_table(table, folder / part / str(file["name"]), row_group_size=5)
        manifest[part] = {"files": files, "rows": sum(map(len, tables))}
    (folder / "manifest.json").write_text(json.dumps(manifest))
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
    """Train with changed options and return the lines of metrics.jsonl."""

    def run(run_type: type[OneProcess] = OneProcess, **changes: Any) -> list[dict[str, float]]:
        changed = options.model_validate(options.model_dump() | changes)
        folder = Path(changed.output) / changed.name
        train(changed, run_type(folder, torch.device("cpu"), changed.keep_checkpoints), DDP)
        return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]

    return run


# ------------------------------------------------------------------------------------------ arithmetic


@pytest.mark.parametrize(("rows", "micro", "workers"), [(16, 8, 2), (16, 4, 1), (64, 1, 8), (12, 2, 3)])
def test_a_global_batch_is_spread_whole(rows: int, micro: int, workers: int) -> None:
    plan = arithmetic.plan_batches(rows, micro, workers)
    assert plan.rows_per_rank * workers == rows
    assert plan.accumulation * micro == plan.rows_per_rank


def test_a_remainder_is_refused_with_the_nearest_that_work() -> None:
    with pytest.raises(settings.Refusal) as refused:
        arithmetic.plan_batches(20, 2, 3)
    assert "--global-batch-rows 18 or 24" in str(refused.value)
    assert "--num-workers 2 or 5" in str(refused.value)
    for rows, workers in [(18, 3), (24, 3), (20, 2), (20, 5)]:
        arithmetic.plan_batches(rows, 2, workers)


def test_the_learning_rate_is_that_of_transformers() -> None:
    peak, warmup, steps, ratio = 3e-3, 7, 50, 0.1
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=peak)
    share = get_cosine_with_min_lr_schedule_with_warmup(optimizer, warmup, steps, min_lr_rate=ratio).lr_lambdas[0]
    for step in range(1, steps + 1):
        ours = arithmetic.learning_rate_at(step, peak=peak, warmup_steps=warmup, steps=steps, min_ratio=ratio)
        assert ours == pytest.approx(peak * share(step), rel=1e-9)


def test_the_learning_rate_scales_with_the_batch() -> None:
    assert arithmetic.peak_learning_rate(1e-3, 64, 16) == pytest.approx(4e-3)
    assert arithmetic.peak_learning_rate(1e-3, 64, None) == 1e-3


def test_operations_are_those_that_torch_counts() -> None:
    length, rows = 64, 2
    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=192, num_hidden_layers=3, num_attention_heads=4
    )
    config._attn_implementation = "eager"  # the counter sees its matrix products
    model = LlamaForCausalLM(config)
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros((rows, length), dtype=torch.long)).logits.sum().backward()
    multiplied = model.num_parameters() - model.get_input_embeddings().weight.numel()
    formula = arithmetic.flops_per_token(multiplied, config.num_hidden_layers, config.hidden_size, length)
    assert formula == pytest.approx(counter.get_total_flops() / (rows * length), rel=0.01)


def test_operations_of_adapters_are_those_that_torch_counts() -> None:
    length, rows = 64, 2
    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=192, num_hidden_layers=3, num_attention_heads=4
    )
    config._attn_implementation = "eager"
    model = LlamaForCausalLM(config)
    model.add_adapter(LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    model.enable_input_require_grads()
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros((rows, length), dtype=torch.long)).logits.sum().backward()
    multiplied = model.num_parameters() - model.get_input_embeddings().weight.numel()
    frozen = multiplied - model.num_parameters(only_trainable=True)
    shape = config.num_hidden_layers, config.hidden_size, length
    formula = arithmetic.flops_per_token(multiplied, *shape, frozen=frozen)
    assert formula == pytest.approx(counter.get_total_flops() / (rows * length), rel=0.02)


def test_peaks_are_known_by_name() -> None:
    assert arithmetic.peak_flops("NVIDIA A100-SXM4-40GB") == 312e12
    assert arithmetic.peak_flops("NVIDIA H100 PCIe") == 756e12
    assert arithmetic.peak_flops("Tesla T4") is None


# ------------------------------------------------------------------------------------------ rows by position


def _rows(packed: Path, part: str) -> list[tuple[int, ...]]:
    return [tuple(row) for row in pq.read_table(packed / part)["input_ids"].to_pylist()]


def test_every_epoch_has_each_row_once_in_an_order_of_its_own(packed: Path) -> None:
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
    class Rank(OneProcess):
        def __init__(self, rank: int, world_size: int) -> None:
            super().__init__(tmp_path, torch.device("cpu"), 1)
            self.rank, self.world_size = rank, world_size

    for step in (1, 2, 3, 9):  # TRAIN_ROWS is no multiple of the batch: the third straddles two epochs
        alone = PackedSource(options, Rank(0, 1)).rows(step)
        shared = [PackedSource(options, Rank(rank, 4)).rows(step) for rank in range(4)]
        for name in COLUMNS:
            assert torch.equal(alone[name], torch.cat([batch[name] for batch in shared]))


def test_without_a_seed_rows_keep_their_order(packed: Path) -> None:
    rows = PackedRows(str(packed), "eval").read(0, EVAL_ROWS)
    assert [tuple(row) for row in rows["input_ids"].tolist()] == _rows(packed, "eval")


def test_data_without_evaluation_rows_is_no_error(packed: Path, tmp_path: Path) -> None:
    manifest = json.loads((packed / "manifest.json").read_text())
    manifest["eval"] = {"files": [], "rows": 0}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    assert len(PackedRows(str(tmp_path), "eval")) == 0


def test_missing_rows_are_refused(packed: Path, tmp_path: Path) -> None:
    shutil.copytree(packed, tmp_path, dirs_exist_ok=True)
    shutil.copy(tmp_path / "train/part-00001.parquet", tmp_path / "train/part-00000.parquet")
    with pytest.raises(settings.Refusal, match="run preprocess again"):
        PackedRows(str(tmp_path), "train")


# ------------------------------------------------------------------------------------------ the loop


def test_the_loss_falls_and_each_step_is_recorded_once(finetune: Finetune, options: DDPOptions) -> None:
    rows = finetune(steps=24)
    assert [row["step"] for row in rows] == list(range(1, 25))
    assert rows[-1]["loss"] < 0.8 * rows[0]["loss"]
    assert [row["step"] for row in rows if "eval_loss" in row] == [6, 12, 18, 24]
    assert all(row["tokens_per_s"] > 0 and row["grad_norm"] > 0 for row in rows)
    events = EventAccumulator(f"{options.output}/{options.name}/tensorboard").Reload()
    assert [event.value for event in events.Scalars("loss")] == pytest.approx([row["loss"] for row in rows])


def test_accumulated_micro_batches_equal_the_whole_batch(finetune: Finetune, model: Path, tmp_path: Path) -> None:
    still = _without_dropout(model, tmp_path / "model")
    whole = finetune(name="whole", model=still, micro_batch_rows=8)
    parts = finetune(name="parts", model=still, micro_batch_rows=1)
    assert [row["loss"] for row in parts] == pytest.approx([row["loss"] for row in whole], abs=1e-6)


def test_gradient_checkpointing_changes_no_number(finetune: Finetune) -> None:
    plain = finetune(name="plain")
    again = finetune(name="again", gradient_checkpointing=True)
    assert [row["loss"] for row in again] == pytest.approx([row["loss"] for row in plain], abs=1e-6)


def test_bf16_comes_close(finetune: Finetune, monkeypatch: pytest.MonkeyPatch, options: DDPOptions) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    full = finetune(name="full", steps=6)
    half = finetune(name="half", steps=6, precision="bf16")
    difference = max(abs(one["loss"] - other["loss"]) for one, other in zip(full, half, strict=True))
    assert 0 < difference < 5e-2
    trained = AutoModelForCausalLM.from_pretrained(f"{options.output}/half/model", dtype="auto")
    assert trained.dtype == torch.bfloat16


def test_bf16_falls_back_where_it_is_emulated(
    finetune: Finetune, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full = finetune(name="full", steps=3)
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    fallen = finetune(name="fallen", steps=3, precision="bf16")
    assert [row["loss"] for row in fallen] == [row["loss"] for row in full]
    assert "training in fp32" in capsys.readouterr().out


def test_a_resumed_run_repeats_every_bit(finetune: Finetune, options: DDPOptions) -> None:
    undisturbed = finetune(name="undisturbed")
    finetune(name="resumed", stop_after=7, checkpoint_every=5)  # in the middle of an epoch, past a checkpoint
    shutil.rmtree(Path(options.output) / "resumed/step-00000007")  # as if killed after step 7 ...
    with Path(options.output, "resumed/metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "lo')  # ... in the middle of a line
    resumed = finetune(name="resumed")
    for name in ("step", "loss", "lr", "grad_norm"):
        assert [row[name] for row in resumed] == [row[name] for row in undisturbed]
    weights = [
        AutoModelForCausalLM.from_pretrained(f"{options.output}/{name}/model").state_dict()
        for name in ("undisturbed", "resumed")
    ]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_finished_run_is_left_as_it_is(finetune: Finetune) -> None:
    assert finetune() == finetune()


def test_the_best_and_the_last_checkpoint_are_kept(finetune: Finetune, options: DDPOptions) -> None:
    rows = finetune(steps=60, learning_rate=0.1, checkpoint_every=10, eval_every=10)
    losses = {row["step"]: row["eval_loss"] for row in rows if "eval_loss" in row}
    best = min(losses, key=lambda step: losses[step])
    kept = {int(folder.name.removeprefix("step-")) for folder in Path(options.output, options.name).glob("step-*")}
    assert best != 60  # at this learning rate it overfits
    assert kept == {best, 60}


def test_a_run_that_is_asked_stops_with_a_checkpoint(finetune: Finetune, options: DDPOptions) -> None:
    class Asked(OneProcess):
        def should_stop(self) -> bool:
            return True

    undisturbed = finetune(name="undisturbed")
    stopped = finetune(Asked)
    assert [row["step"] for row in stopped] == [1, 2, 3]  # where the loop looks up, every log_every steps
    assert not Path(options.output, options.name, "model").exists()
    assert [row["loss"] for row in finetune()] == [row["loss"] for row in undisturbed]


def test_evaluation_equals_each_document_alone(finetune: Finetune, packed: Path, options: DDPOptions) -> None:
    """Perplexity by transformers' own loss over unpacked documents: packing and batching must not show."""
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


def test_the_model_folder_is_whole(finetune: Finetune, packed: Path, options: DDPOptions) -> None:
    finetune(steps=3)
    folder = Path(options.output, options.name, "model")
    assert (folder / "model.safetensors").exists()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == read_manifest(str(packed)).tokenizer.chat_template
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Name HTTP status code 404."}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    answer = AutoModelForCausalLM.from_pretrained(folder).generate(**prompt, max_new_tokens=3, do_sample=False)
    assert answer.shape[1] > prompt["input_ids"].shape[1]


def test_a_uri_holds_what_a_path_would(finetune: Finetune, options: DDPOptions, tmp_path: Path) -> None:
    undisturbed = finetune(name="undisturbed")
    remote = options.model_copy(update={"name": "remote", "output": f"file://{tmp_path}/bucket"})
    for stop in (6, 12):  # the second start finds what the first one left
        run = OneProcess(tmp_path / "checkpoints", torch.device("cpu"), 1)
        train(remote.model_copy(update={"stop_after": stop}), run, DDP)
    folder = tmp_path / "bucket/remote"
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["loss"] for line in lines] == [row["loss"] for row in undisturbed]
    assert (folder / "model/model.safetensors").exists()
    assert list((folder / "tensorboard").iterdir())


# ------------------------------------------------------------------------------------------ adapters


LORA = {"lora_rank": 4, "lora_alpha": 8, "lora_dropout": 0.1}


def test_lora_trains_adapters_and_merged_they_answer_alike(
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


# ------------------------------------------------------------------------------------------ what is refused


def test_a_loss_that_is_not_finite_stops_with_its_step(finetune: Finetune, model: Path, tmp_path: Path) -> None:
    broken = LlamaForCausalLM.from_pretrained(model)
    broken.lm_head.weight.data[0, 0] = math.inf
    broken.save_pretrained(tmp_path / "broken")
    with pytest.raises(settings.Refusal, match="the loss of step 1 is nan"):
        finetune(model=str(tmp_path / "broken"))
    assert not list((tmp_path / "finetune_ddp").glob("step-*"))


def test_a_full_disk_is_refused_before_writing(finetune: Finetune, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(2**30, 2**30, 2**10))
    with pytest.raises(settings.Refusal, match=r"no room for a checkpoint .* has 0 MiB left"):
        finetune()


def test_missing_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(settings.Refusal, match="inv submit preprocess"):
        read_manifest(str(tmp_path))


def test_rows_of_another_tokenizer_are_refused_by_both_names(
    options: DDPOptions, packed: Path, model: Path, tmp_path: Path
) -> None:
    shutil.copytree(model, tmp_path / "other")
    definition = json.loads((model / "tokenizer.json").read_text())
    definition["model"]["merges"].pop()
    (tmp_path / "other/tokenizer.json").write_text(json.dumps(definition))
    other = options.model_copy(update={"model": str(tmp_path / "other")})
    preflight.check_data(options, read_manifest(str(packed)))
    with pytest.raises(settings.Refusal, match=rf"{model}.*{tmp_path}/other"):
        preflight.check_data(other, read_manifest(str(packed)))


def test_a_model_that_does_not_fit_the_rows_is_refused(model: Path) -> None:
    config = preflight.load_config(str(model))
    preflight.check_model("m", config, config.vocab_size, 128)
    with pytest.raises(settings.Refusal, match=f"{config.vocab_size + 1} tokens"):
        preflight.check_model("m", config, config.vocab_size + 1, 128)
    with pytest.raises(settings.Refusal, match="reads 128 at most"):
        preflight.check_model("m", config, config.vocab_size, 129)


def test_a_model_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(settings.Refusal, match="cannot be loaded"):
        preflight.load_config(str(tmp_path / "nothing"))


def test_a_run_goes_on_only_as_it_began(options: DDPOptions, model: Path, tmp_path: Path) -> None:
    config = preflight.load_config(str(model))
    begun = preflight.identify(options, config, "rows")
    preflight.claim(options, begun)
    preflight.claim(options.model_copy(update={"log_every": 1, "num_workers": 4}), begun)  # changes no number

    wider = LlamaConfig(**{**config.to_dict(), "hidden_size": 64})
    for other in (
        preflight.identify(options, wider, "rows"),
        preflight.identify(options, config, "other rows"),
        preflight.identify(options.model_copy(update={"learning_rate": 0.5}), config, "rows"),
    ):
        with pytest.raises(settings.Refusal, match=r"was begun with (model|data|learning_rate) = .*--fresh"):
            preflight.claim(options, other)
    (tmp_path / options.name / "step-00000001").mkdir()
    preflight.claim(options.model_copy(update={"fresh": True}), other)
    assert [file.name for file in (tmp_path / options.name).iterdir()] == ["run.json"]


@pytest.mark.parametrize(
    "wrong",
    [{"device": "cuda"}, {"name": "../elsewhere"}, {"global_batch_rows": 0}, {"learning_rate": -1.0}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_wrong_options_are_refused(options: DDPOptions, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        DDPOptions.model_validate(options.model_dump() | wrong)


# ------------------------------------------------------------------------------------------ settings and shape


@pytest.mark.parametrize("profile", settings.PROFILES)
def test_both_profiles_hold_valid_options_that_divide(profile: str) -> None:
    for options_type, sections in ((DDPOptions, ["train"]), (DeepSpeedOptions, ["train", "deepspeed"])):
        options = settings.load(options_type, *sections, profile=profile)
        arithmetic.plan_batches(options.global_batch_rows, options.micro_batch_rows, options.num_workers)


def test_the_deepspeed_config_takes_what_the_settings_say() -> None:
    text = finetune_deepspeed.CONFIG.read_text()
    assert '"auto"' not in text
    options = settings.load(DeepSpeedOptions, "train", "deepspeed", profile="local")
    options = options.model_copy(update={"zero_stage": 3, "offload_parameters": True, "max_grad_norm": 0.5})
    config = fill_config(json.loads(text), options, arithmetic.BatchPlan(rows_per_rank=8, accumulation=2))
    assert config["zero_optimization"]["stage"] == 3
    assert config["zero_optimization"]["offload_param"]["device"] == "cpu"
    assert "offload_optimizer" not in config["zero_optimization"]
    assert config["gradient_accumulation_steps"] == 2
    assert config["gradient_clipping"] == 0.5


def test_offloaded_parameters_need_stage_3() -> None:
    options = settings.load(DeepSpeedOptions, "train", "deepspeed", profile="local")
    with pytest.raises(ValidationError, match="zero_stage = 3"):
        DeepSpeedOptions.model_validate(options.model_dump() | {"offload_parameters": True, "zero_stage": 2})


def test_the_loop_runs_where_ray_is_absent() -> None:
    code = (
        "import sys; sys.modules['ray'] = None; import jobs.training.loop, jobs.training.zero, jobs.training.preflight"
    )
    environment = os.environ | {"PYTHONPATH": str(settings.PROJECT)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


# ------------------------------------------------------------------------------------------ helpers


def _without_dropout(model: Path, folder: Path) -> str:
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.0}))
    return str(folder)


def _documents_in(rows: pa.Table) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Token ids and labels of each document, cut out where positions restart."""
    documents = []
    for row in rows.to_pylist():
        starts = [at for at, position in enumerate(row["position_ids"]) if position == 0]
        for start, end in pairwise([*starts, len(row["input_ids"])]):
            labels = torch.tensor(row["labels"][start:end])
            if (labels != NOT_TRAINED).any():
                documents.append((torch.tensor(row["input_ids"][start:end]), labels))
    return documents
