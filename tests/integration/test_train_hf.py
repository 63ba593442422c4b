"""Test the job with transformers' Trainer on the shared Ray instance, and compare it with the project's own trainer."""

import json
import os
import signal
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import packed_rows
import pytest
import ray
import ray.train
import torch
from accelerate import DistributedType, PartialState
from pyarrow.fs import FileSystem, copy_files
from ray.train import WorkerGroupError
from transformers import AutoModelForCausalLM, AutoTokenizer

from jobs import train_hf
from raymill import settings
from raymill.errors import UserError
from raymill.training import history, preflight, report
from raymill.training.ddp import DDP
from raymill.training.hf_trainer import RunCallback
from raymill.training.options import DDPOptions, HFOptions, TrainOptions
from raymill.training.runtimes.runtime import SingleProcess
from raymill.training.trainer import train

TOLERANCE = 1e-5
CHANGES = {
    "steps": 6,
    "warmup_steps": 2,
    "global_batch_rows": 8,
    "micro_batch_rows": 2,
    "checkpoint_every": 2,
    "eval_every": 2,
    "log_every": 1,
    "learning_rate": 1e-3,
}
ZERO_2 = {"zero_optimization": {"stage": 2}}
ZERO_3 = {"zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}}

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import test modules

Row = dict[str, float]


@pytest.fixture(scope="module")
def changes(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return changes to the settings of the local profile: a small model, packed rows and a few steps."""
    folder = tmp_path_factory.mktemp("hf")
    model = packed_rows.write_model(folder / "model", assets)
    published = {"temperature": 0.6}  # without do_sample; save_pretrained would refuse it
    (model / "generation_config.json").write_text(json.dumps(published))
    (folder / "packed").mkdir()
    packed_rows.write(folder / "packed", packed_rows.tokenize(assets, model, 128), model, 128, [20, 15], 7)
    return CHANGES | {"model": str(model), "data": str(folder / "packed"), "output": str(folder / "runs")}


@pytest.fixture(scope="module")
def uploads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a file for each folder that a worker uploads during the run of the fixture `two`."""
    return tmp_path_factory.mktemp("uploads")


@pytest.fixture(scope="module")
def two(ray_session: None, changes: dict[str, Any], uploads: Path) -> HFOptions:
    """Train with two workers. Return the options."""
    options = _options(changes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_hf, "train", partial(_train_and_record, uploads))
        train_hf.main(options)
    return options


@pytest.fixture(scope="module")
def own(changes: dict[str, Any]) -> DDPOptions:
    """Train with the project's own trainer in this process. Return the options."""
    options = settings.load(DDPOptions, "train", profile="local").model_copy(update=changes | {"name": "own"})
    preflight.claim(options, preflight.check_packed(options))
    train(options, SingleProcess(_folder(options), torch.device("cpu"), options.keep_checkpoints), DDP)
    return options


def test_two_workers_have_the_numbers_of_our_trainer(two: HFOptions, own: DDPOptions) -> None:
    _assert_same_numbers(two, own)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({"deepspeed": ZERO_2}, "zero_pp_rank_1_mp_rank_00_optim_states.pt"),
        ({"deepspeed": ZERO_3}, "zero_pp_rank_1_mp_rank_00_model_states.pt"),
        ({"fsdp": True, "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}}, "__1_0.distcp"),
    ],
    ids=["zero 2", "zero 3", "fsdp"],
)
@pytest.mark.usefixtures("ray_session")
def test_sharded_workers_have_the_numbers_of_our_trainer(
    arguments: dict[str, Any], part: str, own: DDPOptions, changes: dict[str, Any], tmp_path: Path
) -> None:
    """One of the workers dies. `part` is a file of a checkpoint that only the second worker writes."""
    options = _options(changes | {"output": str(tmp_path), "arguments": arguments})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_hf, "train", partial(_train_and_die, tmp_path, {5}))
        train_hf.main(options)
    run = history.read(options.output, options.name)
    assert run
    assert run.restarts == [4]
    _assert_same_numbers(options, own)
    assert list(_checkpoints(options)[-1].rglob(part))


def test_each_file_is_uploaded_once(two: HFOptions, uploads: Path) -> None:
    written = [json.loads(file.read_text()) for file in uploads.iterdir()]
    for checkpoint in ("step-00000002", "step-00000004", "step-00000006"):
        files = Counter(name for upload in written if upload["checkpoint"] == checkpoint for name in upload["files"])
        assert set(files.values()) == {1}
        assert {"model.safetensors", "optimizer.pt", "rng_state_0.pth", "rng_state_1.pth"} <= files.keys()
    stored = _folder(two) / "step-00000006"
    assert {file.name for file in stored.iterdir() if not file.name.startswith(".")} == files.keys()
    assert len(written) == 6


def test_the_best_and_the_last_checkpoints_are_kept(two: HFOptions) -> None:
    assert len(_checkpoints(two)) == two.keep_checkpoints
    assert _checkpoints(two)[-1].name == "step-00000006"


def test_stock_transformers_load_the_trained_model(two: HFOptions, own: DDPOptions) -> None:
    model, trained = (AutoModelForCausalLM.from_pretrained(folder) for folder in (_model(two), _checkpoints(two)[-1]))
    tokens = torch.arange(64)[None]
    assert torch.equal(model(tokens).logits, trained(tokens).logits)
    assert AutoTokenizer.from_pretrained(_model(two)).chat_template.endswith("{# as preprocessed #}")
    for file in ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"):
        assert (_model(two) / file).read_text() == (_model(own) / file).read_text()


def test_the_report_shows_the_run(two: HFOptions, own: DDPOptions) -> None:
    runs = history.read_all(two.output, [two.name, own.name])
    shown, other = report.summarize(runs, lambda *_: None)
    assert report.page(runs, [shown, other], two.output)
    for column in ("steps", "loss", "best evaluation", "restarts"):
        assert shown[column] == other[column]
    assert shown["strategy"] == "transformers, ddp, fp32"
    assert runs[0].checkpoints == [2, 4, 6]


def test_a_run_resumes_after_deaths_and_damage(
    two: HFOptions, changes: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = _options(changes | {"output": str(tmp_path / "runs"), "max_failures": 1})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_hf, "train", partial(_train_and_die, tmp_path, {3, 5}))
        with pytest.raises(WorkerGroupError):
            train_hf.main(options)  # the worker dies after step 3, is replaced, and dies after step 5
        damaged = _checkpoints(options)[-1] / "model.safetensors"
        content = bytearray(damaged.read_bytes())
        content[-4:] = b"\0\0\0\0"  # the size stays the same
        damaged.write_bytes(content)
        train_hf.main(options)
    run = history.read(options.output, options.name)
    assert run
    assert damaged.parent.name == "step-00000004"
    assert run.restarts[:2] == [2, 2]
    numbers = ("step", "loss", "grad_norm", "lr")
    for row, expected in zip(_metrics(options), _metrics(two), strict=True):
        assert [row.get(name) for name in numbers] == [expected.get(name) for name in numbers]
    assert (_model(options) / "model.safetensors").read_bytes() == (_model(two) / "model.safetensors").read_bytes()


@pytest.mark.nightly
@pytest.mark.usefixtures("ray_session")
def test_a_run_in_a_bucket_resumes(s3: str, own: DDPOptions, changes: dict[str, Any], tmp_path: Path) -> None:
    options = _options(changes | {"output": f"{s3}/hf"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_hf, "train", partial(_train_and_die, tmp_path, {3}))
        train_hf.main(options)
    run = history.read(options.output, options.name)
    assert run
    assert run.restarts == [2]
    files, path = FileSystem.from_uri(f"{options.output}/{options.name}")
    copy_files(path, str(tmp_path / "copy"), source_filesystem=files)
    _assert_same_numbers(options.model_copy(update={"output": str(tmp_path), "name": "copy"}), own)


def test_a_spot_notice_saves_a_checkpoint_at_once(changes: dict[str, Any], tmp_path: Path) -> None:
    options = _options(changes | {"output": str(tmp_path / "runs"), "checkpoint_every": 5})
    runtime = _Noticed(_folder(options), torch.device("cpu"), 9)
    runtime.scratch = tmp_path / "scratch"
    train_hf.fine_tune(options, runtime)
    assert [folder.name for folder in _checkpoints(options)] == ["step-00000003", "step-00000005", "step-00000006"]


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"arguments": {"lerning_rate": 1}}, r"lerning_rate: no such key\. Did you mean learning_rate\? Use the names"),
        ({"arguments": {"learning_rate": 1}}, r"cannot have learning_rate, because the job sets it from the options"),
        ({"arguments": {"deepspeed": {}}, "micro_batch_rows": 3}, "not a multiple of num_workers x micro_batch_rows"),
        ({"arguments": {"save_steps": 1, "save_strategy": "steps"}}, "cannot have save_strategy"),
    ],
)
def test_wrong_arguments_are_refused(changed: dict[str, Any], sentence: str, changes: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=sentence):
        train_hf.main(_options(changes | changed))


@pytest.mark.parametrize("profile", settings.PROFILES)
def test_both_profiles_hold_valid_options(profile: str) -> None:
    options = settings.load(HFOptions, "train", "hf", profile=profile)
    assert options.name == "train_hf"
    with pytest.raises(ValueError, match="train_hf cannot use lora_rank = 8; remove it, or use finetune_ddp"):
        HFOptions.model_validate(options.model_dump() | {"lora_rank": 8})


def _options(changes: dict[str, Any]) -> HFOptions:
    return settings.load(HFOptions, "train", "hf", profile="local").model_copy(update=changes)


def _folder(options: TrainOptions) -> Path:
    return Path(options.output, options.name)


def _model(options: TrainOptions) -> Path:
    return _folder(options) / "model"


def _checkpoints(options: TrainOptions) -> list[Path]:
    return sorted(_folder(options).glob("step-*"))


def _metrics(options: TrainOptions) -> list[Row]:
    return [json.loads(line) for line in (_folder(options) / "metrics.jsonl").read_text().splitlines()]


def _assert_same_numbers(one: TrainOptions, other: TrainOptions) -> None:
    for name in ("step", "loss", "grad_norm", "lr", "eval_loss", "eval_perplexity"):
        numbers, expected = ([row[name] for row in _metrics(options) if name in row] for options in (one, other))
        assert numbers == pytest.approx(expected, rel=TOLERANCE), name
    models = [AutoModelForCausalLM.from_pretrained(_model(options)) for options in (one, other)]
    for weights, others in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(weights, others, atol=TOLERANCE, rtol=0)


def _train_and_record(folder: Path, options: HFOptions) -> str | None:
    """Train in a worker, and record the files of each folder that it uploads."""
    context = ray.train.get_context()
    storage = type(context.get_storage())
    upload = storage.persist_current_checkpoint

    def record(self: Any, checkpoint: Any, name: str) -> Any:
        files = [str(file.relative_to(checkpoint.path)) for file in Path(checkpoint.path).rglob("*") if file.is_file()]
        record = folder / f"{name}-{context.get_world_rank()}"
        record.write_text(json.dumps({"checkpoint": name, "files": files}))
        return upload(self, checkpoint, name)

    storage.persist_current_checkpoint = record
    return train_hf.train(options)


def _train_and_die(folder: Path, steps: set[int], options: HFOptions) -> str | None:
    """Train in a worker. Rank 1 dies once after each of these steps."""
    continues = RunCallback.on_step_end

    def on_step_end(self: RunCallback, args: Any, state: Any, control: Any, **others: Any) -> None:
        marker = folder / f"died-{state.global_step}"
        if self.runtime.rank == 1 and state.global_step in steps and not marker.exists():
            ray.train.get_all_reported_checkpoints()  # waits until the list of checkpoints has the last one
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        continues(self, args, state, control, **others)

    if "fsdp" in options.arguments:
        _allow_fsdp_on_cpus()
    RunCallback.on_step_end = on_step_end
    return train_hf.train(options)


def _allow_fsdp_on_cpus() -> None:
    """Tell Accelerate that the CPUs of this process are GPUs, because it shards models only on GPUs."""
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    gpus = ("gloo", DistributedType.MULTI_GPU)
    pytest.MonkeyPatch().setattr(PartialState, "_prepare_backend", lambda *_: gpus)


class _Noticed(SingleProcess):
    """Gets a spot notice before step 3."""

    calls = 0

    def should_save(self) -> bool:
        self.calls += 1
        return self.calls == 3
