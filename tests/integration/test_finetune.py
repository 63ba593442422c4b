"""Test fine-tuning with Ray Train on the shared Ray instance: strategies agree, and a killed worker changes no loss."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dashboards
import psutil
import pytest
import ray
import torch
from processes import children
from ray.cluster_utils import Cluster
from ray.exceptions import RayTaskError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from jobs import finetune_ddp, finetune_deepspeed, finetune_fsdp, preprocess
from raymill import settings
from raymill.data import preprocessing, row_sources, streaming
from raymill.data.options import PreprocessOptions
from raymill.data.row_formats import FORMATS, Format
from raymill.data.tokenization import DocumentTokenizer
from raymill.errors import UserError
from raymill.training import launch
from raymill.training.collectives import total
from raymill.training.ddp import DDP
from raymill.training.options import DDPOptions, DeepSpeedOptions, FSDPOptions, TrainOptions
from raymill.training.runtimes import ray_train
from raymill.training.runtimes.runtime import Runtime, SingleProcess
from raymill.training.schedule import BatchPlan
from raymill.training.trainer import train

STEPS = 30  # the first steps of the local profile's schedule, which the demo uses
KILL_AFTER_STEP = 15
TOLERANCE, ELASTIC = 1e-5, 1e-4

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import test modules

pytestmark = pytest.mark.usefixtures("ray_session")

Row = dict[str, float]


@pytest.fixture(scope="module")
def changes(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return changes to the settings of the local profile: data from `preprocess`, and a stop after 30 steps."""
    data = tmp_path_factory.mktemp("packed") / "rows"
    options = settings.load(PreprocessOptions, "preprocess", profile="local")
    paths = {"input": str(assets / "data/*.jsonl"), "output": str(data), "model": str(assets / "model")}
    preprocess.main(options.model_copy(update=paths))
    return {
        "model": str(assets / "model"),
        "data": str(data),
        "output": str(tmp_path_factory.mktemp("runs")),
        "stop_after": STEPS,
        "checkpoint_every": 10,
    }


@pytest.fixture(scope="module")
def exported() -> set[str]:
    """Return the names of the metrics that Ray exported during the run of the fixture `ddp`."""
    return set()


@pytest.fixture(scope="module")
def ddp(changes: dict[str, Any], exported: set[str]) -> list[Row]:
    """Return the metrics of a DDP run without failures."""
    options, over = _ddp_options(changes), threading.Event()

    def collect() -> None:
        while not over.wait(0.5):
            exported.update(dashboards.exported())

    collector = threading.Thread(target=collect)
    collector.start()
    try:
        finetune_ddp.main(options)
    finally:
        over.set()
        collector.join()
    return _metrics(options)


@pytest.mark.usefixtures("ddp")
def test_a_run_exports_the_metrics_of_the_training_board(exported: set[str]) -> None:
    only_with_gpus = {name for name in dashboards.shown("training") if re.search("gpus|gram|mfu", name)}
    assert len(only_with_gpus) == 3
    assert dashboards.shown("training") - only_with_gpus <= exported


def test_two_workers_have_the_losses_of_one_process(ddp: list[Row], changes: dict[str, Any]) -> None:
    options = _ddp_options(changes | {"name": "alone"})
    train(options, SingleProcess(_folder(options), torch.device("cpu"), options.keep_checkpoints), DDP)
    assert [row["step"] for row in ddp] == list(range(1, STEPS + 1))
    assert [row["loss"] for row in ddp] == pytest.approx([row["loss"] for row in _metrics(options)], abs=TOLERANCE)
    assert ddp[-1]["loss"] < 0.8 * ddp[0]["loss"]


@pytest.mark.usefixtures("ddp")
def test_a_run_does_not_resume_with_another_loss(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(DDP): ...

    monkeypatch.setattr(finetune_ddp, "STRATEGY", Mine)
    with pytest.raises(UserError, match=r"was started with code of the strategy = the library's, not Mine \("):
        finetune_ddp.main(_ddp_options(changes))


@pytest.mark.nightly  # because it takes 80 s; test_parity compares them without Ray
def test_zero_and_fsdp_agree_with_ddp(ddp: list[Row], changes: dict[str, Any]) -> None:
    """Here, the strategies run under Ray. test_parity.py compares all variants without Ray."""
    zero = _deepspeed_options(changes | {"name": "zero"})
    finetune_deepspeed.main(zero)
    fsdp = _fsdp_options(changes | {"name": "fsdp"})
    finetune_fsdp.main(fsdp)
    for options in (zero, fsdp):
        assert [row["loss"] for row in _metrics(options)] == pytest.approx([row["loss"] for row in ddp], abs=TOLERANCE)
        _assert_same_model(_model(options), _model(_ddp_options(changes)))


@pytest.mark.nightly
def test_a_run_resumes_with_fewer_workers(ddp: list[Row], changes: dict[str, Any]) -> None:
    options = _fsdp_options(changes | {"name": "fewer"})
    finetune_fsdp.main(options.model_copy(update={"stop_after": 20}))
    finetune_fsdp.main(options.model_copy(update={"num_workers": 1}))
    assert [row["loss"] for row in _metrics(options)] == pytest.approx([row["loss"] for row in ddp], abs=TOLERANCE)
    _assert_same_model(_model(options), _model(_ddp_options(changes)))


@pytest.mark.nightly
def test_torchrun_agrees_with_ray(ddp: list[Row], changes: dict[str, Any]) -> None:
    options = _ddp_options(changes | {"name": "torchrun"})
    _torchrun(changes | {"name": options.name, "stop_after": 20})
    _torchrun(changes | {"name": options.name})  # resumes from the checkpoint
    assert [row["step"] for row in _metrics(options)] == list(range(1, STEPS + 1))
    assert [row["loss"] for row in _metrics(options)] == pytest.approx([row["loss"] for row in ddp], abs=TOLERANCE)
    _assert_same_model(_model(options), _model(_ddp_options(changes)))


@pytest.mark.nightly
def test_under_torchrun_an_error_is_printed_once(changes: dict[str, Any]) -> None:
    printed = _torchrun(changes | {"name": "refused", "data": "nowhere"}, expect=1)
    assert printed.count("error: no packed data") == 1


def test_a_killed_worker_changes_no_bit(ddp: list[Row], changes: dict[str, Any]) -> None:
    options = _ddp_options(changes | {"name": "killed", "log_every": 1})
    killer = threading.Thread(target=_kill_a_worker, args=(options,), daemon=True)
    killer.start()
    finetune_ddp.main(options)
    killer.join()
    assert len(list((_folder(options) / "tensorboard").iterdir())) == 2  # one file before the kill, and one after it
    assert [(row["step"], row["loss"], row["grad_norm"]) for row in _metrics(options)] == [
        (row["step"], row["loss"], row["grad_norm"]) for row in ddp
    ]


@pytest.mark.nightly
def test_a_lost_machine_leaves_fewer_workers(
    ddp: list[Row], changes: dict[str, Any], tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A separate cluster, with a head and two simulated worker machines, suddenly loses one of the two."""
    monkeypatch.setenv("PYTHONPATH", str(settings.PROJECT))  # so that workers can import the project
    # after the loss, Ray Train first waits this long for two workers
    monkeypatch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "20")
    shared = changes | {"name": "elastic", "shared_paths": str(tmp_path_factory.getbasetemp()), "log_every": 1}
    options = _ddp_options(shared | {"shared_paths": ()})
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        _, machine = (cluster.add_node(num_cpus=1) for _ in range(2))
        command = [sys.executable, "-m", "jobs.finetune_ddp", *_words(shared), "--num-workers", "1", "2"]
        variables = os.environ | {"PROFILE": "local", "RAY_ADDRESS": cluster.address}
        job = subprocess.Popen(command, cwd=settings.PROJECT, env=variables)
        _wait_for_kill(options)
        cluster.remove_node(machine, allow_graceful=False)
        assert job.wait(240) == 0
    finally:
        cluster.shutdown()
    events = [json.loads(line) for line in (_folder(options) / "events.jsonl").read_text().splitlines()]
    assert [event["world_size"] for event in events if event["event"] == "start"] == [2, 1]
    rows = _metrics(options)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in ddp], abs=ELASTIC)


@pytest.mark.nightly  # because it takes 50 s
def test_a_stream_trains_and_its_workers_can_start_tasks(
    assets: Path, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = _ddp_options(changes | {"name": "stream", "stream": True, "steps": 4, "stop_after": None})
    stream_input = streaming.StreamInput(
        row_sources.find_all(str(assets / "data/*.jsonl"), ()), DocumentTokenizer(options.model, 128), embeddings=10**6
    )
    monkeypatch.setattr(streaming, "find_input", lambda _: stream_input)
    ray_train.fit(options, _StartsATask)
    assert "reads the rows from the start" in capsys.readouterr().out
    assert [row["step"] for row in _metrics(options)] == [1, 2, 3, 4]
    tokenizer = AutoTokenizer.from_pretrained(_folder(options) / "model")
    assert len(tokenizer) == _model(options).config.vocab_size


def _returns_a_row(row: Mapping[str, Any]) -> Any:
    return {"messages": []}


@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize(
    ("embeddings", "tokenizing", "reader", "sentence"),
    [
        (300, {}, None, "the rows contain the token .* only for ids below 300"),
        (10**6, {"overlong": "error"}, None, "a conversation has more than sequence_length = 8 tokens"),
        (10**6, {}, _returns_a_row, "the reader of the format mine returns dict; return a Conversation"),
    ],
)
def test_an_error_in_a_stream_is_one_sentence(
    embeddings: int, tokenizing: dict[str, Any], reader: Any, sentence: str, assets: Path
) -> None:
    formats = (Format("mine", (("messages",),), (), reader), *FORMATS) if reader else FORMATS
    sources = row_sources.find_all(str(assets / "data/*.jsonl"), (), formats)
    length = 8 if tokenizing else 128
    tokenizer = DocumentTokenizer(str(assets / "model"), length, **tokenizing)
    with pytest.raises(RayTaskError) as raised:
        streaming.dataset(streaming.StreamInput(sources, tokenizer, embeddings)).materialize()
    explained = preprocessing.explain(raised.value)
    assert isinstance(explained, UserError)
    assert re.match(sentence, str(explained))
    assert "\n" not in str(explained)


@pytest.mark.nightly  # because it takes 50 s
def test_a_token_of_a_stream_without_an_embedding_is_an_error(
    assets: Path, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = _ddp_options(changes | {"name": "stream-too-large", "stream": True, "steps": 4, "stop_after": None})
    sources = row_sources.find_all(str(assets / "data/*.jsonl"), ())
    stream_input = streaming.StreamInput(sources, DocumentTokenizer(options.model, 128), embeddings=300)
    monkeypatch.setattr(streaming, "find_input", lambda _: stream_input)
    with pytest.raises(UserError, match=r"^the rows contain the token .* only for ids below 300"):
        ray_train.fit(options, DDP)


@pytest.mark.nightly
def test_a_user_error_in_the_workers_reaches_the_driver(changes: dict[str, Any]) -> None:
    """Ray Train would replace workers that raise an error, so they return its message instead."""
    options = _ddp_options(changes | {"name": "refused", "max_failures": 3})
    with pytest.raises(UserError, match="refused by rank 0"):
        ray_train.fit(options, _Refuses)


def test_a_checkpoint_that_takes_longer_than_a_spot_notice_is_noted_once(capfd: pytest.CaptureFixture[str]) -> None:
    runtime = object.__new__(ray_train.RayTrainRuntime)  # without the worker that __init__ needs
    runtime.rank, runtime._noted_slow_storage = 0, False
    for seconds in (119, 170, 180):
        runtime._note_slow_storage(seconds)
    printed = capfd.readouterr().out
    assert printed.count("note:") == 1
    assert "a checkpoint takes 170 s to store, but AWS takes back a spot machine 120 s after its notice" in printed


@pytest.mark.nightly  # because it takes a minute for each
@pytest.mark.parametrize("max_failures", [0, 3])
def test_a_gpu_out_of_memory_gives_one_sentence_and_no_retry(
    max_failures: int, changes: dict[str, Any], tmp_path: Path
) -> None:
    """Rank 0 waits in a collective for rank 1, which fails. Neither worker is restarted."""
    options = _ddp_options(
        changes | {"name": "full", "max_failures": max_failures, "model": _counted(changes, tmp_path)}
    )
    with pytest.raises(UserError, match=r"a GPU ran out of memory\. .*--micro-batch-rows.*inv plan "):
        launch.fit(options, _FillsOneGpu)
    assert len(list(tmp_path.glob("start-*"))) == 2
    assert not Path(options.output, "full", "failure.txt").exists()


@pytest.mark.nightly
def test_an_error_in_the_code_is_not_retried(
    changes: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = _ddp_options(changes | {"name": "wrong", "max_failures": 3, "model": _counted(changes, tmp_path)})
    with pytest.raises(UserError, match=r"a worker failed with ValueError: no such attention\. .* Ray did not retry"):
        launch.fit(options, _FailsInTheModel)
    assert len(list(tmp_path.glob("start-*"))) == 2
    assert 'raise ValueError("no such attention")' in capfd.readouterr().err


# ------------------------------------------------------------------------------------------ before any worker starts


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (
            {"num_workers": 8, "micro_batch_rows": 2},
            "num_workers = 8, with 1 CPU for each, is more than the 4 .* --num-workers 4",
        ),
        ({"use_gpu": True}, "change cpus_per_worker and use_gpu"),
        (
            {"stream": True, "num_workers": 4, "micro_batch_rows": 4},
            "--stream needs a spare CPU, but the workers take 4 of 4",
        ),
        ({"num_workers": 3}, "not a multiple of num_workers x micro_batch_rows"),
    ],
    ids=lambda wrong: next(iter(wrong)) if isinstance(wrong, dict) else "",
)
def test_what_the_cluster_cannot_run_is_refused(
    wrong: dict[str, Any], sentence: str, changes: dict[str, Any], assets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream_input = streaming.StreamInput(
        row_sources.find_all(str(assets / "data/*.jsonl"), ()),
        DocumentTokenizer(changes["model"], 128),
        embeddings=10**6,
    )
    monkeypatch.setattr(streaming, "find_input", lambda _: stream_input)
    with pytest.raises(UserError, match=sentence):
        finetune_ddp.main(_ddp_options(changes | {"name": "refused-before"} | wrong))
    assert not Path(changes["output"], "refused-before").exists()


def test_private_paths_are_refused_on_several_nodes(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLUSTER_NODES", json.dumps([{"resources": {"CPU": 4}, "count": 2}]))
    with pytest.raises(UserError, match=r"model = .* is on the disk of one node"):
        finetune_ddp.main(_ddp_options(changes))
    shared = _ddp_options(changes | {"shared_paths": (changes["model"], changes["data"])})
    with pytest.raises(UserError, match=r"output = .* is on the disk of one node"):
        finetune_ddp.main(shared)


# ------------------------------------------------------------------------------------------ helpers


def _ddp_options(changes: dict[str, Any]) -> DDPOptions:
    return settings.load(DDPOptions, "train", profile="local").model_copy(update=changes)


def _fsdp_options(changes: dict[str, Any]) -> FSDPOptions:
    return settings.load(FSDPOptions, "train", "fsdp", profile="local").model_copy(update=changes)


def _deepspeed_options(changes: dict[str, Any]) -> DeepSpeedOptions:
    return settings.load(DeepSpeedOptions, "train", "deepspeed", profile="local").model_copy(update=changes)


def _folder(options: TrainOptions) -> Path:
    return Path(options.output, options.name)


def _metrics(options: TrainOptions) -> list[Row]:
    rows = [json.loads(line) for line in (_folder(options) / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["step"]]


def _model(options: TrainOptions) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(_folder(options) / "model")


def _assert_same_model(one: PreTrainedModel, other: PreTrainedModel) -> None:
    assert one.dtype == other.dtype
    for weights, others in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(weights, others, atol=1e-3, rtol=0)


def _torchrun(changes: dict[str, Any], expect: int = 0) -> str:
    """Run finetune_ddp in two processes under torchrun, and return their output."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, "-m", "jobs.finetune_ddp", *_words(changes)],
        cwd=settings.PROJECT,
        env=os.environ | {"PROFILE": "local"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == expect, done.stdout
    return done.stdout


def _words(changes: dict[str, Any]) -> list[str]:
    """Return the options as words of a command line."""
    return [word for name, value in changes.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def _wait_for_kill(options: TrainOptions) -> None:
    """Wait until the run has logged KILL_AFTER_STEP steps."""
    file = _folder(options) / "metrics.jsonl"
    while not file.exists() or len(file.read_text().splitlines()) < KILL_AFTER_STEP:
        time.sleep(0.05)


def _kill_a_worker(options: TrainOptions) -> None:
    """Kill one of this test's training workers with SIGKILL."""
    _wait_for_kill(options)
    workers = [pid for pid, name in children().items() if "RayTrainWorker" in name]
    psutil.Process(workers[-1]).kill()


@ray.remote(num_cpus=1)
def _answer() -> int:
    return 42


class _StartsATask(DDP):
    def __init__(self, model: PreTrainedModel, options: TrainOptions, runtime: Runtime, plan: BatchPlan) -> None:
        assert ray.get(_answer.remote(), timeout=60) == 42  # a task in the workers' placement group would wait forever
        super().__init__(model, options, runtime, plan)


def _counted(changes: dict[str, Any], folder: Path) -> str:
    """Copy the model to `folder`, where `_count` leaves a file for each worker that starts. Return the copy's path."""
    shutil.copytree(changes["model"], folder / "model")
    return str(folder / "model")


def _count(options: TrainOptions, runtime: Runtime) -> None:
    Path(options.model).with_name(f"start-{runtime.rank}-{time.time_ns()}").touch()


class _FillsOneGpu(DDP):
    def __init__(self, model: PreTrainedModel, options: TrainOptions, runtime: Runtime, plan: BatchPlan) -> None:
        _count(options, runtime)
        if runtime.rank == 0:
            total(torch.zeros(1, device=runtime.device))
        time.sleep(1)  # until rank 0 waits
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


class _FailsInTheModel(DDP):
    def __init__(self, model: PreTrainedModel, options: TrainOptions, runtime: Runtime, plan: BatchPlan) -> None:
        _count(options, runtime)
        raise ValueError("no such attention")


class _Refuses(DDP):
    def __init__(self, model: PreTrainedModel, options: TrainOptions, runtime: Runtime, plan: BatchPlan) -> None:
        raise UserError(f"refused by rank {runtime.rank}")
