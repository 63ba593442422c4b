"""Test `generate`: its answers, the rows that it rejects, and how it resumes after a kill."""

import asyncio
import contextlib
import functools
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from jobs import generate
from raymill import settings
from raymill.demo import assets as demo_assets
from raymill.errors import UserError
from raymill.generation import crash_tracker, generation, tracked_engine, vllm_stage
from raymill.generation.options import GenerateOptions
from raymill.ray_support import ray_logging
from raymill.serving import app
from raymill.serving.options import ServeOptions

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="vLLM's CPU build exists for Linux only")

COUNT, TOKENS = 480, 24
TIE = 1e-4  # if two scores are closer than this, correct implementations may order them differently
BAD = {
    '{"id": "broken"': "not valid JSON",
    '{"prompt": "hi"}': "no text or whole number in the column id",
    '{"id": "twice", "prompt": "hi"}': "an id that another row also has",
    '{"id": "twice", "prompt": "ho"}': "an id that another row also has",
    '{"id": "nothing", "text": "hi"}': "neither messages nor a prompt that is text",
    '{"id": "odd", "messages": [{"role": "user", "content": 3}]}': "a message with content that is not text",
    '{"id": "long", "prompt": "' + "word " * 500 + '"}': "too long: no token of max_model_len = 256 is left",
}


class KilledRuns(NamedTuple):
    """Two runs of the same job: the first was killed, and the second lost its engine."""

    options: GenerateOptions
    prompts: dict[str, Any]
    killed: set[str]
    """The ids of the rows that the killed run had answered."""
    survivors: list[int]
    """Pids of engine processes that outlived the killed run."""
    engine_killed_at: int
    """Number of answered rows when the second run lost its engine."""
    output: str
    """Console output of the second run."""

    @property
    def answers(self) -> list[dict[str, Any]]:
        return read(self.options)


def read(options: GenerateOptions) -> list[dict[str, Any]]:
    folder = Path(options.output, "answers")
    return [row for file in sorted(folder.glob("*.parquet")) for row in pq.read_table(file).to_pylist()]


@pytest.fixture(scope="module")
def model(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model whose generation_config.json has a setting that changes greedy decoding."""
    folder = tmp_path_factory.mktemp("penalised") / "model"
    shutil.copytree(model_folder, folder)
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"repetition_penalty": 1.2}))
    return folder


@pytest.fixture(scope="module")
def options(model: Path, tmp_path_factory: pytest.TempPathFactory) -> GenerateOptions:
    folder = tmp_path_factory.mktemp("generate")
    changes = {"input": str(folder / "in"), "output": str(folder / "out"), "model": str(model)}
    loaded = settings.load(GenerateOptions, "generate", profile="local")
    return loaded.model_copy(update=changes | {"max_tokens": TOKENS, "rows_per_file": 8})


@pytest.fixture(scope="module")
def made(ray_session: None, options: GenerateOptions) -> KilledRuns:
    """Kill a run after it has written a file, then run the job again and kill its engine."""
    prompts = write_rows(Path(options.input))
    survivors = run_and_kill(options)
    killed = {row["id"] for row in read(options)}
    output = io.StringIO()
    killed_at = Path(options.output).with_name("killed-at")
    fault = KillOnce(options, len(killed), killed_at)
    with pytest.MonkeyPatch.context() as patched, contextlib.redirect_stdout(output):
        patched.setattr("raymill.ray_support.progress.PROGRESS_INTERVAL_S", 0.5)
        # small batches, so that the first file is written long before the engine has answered all rows
        patched.setattr(vllm_stage, "BATCH_ROWS", options.rows_per_file)
        patched.setattr(tracked_engine, "track", functools.partial(track_with_fault, fault, tracked_engine.track))
        generate.main(options)
    return KilledRuns(options, prompts, killed, survivors, int(killed_at.read_text()), output.getvalue())


def write_rows(folder: Path) -> dict[str, Any]:
    """Write good and bad rows as JSONL, and good ones as parquet. Return the prompts of the good rows, keyed by id."""
    folder.mkdir(parents=True)
    facts = [fact.question for fact in demo_assets.questions(50)]
    asked = {f"q{number}": f"{facts[number % 50]} {number // 50 or ''}".strip() for number in range(COUNT)}
    good = {name: [{"role": "user", "content": question}] for name, question in asked.items()}
    lines = [json.dumps({"id": name, "messages": messages}) for name, messages in good.items()]
    (folder / "rows.jsonl").write_text("\n".join([*lines[:10], *BAD, *lines[10:]]))
    plain = {"1": "What is", "2": "The module", "3": "Return"}
    table = pa.table({"id": [int(name) for name in plain], "prompt": list(plain.values()), "other": [0.5] * 3})
    pq.write_table(table, folder / "rows.parquet")
    return good | plain


def run_and_kill(options: GenerateOptions) -> list[int]:
    """Start the job in a new process and kill it after its first file. Return the pids of engines that outlive it."""
    code = "import sys; from jobs import generate as g; g.main(g.GenerateOptions.model_validate_json(sys.argv[1]))"
    environment = os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address, "PROFILE": "local"}
    before = set(psutil.pids())
    process = subprocess.Popen(
        [sys.executable, "-c", code, options.model_dump_json()], env=environment, cwd=settings.PROJECT
    )
    deadline = time.monotonic() + 240
    while not list(Path(options.output, "answers").glob("*.parquet")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    while (left := [pid for pid in set(psutil.pids()) - before if _is_engine(pid)]) and time.monotonic() < deadline:
        time.sleep(0.5)
    return left


class KillOnce:
    """Makes one row fatal: the first one after the run has written another file.

    Holds rows back until then, so that the engine cannot finish first. Saves the number of rows answered by then in
    the file `killed_at`.
    """

    def __init__(self, options: GenerateOptions, before: int, killed_at: Path) -> None:
        self._options, self._before, self._killed_at = options, before, killed_at
        self._rows = 0

    async def __call__(self, row: dict[str, Any]) -> bool:
        self._rows += 1
        if self._rows <= 8 * self._options.rows_per_file:  # the batches that the engine holds at once
            return False
        while (answered := len(read(self._options))) == self._before:
            await asyncio.sleep(0.1)
        with contextlib.suppress(FileExistsError), self._killed_at.open("x") as file:
            file.write(str(answered))
            return True
        return False


def _is_engine(pid: int) -> bool:
    try:
        return "EngineCore" in psutil.Process(pid).name() or "vLLMEngine" in psutil.Process(pid).name()
    except psutil.NoSuchProcess:
        return False


def test_a_killed_run_resumes(made: KilledRuns) -> None:
    assert 0 < len(made.killed) < COUNT
    assert f"{len(made.killed)} were answered before" in made.output
    assert not made.survivors
    assert len(made.killed) < made.engine_killed_at < COUNT, "the engine must be killed before the end of the run"
    assert Counter(row["id"] for row in made.answers) == Counter(dict.fromkeys(made.prompts, 1))


def test_greedy_answers_equal_those_of_transformers(made: KilledRuns, model: Path) -> None:
    """test_serve.py has the same test for the server. Here, generation_config.json has a repetition penalty."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    peer = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    compared = 0
    for row in made.answers[::12] + [row for row in made.answers if row["id"] in "123"]:
        prompt = made.prompts[row["id"]]
        if isinstance(prompt, str):
            assert row["prompt"] == prompt
            tokens = tokenizer(prompt, return_tensors="pt")
        else:
            assert json.loads(row["prompt"]) == prompt
            tokens = tokenizer.apply_chat_template(
                prompt, add_generation_prompt=True, return_dict=True, return_tensors="pt"
            )
        made_of = tokens["input_ids"].shape[1]
        generated = peer.generate(
            **tokens, do_sample=False, max_new_tokens=TOKENS, output_scores=True, return_dict_in_generate=True
        )
        best = torch.stack(generated.scores).squeeze(1).topk(2).values
        decided = int(torch.cumprod(best[:, 0] - best[:, 1] > TIE, 0).sum())
        expected = tokenizer.decode(generated.sequences[0, made_of:][:decided], skip_special_tokens=True)
        whole = decided == len(best)
        assert (row["answer"] if whole else row["answer"][: len(expected)]) == expected
        assert row["prompt_tokens"] == made_of
        assert not whole or row["answer_tokens"] == len(best)
        compared += decided
    assert compared > 200
    assert len({row["answer"] for row in made.answers}) > 10


def test_bad_rows_are_saved_with_their_reasons(made: KilledRuns) -> None:
    [file] = Path(made.options.output, "rejected").glob("*.parquet")
    rejected = pq.read_table(file).to_pylist()
    assert [row["row"].decode() for row in rejected] == list(BAD)
    for row, reason in zip(rejected, BAD.values(), strict=True):
        assert row["reason"].startswith(reason)
    assert f"{len(BAD)} rows were bad.\n" in made.output


def test_the_progress_line_shows_progress_speed_and_time_left(made: KilledRuns) -> None:
    assert "generate: starting engines: " in made.output
    line = generation.GenerateProgress(100)
    assert line({"rejected": 20}, 10.0) == "generate: starting engines: 10 s"
    totals = {"answered": 40, "rejected": 20, "tokens": 800}
    assert line(totals, 20.0) == "generate: 40 of 80 rows, 80 tokens/s, 10 s left"


def test_a_third_run_has_nothing_to_do(made: KilledRuns, capsys: pytest.CaptureFixture[str]) -> None:
    before = {file: file.stat().st_mtime_ns for file in Path(made.options.output, "answers").iterdir()}
    started = time.monotonic()
    generate.main(made.options)
    assert time.monotonic() - started < 15  # no engine was started
    assert {file: file.stat().st_mtime_ns for file in Path(made.options.output, "answers").iterdir()} == before
    assert f"{len(BAD)} rows were bad." in capsys.readouterr().out


@pytest.mark.nightly
def test_a_changed_row_is_answered_again(made: KilledRuns, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(made.options.input, tmp_path / "in")
    shutil.copytree(made.options.output, tmp_path / "out")
    changes = {"input": str(tmp_path / "in"), "output": str(tmp_path / "out")}
    changed = made.options.model_copy(update=changes)
    messages = [{"role": "user", "content": "Another question?"}]
    lines = (tmp_path / "in" / "rows.jsonl").read_text().splitlines()
    lines[0] = json.dumps({"id": "q0", "messages": messages})
    (tmp_path / "in" / "rows.jsonl").write_text("\n".join(lines))
    generate.main(changed)
    remaining = f"{1 + len(BAD)} rows to answer; {len(made.prompts) - 1} were answered before, 1 have changed"
    assert remaining in capsys.readouterr().out
    before = {row["id"]: row for row in made.answers}
    after = {row["id"]: row for row in read(changed)}
    assert len(read(changed)) == len(made.prompts)
    assert {name for name in before if before[name] != after[name]} == {"q0"}
    assert json.loads(after["q0"]["prompt"]) == messages


def test_the_engine_has_the_servers_settings(monkeypatch: pytest.MonkeyPatch, options: GenerateOptions) -> None:
    import ray.data.llm

    asked: dict[str, Any] = {}
    monkeypatch.setattr(ray.data.llm, "vLLMEngineProcessorConfig", lambda **words: asked.update(words))
    monkeypatch.setattr(ray.data.llm, "build_processor", lambda *_, **__: lambda rows: rows)
    monkeypatch.setattr("raymill.generation.tracked_engine.track", lambda *_: None)
    serving = settings.load(ServeOptions, "serve", profile="cluster").model_copy(
        update={"model": options.model, "tensor_parallel_size": 4}
    )
    vllm_stage.answer(None, None, options, serving)
    expected, found = app.engine_args(serving), asked["engine_kwargs"]
    assert callable(expected.pop("hf_overrides"))  # a function, which only equals itself
    assert callable(found.pop("hf_overrides"))
    assert expected.items() <= found.items()
    assert asked["accelerator_type"] is None  # any GPU of the cluster
    assert asked["placement_group_config"] is None


# ---------------------------------------------------------------- rows that crash the engine


@pytest.mark.nightly
def test_a_row_that_crashes_the_engine_twice_stops_the_run_and_can_be_skipped(
    ray_session: None,
    options: GenerateOptions,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(tracked_engine, "track", functools.partial(track_with_fault, is_q33, tracked_engine.track))
    names = [f"q{number}" for number in range(80)]
    asked = [json.dumps({"id": name, "prompt": f"What is {name}"}) for name in names]
    (tmp_path / "rows.jsonl").write_text("\n".join(asked))
    changes = {"input": str(tmp_path / "rows.jsonl"), "output": str(tmp_path / "out")}
    options = options.model_copy(update=changes)
    with pytest.raises(UserError, match=r"crashed twice with the same rows in flight.* --skip-ids") as refused:
        generate.main(options)
    named = str(refused.value).partition("--skip-ids ")[2].split()
    assert "q33" in named
    assert len(named) <= tracked_engine.SUSPECTS_AT_ONCE
    generate.main(options.model_copy(update={"skip_ids": ("q33",)}))
    assert Counter(row["id"] for row in read(options)) == Counter(set(names) - {"q33"})
    assert "1: skipped by --skip-ids" in capsys.readouterr().out


async def is_q33(row: dict[str, Any]) -> bool:
    return row["id"] == "q33"


def track_with_fault(
    is_fatal: Callable[[dict[str, Any]], Awaitable[bool]], track: Callable[..., None], processor: Any, tracker: Any
) -> None:
    """Do the same as `track`, and also kill the real engine whenever it gets a row that is fatal."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the engine's process cannot import this module

    class FaultyEngine(tracked_engine.TrackedEngine):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            generate_async_unpatched = self.llm.generate_async

            async def generate_async(row: dict[str, Any]) -> Any:
                answer = asyncio.ensure_future(generate_async_unpatched(row))
                if await is_fatal(row):
                    # wait until vLLM has sent the row, as in a real crash; an earlier kill may make vLLM hang
                    while self.llm.engine.output_handler is None:
                        await asyncio.sleep(0.001)
                    [core] = self.llm.engine.engine_core.resources.engine_manager.processes
                    core.kill()
                return await answer

            self.llm.generate_async = generate_async

    track(processor, tracker)
    stage = processor.stages["vLLMEngineStage"]
    processor.stages["vLLMEngineStage"] = stage.model_copy(update={"fn": FaultyEngine})


def test_an_engine_that_dies_twice_without_an_answer_is_crash_looping() -> None:
    tracker = crash_tracker.CrashTracker()
    for _ in range(2):
        tracker.start("one")
        assert not tracker.is_crash_looping("one")
    tracker.end("one", ["a"])
    for expected in (False, False, True):
        tracker.start("one")
        assert tracker.is_crash_looping("one") == expected
    assert not tracker.is_crash_looping("another")


def test_rows_are_suspects_after_one_crash_and_culprits_after_two() -> None:
    tracker = crash_tracker.CrashTracker()
    assert tracker.start("one") == tracker.start("two") == frozenset()
    tracker.begin("one", ["a", "b", "c"])
    tracker.begin("two", ["d"])
    tracker.end("one", ["a"])
    assert tracker.start("one") == {"b", "c"}
    assert tracker.culprits() == []
    tracker.begin("one", ["b"])
    tracker.end("one", ["b"])
    tracker.begin("one", ["c", "e"])
    assert tracker.start("one") == {"b", "c", "e"}
    assert tracker.culprits() == ["c"]
    assert crash_tracker.error_message(["c", "a row"]).endswith("--skip-ids c 'a row'")


# ---------------------------------------------------------------- errors


def test_answers_with_other_settings_are_not_mixed(made: KilledRuns) -> None:
    with pytest.raises(UserError, match=r"made with a different max_tokens; replace them with --overwrite"):
        generate.main(made.options.model_copy(update={"max_tokens": TOKENS + 1}))


def test_a_folder_with_other_files_is_left_alone(made: KilledRuns) -> None:
    with pytest.raises(UserError, match="holds other files; pass another --output"):
        generate.main(made.options.model_copy(update={"output": made.options.input}))


def test_rows_without_ids_are_refused(made: KilledRuns, tmp_path: Path) -> None:
    changes = {"id_column": "number", "output": str(tmp_path / "out")}
    with pytest.raises(UserError, match=r"no row of .* has an id in the column number.*--id-column"):
        generate.main(made.options.model_copy(update=changes))


def test_missing_input_is_refused(options: GenerateOptions, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no \.parquet, .* or \.feather file .* correct input in \[generate\]"):
        generate.main(options.model_copy(update={"input": str(tmp_path)}))


@pytest.mark.nightly
def test_an_engine_that_does_not_start_gives_a_one_sentence_error(
    made: KilledRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = settings.load

    def load(section_type: Any, *names: str, **options: Any) -> Any:
        section = real(section_type, *names, **options)
        return section.model_copy(update={"kv_cache_gib": 1e-6}) if section_type is ServeOptions else section

    monkeypatch.setattr(settings, "load", load)
    (tmp_path / "rows.jsonl").write_text('{"id": 1, "prompt": "hello"}')
    asked = made.options.model_copy(update={"input": str(tmp_path / "rows.jsonl"), "output": str(tmp_path / "out")})
    with pytest.raises(UserError, match=r"an engine died \(.*Error: .*\)\. To see why, serve the model: inv submit"):
        generate.main(asked)


def test_an_engine_that_hangs_gives_a_one_sentence_error(
    made: KilledRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The timeout is shorter than an engine's start, so a starting engine counts as hanging."""
    context = ray_logging.quiet_context()
    context.execution_no_progress_timeout_s = 5
    monkeypatch.setattr(ray_logging, "quiet_context", lambda: context)
    (tmp_path / "rows.jsonl").write_text('{"id": 1, "prompt": "hello"}')
    asked = made.options.model_copy(update={"input": str(tmp_path / "rows.jsonl"), "output": str(tmp_path / "out")})
    with pytest.raises(UserError, match=r"no row was answered for .* minutes: .* run the same command again"):
        generate.main(asked)
