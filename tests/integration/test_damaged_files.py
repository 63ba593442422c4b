"""Test that files which a crash left empty, cut off or full of zeros give a value, one sentence or an older state."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import full_disk
import packed_rows
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter

from raymill import settings
from raymill.aws import capacity_blocks
from raymill.common import cluster_file
from raymill.data import shards
from raymill.data.packed_folder import PackedFolder
from raymill.errors import UserError
from raymill.evaluation import candidates
from raymill.generation.answer_folder import AnswerFolder
from raymill.local import state as local_state
from raymill.node import gpu_use, head_status, watchdog_head
from raymill.ray_support.private.train import LIST_OF_CHECKPOINTS
from raymill.training import checkpoint_check, history, preflight
from raymill.training.dataset import PackedRows, read_manifest
from raymill.training.ddp import DDP
from raymill.training.options import DDPOptions
from raymill.training.runtimes import ray_train
from raymill.training.runtimes.runtime import SingleProcess
from raymill.training.storage import RunFolder
from raymill.training.trackers import Trackers
from raymill.training.trainer import train
from raymill.tuning import trials
from raymill.tuning.trials import Trial

SEQUENCE_LENGTH = 64


def _zero_the_middle(content: bytes) -> bytes:
    """Return the content with zeros in the second quarter, which holds values in files of tensors."""
    quarter = len(content) // 4
    return content[:quarter] + bytes(quarter) + content[2 * quarter :]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "cut off": lambda content: content[: len(content) // 2],
    "zeros": lambda content: bytes(len(content)),
    "zeros in the middle": _zero_the_middle,
    "no text": lambda content: b"\xff" * len(content),
    "another value": lambda content: b"null",
}
SAME_SIZE = ("zeros", "zeros in the middle", "no text")


def _damage(file: Path, damage: str) -> None:
    file.write_bytes(DAMAGE[damage](file.read_bytes()))


@pytest.fixture(scope="module")
def model(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed_rows.write_model(tmp_path_factory.mktemp("model"), assets)


@pytest.fixture(scope="module")
def written(model: Path, assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with packed rows."""
    folder = tmp_path_factory.mktemp("packed")
    documents = packed_rows.tokenize(assets, model, SEQUENCE_LENGTH)
    packed_rows.write(folder, documents, model, SEQUENCE_LENGTH, train=[13, 8], evaluated=5)
    return folder


@pytest.fixture
def packed(written: Path, tmp_path: Path) -> Path:
    """Return a copy of the packed rows that a test may damage."""
    return Path(shutil.copytree(written, tmp_path / "packed"))


@pytest.fixture
def options(model: Path, packed: Path, tmp_path: Path) -> DDPOptions:
    names = {"model": model, "data": packed, "output": tmp_path / "runs", "mlflow": "", "wandb": ""}
    sizes = {"steps": 6, "checkpoint_every": 2, "eval_every": 2, "keep_checkpoints": 3, "log_every": 2}
    loaded = settings.load(DDPOptions, "train", profile="local")
    return loaded.model_validate(loaded.model_dump() | {name: str(path) for name, path in names.items()} | sizes)


def _train(options: DDPOptions) -> None:
    runtime = SingleProcess(Path(options.output, options.name), torch.device("cpu"), options.keep_checkpoints)
    train(options, runtime, DDP)


# ------------------------------------------------------------------------------------------ checkpoints


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint with the files of all strategies."""
    folder = tmp_path_factory.mktemp("step-00000006")
    torch.manual_seed(0)
    values = {name: torch.rand(5000) for name in ("a", "b")}
    (folder / "zero").mkdir()
    for name in ("ddp.pt", "random-00000.pt", "zero/mp_rank_00_model_states.pt"):
        torch.save(values, folder / name)
    dcp.save(dict(values), storage_writer=FileSystemWriter(folder / "fsdp", single_file_per_rank=True), no_dist=True)
    (folder / "state.json").write_text('{"step": 6, "world_size": 1}')
    (folder / "files-00000.json").write_text(json.dumps(checkpoint_check.sizes(folder)))
    assert checkpoint_check.first_problem(folder, rank=0, world_size=1) == ""
    return folder


TENSORS = ["ddp.pt", "random-00000.pt", "zero/mp_rank_00_model_states.pt", "fsdp/__0_0.distcp"]


@pytest.mark.parametrize("damage", SAME_SIZE)
@pytest.mark.parametrize("name", [*TENSORS, "fsdp/.metadata"])
def test_a_file_of_the_right_size_with_wrong_content_is_noticed(
    complete: Path, tmp_path: Path, name: str, damage: str
) -> None:
    folder = Path(shutil.copytree(complete, tmp_path / "step"))
    _damage(folder / name, damage)
    found = checkpoint_check.first_problem(folder, rank=0, world_size=1)
    assert re.fullmatch(r"\S+ is damaged", found)
    if name != "fsdp/.metadata":  # without it, the other files cannot be checked
        assert found.startswith(name)


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", ["state.json", "files-00000.json"])
def test_a_damaged_description_of_a_checkpoint_is_noticed(
    complete: Path, tmp_path: Path, name: str, damage: str
) -> None:
    folder = Path(shutil.copytree(complete, tmp_path / "step"))
    _damage(folder / name, damage)
    assert checkpoint_check.first_problem(folder, rank=0, world_size=1) == f"{name} is damaged"


def test_ranks_share_the_files_to_check(complete: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(complete, tmp_path / "step"))
    for name in TENSORS[:2]:
        _damage(folder / name, "zeros")
    found = {checkpoint_check.first_problem(folder, rank, world_size=6) for rank in range(6)}
    assert found == {"", *(f"{name} is damaged" for name in TENSORS[:2])}


def test_a_run_resumes_from_the_last_checkpoint_that_is_not_damaged(
    options: DDPOptions, capsys: pytest.CaptureFixture[str]
) -> None:
    _train(options.model_copy(update={"name": "undisturbed"}))
    _train(options)
    run = Path(options.output, options.name)
    shutil.rmtree(run / "model")
    _damage(run / "step-00000006/state.json", "empty")
    _damage(run / "step-00000004/ddp.pt", "zeros in the middle")
    _damage(run / "step-00000002/metrics.json", "cut off")  # read to find the best checkpoint
    _train(options)
    printed = capsys.readouterr().out
    assert "skipping the incomplete checkpoint step-00000006: state.json is damaged" in printed
    assert "skipping the incomplete checkpoint step-00000004: ddp.pt is damaged" in printed
    assert "resumed after step 2" in printed
    weights = [Path(options.output, name, "model/model.safetensors") for name in ("undisturbed", options.name)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


# ------------------------------------------------------------------------------------------ packed rows


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_manifest_gives_one_sentence(packed: Path, damage: str) -> None:
    _damage(packed / "manifest.json", damage)
    with pytest.raises(UserError, match=r"manifest.json is damaged, .*\. Run: inv submit preprocess"):
        read_manifest(str(packed))


@pytest.mark.parametrize("damage", [name for name in DAMAGE if name != "another value"])
def test_preprocess_replaces_a_damaged_data_set_only_with_overwrite(packed: Path, damage: str) -> None:
    output = PackedFolder(str(packed))
    _damage(packed / "manifest.json", damage)
    assert not output.is_complete({})
    with pytest.raises(UserError, match=r"manifest.json is damaged; pass --overwrite"):
        output.begin(overwrite=False)
    output.begin(overwrite=True)
    assert not (packed / "train").exists()


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_shard_is_named_instead_of_trained(packed: Path, damage: str) -> None:
    shard = packed / "train/part-00001.parquet"
    _damage(shard, damage)
    with pytest.raises(UserError, match=rf"{shard} is damaged and cannot be read \(.*\)\. Run: inv submit preprocess"):
        PackedRows(str(packed), "train").read(0, 21)


def test_zeros_anywhere_in_the_values_of_a_shard_are_noticed(packed: Path, model: Path, assets: Path) -> None:
    """Without checksums, some damaged pages decode to other tokens."""
    documents = packed_rows.tokenize(assets, model, SEQUENCE_LENGTH).slice(0, 300)
    plan = shards.ShardPlan(str(packed), SEQUENCE_LENGTH, eval_share=0.0, seed=0, partitions=1)
    summary = shards._write_shard(documents, plan, 0, "train/part-00000.parquet")
    assert summary
    manifest = json.loads((packed / "manifest.json").read_text())
    manifest["train"] = {"files": [{"name": summary.name, "rows": summary.rows}], "rows": summary.rows}
    (packed / "manifest.json").write_text(json.dumps(manifest))
    shard = packed / "train" / summary.name
    content = shard.read_bytes()
    group = pq.read_metadata(shard).row_group(0)
    values = sum(group.column(number).total_compressed_size for number in range(group.num_columns))
    for start in range(4, values - 16, values // 40):
        shard.write_bytes(content[:start] + bytes(2) + content[start + 2 :])
        if shard.read_bytes() != content:
            with pytest.raises(UserError, match="is damaged"):
                PackedRows(str(packed), "train").read(0, summary.rows)


def test_a_missing_shard_is_named(packed: Path) -> None:
    (packed / "eval/part-00000.parquet").unlink()
    with pytest.raises(UserError, match=r"eval/part-00000.parquet is missing\. Run: inv submit preprocess"):
        PackedRows(str(packed), "eval")


# ------------------------------------------------------------------------------------------ runs and searches


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_run_with_a_damaged_identity_is_not_resumed(options: DDPOptions, damage: str) -> None:
    identity = preflight.identify(options, preflight.load_config(options.model), "rows")
    preflight.claim(options, identity)
    file = Path(options.output, options.name, "run.json")
    _damage(file, damage)
    with pytest.raises(UserError, match=rf"{file} is damaged, .* delete this file .*--fresh"):
        preflight.claim(options, identity)
    file.unlink()
    preflight.claim(options, identity)
    assert json.loads(file.read_text()) == identity


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_list_of_checkpoints_gives_one_sentence(options: DDPOptions, damage: str) -> None:
    """Ray Train would stop with a decoder's error; without the list, the run would delete its checkpoints."""
    ray_train.check_list_of_checkpoints(options)  # a new run has none
    file = Path(options.output, options.name, LIST_OF_CHECKPOINTS)
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"checkpoint_results": []}))
    ray_train.check_list_of_checkpoints(options)
    _damage(file, damage)
    with pytest.raises(UserError, match=rf"{file} is damaged, .*\. Ray Train finds no checkpoint .*--fresh"):
        ray_train.check_list_of_checkpoints(options)


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", ["run.json", "data.json"])
def test_the_report_names_a_damaged_file_of_a_run(tmp_path: Path, name: str, damage: str) -> None:
    _write_run(tmp_path)
    _damage(tmp_path / "run" / name, damage)
    with pytest.raises(UserError, match=rf"run/{name} is damaged, .*\. Delete that file"):
        history.read_all(str(tmp_path), [])


def test_the_report_skips_damaged_lines(tmp_path: Path) -> None:
    _write_run(tmp_path)
    events, metrics = (tmp_path / "run" / name for name in ("events.jsonl", "metrics.jsonl"))
    events.write_bytes(b'\0\0\xff\n{"event": "checkpoint", "step": 1, "time": 0}\n' + events.read_bytes())
    metrics.write_bytes(metrics.read_bytes() + b"\0\0\xff")
    [run] = history.read_all(str(tmp_path), [])
    assert ([row["step"] for row in run.rows], len(run.attempts)) == ([1], 1)
    _damage(events, "zeros")
    with pytest.raises(UserError, match="no runs with logged steps"):
        history.read_all(str(tmp_path), [])


def _write_run(output: Path) -> None:
    (output / "run").mkdir()
    lines: dict[str, dict[str, Any]] = {
        "run.json": {"model": "a model", "steps": 1},
        "data.json": {"content_hash": "0", "sequence_length": SEQUENCE_LENGTH},
        "events.jsonl": {"event": "start", "step": 0, "time": 0},
        "metrics.jsonl": {"step": 1, "loss": 2.0, "time": 1},
    }
    for name, line in lines.items():
        (output / "run" / name).write_text(json.dumps(line) + "\n")


def test_a_run_with_a_damaged_list_of_trackers_is_a_new_run_there(
    options: DDPOptions, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tracked = options.model_copy(update={"mlflow": str(tmp_path / "nowhere\0")})  # this tracker fails at once
    folder = RunFolder(str(tmp_path / "run"))
    (folder.path / "trackers.json").write_text('{"mlflow": ')
    Trackers(tracked, folder)
    assert "trackers.json is damaged, so this run appears as a new one in mlflow" in capsys.readouterr().out


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_list_of_trials_gives_one_sentence(tmp_path: Path, damage: str) -> None:
    trials.save(str(tmp_path), [Trial("trial-01", {"learning_rate": 0.1}, "all steps")])
    assert [trial.ended for trial in trials.load(str(tmp_path), [{"learning_rate": 0.1}])] == ["all steps"]
    _damage(tmp_path / "trials.json", damage)
    with pytest.raises(UserError, match=r"trials.json is damaged, .*\. Delete this file"):
        trials.load(str(tmp_path), [{"learning_rate": 0.1}])


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_adapters_are_not_evaluated(tmp_path: Path, damage: str) -> None:
    file = tmp_path / "adapter_config.json"
    file.write_text('{"base_model_name_or_path": "owner/name"}')
    assert candidates.find(str(tmp_path)).model == "owner/name"
    _damage(file, damage)
    with pytest.raises(UserError, match=r"adapter_config.json is damaged, .*\. Train them again"):
        candidates.find(str(tmp_path))


# ------------------------------------------------------------------------------------------ answers

RECIPE = {"model": "a model", "max_tokens": 10}


@pytest.fixture
def answers(tmp_path: Path) -> AnswerFolder:
    """Return a folder with two files of answers, to the rows `a` and `b`."""
    folder = AnswerFolder(str(tmp_path / "answers"))
    folder.begin(RECIPE, overwrite=False)
    for row in ("a", "b"):
        folder.save_answers(pa.table({"id": [row], "answer": [f"the answer to {row}" * 100]}))
    assert folder.begin(RECIPE, overwrite=False).keys() == {"a", "b"}
    return folder


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_recipe_gives_one_sentence(answers: AnswerFolder, damage: str) -> None:
    _damage(Path(answers.uri, "recipe.json"), damage)
    with pytest.raises(UserError, match=r"recipe.json is damaged, .*\. Pass --overwrite, or another"):
        answers.begin(RECIPE, overwrite=False)
    assert answers.begin(RECIPE, overwrite=True) == {}


@pytest.mark.parametrize("damage", DAMAGE)
def test_rows_with_damaged_answers_are_answered_again(
    answers: AnswerFolder, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {pq.read_table(file)["id"][0].as_py(): file for file in Path(answers.uri, "answers").iterdir()}
    _damage(files["b"], damage)
    assert answers.begin(RECIPE, overwrite=False).keys() == {"a"}
    assert re.search(
        rf"{files['b']} is damaged and cannot be read \(.*\)\. Its rows are answered again", capsys.readouterr().out
    )
    assert list(Path(answers.uri, "answers").iterdir()) == [files["a"]]


# ------------------------------------------------------------------------------------------ clusters


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_state_of_the_local_cluster_gives_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    monkeypatch.setattr(local_state, "STATE_FILE", tmp_path / "local.json")
    local_state.write({"id": "0"})
    assert local_state.read() == {"id": "0"}
    _damage(tmp_path / "local.json", damage)
    with pytest.raises(UserError, match=r"local.json is damaged, .*\. Run: rm .*local.json"):
        local_state.read()


def test_a_full_disk_keeps_the_state_of_the_local_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_state, "STATE_FILE", tmp_path / "local.json")
    local_state.write({"id": "0"})
    full_disk.fill(monkeypatch, tmp_path / "local.json")
    with pytest.raises(OSError, match="No space left"):
        local_state.write({"id": "0", "session": 1})
    assert local_state.read() == {"id": "0"}
    assert [file.name for file in tmp_path.iterdir()] == ["local.json"]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_node_starts_with_a_damaged_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    """Otherwise the watchdog would not start, and its cluster would end with the lease."""
    watchdog, gpus, notices = tmp_path / "watchdog.json", tmp_path / "gpus.json", []
    monkeypatch.setattr(head_status.state, "STATE_FILE", watchdog)
    monkeypatch.setattr(gpu_use, "LAST_FILE", gpus)
    monkeypatch.setattr(watchdog_head.notices, "send", notices.append)
    for file in (watchdog, gpus):
        file.write_text(json.dumps({"at": 0, "dollars": 5.0}))
        _damage(file, damage)
    restarted = watchdog_head.HeadWatchdog(cluster_file.load())
    assert restarted._messages[0].endswith(notices[0])
    assert "watchdog.json was damaged, so the limit in dollars counts only the instances that still run" in notices[0]
    assert not head_status._watchdog()["runs"]
    assert gpu_use.last() == []


@pytest.mark.parametrize("damage", DAMAGE)
def test_after_a_damaged_search_nothing_is_bought(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    monkeypatch.setattr(capacity_blocks, "OFFERINGS", tmp_path / "offerings.json")
    (tmp_path / "offerings.json").write_text('[{"id": "cb-0"}]')
    _damage(tmp_path / "offerings.json", damage)
    with pytest.raises(UserError, match=r"is not an offering of the last search\. Search again"):
        capacity_blocks.buy(cluster_file.load(), "cb-0", yes=True)
