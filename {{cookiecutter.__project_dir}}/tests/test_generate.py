"""Many prompts at once: the answers, what is put aside, and what a killed run leaves for the next."""

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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
import torch
from processes import children
from transformers import AutoModelForCausalLM, AutoTokenizer

import settings
from demo import assets as demo_assets
from jobs import generate
from jobs.generate import GenerateOptions
from jobs.serve_llm import ServeOptions
from pipeline.generation import engine, suspects
from pipeline.ray_support import ray_data
from pipeline.serving import app

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="vLLM's CPU build exists for Linux only")

COUNT, TOKENS = 480, 24
TIE = 1e-4  # two scores closer than this may change places between two correct implementations
BAD = {
    '{"id": "broken"': "not valid JSON",
    '{"prompt": "hi"}': "no text or whole number in the column id",
    '{"id": "twice", "prompt": "hi"}': "an id that another row has too",
    '{"id": "twice", "prompt": "ho"}': "an id that another row has too",
    '{"id": "nothing", "text": "hi"}': "neither messages nor a prompt that is text",
    '{"id": "odd", "messages": [{"role": "user", "content": 3}]}': "a message with content that is not text",
    '{"id": "long", "prompt": "' + "word " * 500 + '"}': "too long: no token of max_model_len = 256 is left",
}


class Made(NamedTuple):
    """What two runs made, of which the first was killed, and the engine of the second."""

    options: GenerateOptions
    prompts: dict[str, Any]
    killed: set[str]
    """Ids that the killed run had answered."""
    left: list[int]
    """Processes of the killed run that outlived it."""
    engine_killed_at: int
    """How many rows were answered when the second run lost its engine."""
    said: str
    """What the second run printed."""

    @property
    def answers(self) -> list[dict[str, Any]]:
        return read(self.options)


def read(options: GenerateOptions) -> list[dict[str, Any]]:
    folder = Path(options.output, "answers")
    return [row for file in sorted(folder.glob("*.parquet")) for row in pq.read_table(file).to_pylist()]


@pytest.fixture(scope="module")
def model(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose own file asks for something that greedy decoding heeds."""
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
def made(ray_session: None, options: GenerateOptions) -> Made:
    """A run that is killed once it has written a file, and the same again, whose engine is killed."""
    prompts = write_rows(Path(options.input))
    left = run_and_kill(options)
    killed = {row["id"] for row in read(options)}
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patched, ThreadPoolExecutor(1) as pool, contextlib.redirect_stdout(said):
        patched.setattr("pipeline.ray_support.progress.PROGRESS_INTERVAL_S", 0.5)
        engine_killed_at = pool.submit(kill_the_engine, options)
        generate.main(options)
    return Made(options, prompts, killed, left, engine_killed_at.result(), said.getvalue())


def write_rows(folder: Path) -> dict[str, Any]:
    """Rows of each kind, in both formats; returns the prompts of the good ones by id."""
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
    """Start the job as a process of its own, kill it in the midst, and say which processes of it are left."""
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


def kill_the_engine(options: GenerateOptions) -> int:
    """kill -9 of its engine, once the next file is written; returns how many rows are answered by then."""
    folder = Path(options.output, "answers")
    files, deadline = len(list(folder.glob("*.parquet"))), time.monotonic() + 240
    while not (engines := [pid for pid, name in children().items() if name.startswith("VLLM::EngineCore")]):
        assert time.monotonic() < deadline
        time.sleep(0.5)
    while len(list(folder.glob("*.parquet"))) == files:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(engines[0], signal.SIGKILL)
    return len(read(options))


def _is_engine(pid: int) -> bool:
    try:
        return "EngineCore" in psutil.Process(pid).name() or "vLLMEngine" in psutil.Process(pid).name()
    except psutil.NoSuchProcess:
        return False


def test_a_killed_run_goes_on_where_it_was(made: Made) -> None:
    assert 0 < len(made.killed) < COUNT
    assert f"{len(made.killed)} were answered before" in made.said
    assert not made.left
    assert len(made.killed) < made.engine_killed_at < COUNT, "its engine was killed in the midst, and another started"
    assert Counter(row["id"] for row in made.answers) == Counter(dict.fromkeys(made.prompts, 1))


def test_answers_are_those_of_transformers(made: Made, model: Path) -> None:
    """As the server's are: see test_serve.py. The model's own file has a penalty, which both heed."""
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


def test_bad_rows_are_aside_with_their_reason(made: Made) -> None:
    [file] = Path(made.options.output, "rejected").glob("*.parquet")
    rejected = pq.read_table(file).to_pylist()
    assert [row["row"].decode() for row in rejected] == list(BAD)
    for row, reason in zip(rejected, BAD.values(), strict=True):
        assert row["reason"].startswith(reason)
    assert f"{len(BAD)} rows were bad.\n" in made.said


def test_progress_says_how_far_how_fast_and_how_long_still(made: Made) -> None:
    assert "generate: starting engines: " in made.said
    line = generate._Line(100)
    assert line({"rejected": 20}, 10.0) == "generate: starting engines: 10 s"
    totals = {"answered": 40, "rejected": 20, "tokens": 800}
    assert line(totals, 20.0) == "generate: 40 of 80 rows, 80 tokens/s, 10 s left"


def test_nothing_is_left_to_do_a_third_time(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    before = {file: file.stat().st_mtime_ns for file in Path(made.options.output, "answers").iterdir()}
    started = time.monotonic()
    generate.main(made.options)
    assert time.monotonic() - started < 15  # no engine was started
    assert {file: file.stat().st_mtime_ns for file in Path(made.options.output, "answers").iterdir()} == before
    assert f"{len(BAD)} rows were bad." in capsys.readouterr().out


def test_the_engine_is_the_server_s(monkeypatch: pytest.MonkeyPatch, options: GenerateOptions) -> None:
    import ray.data.llm

    asked: dict[str, Any] = {}
    monkeypatch.setattr(ray.data.llm, "vLLMEngineProcessorConfig", lambda **words: asked.update(words))
    monkeypatch.setattr(ray.data.llm, "build_processor", lambda *_, **__: lambda rows: rows)
    monkeypatch.setattr("pipeline.generation.engine.watch", lambda *_: None)
    serving = settings.load(ServeOptions, "serve", profile="cluster").model_copy(
        update={"model": options.model, "tensor_parallel_size": 4}
    )
    generate._answers(None, None, options, serving)
    assert app.engine(serving).items() <= asked["engine_kwargs"].items()
    assert asked["accelerator_type"] == "A100"
    assert asked["placement_group_config"] is None


# ---------------------------------------------------------------- an engine that dies of a row


def test_an_engine_that_dies_again_of_a_row_stops_the_run_and_the_rest_is_answered(
    ray_session: None,
    options: GenerateOptions,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(engine, "watch", functools.partial(watch_one_that_dies_of, "q33", engine.watch))
    names = [f"q{number}" for number in range(80)]
    asked = [json.dumps({"id": name, "prompt": f"What is {name}"}) for name in names]
    (tmp_path / "rows.jsonl").write_text("\n".join(asked))
    changes = {"input": str(tmp_path / "rows.jsonl"), "output": str(tmp_path / "out")}
    options = options.model_copy(update=changes)
    with pytest.raises(settings.UserError, match=r"crashed twice with the same rows in flight.* --skip-ids") as refused:
        generate.main(options)
    named = str(refused.value).partition("--skip-ids ")[2].split()
    assert "q33" in named
    assert len(named) <= engine.SUSPECTS_AT_ONCE
    generate.main(options.model_copy(update={"skip_ids": ("q33",)}))
    assert Counter(row["id"] for row in read(options)) == Counter(set(names) - {"q33"})
    assert "1: skipped by --skip-ids" in capsys.readouterr().out


def watch_one_that_dies_of(name: str, watch: Callable[..., None], processor: Any, held: Any) -> None:
    """Like engine.watch; in addition, a real engine is killed whenever it gets the row with this id."""

    class Mortal(engine.Engine):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            whole = self.llm.generate_async

            async def generate_async(row: dict[str, Any]) -> Any:
                answer = asyncio.ensure_future(whole(row))
                if row["id"] == name:
                    # a row crashes an engine only after vLLM has sent it one; a crash before that may hang vLLM
                    while self.llm.engine.output_handler is None:
                        await asyncio.sleep(0.001)
                    [core] = self.llm.engine.engine_core.resources.engine_manager.processes
                    core.kill()
                return await answer

            self.llm.generate_async = generate_async

    watch(processor, held)
    stage = processor.stages["vLLMEngineStage"]
    processor.stages["vLLMEngineStage"] = stage.model_copy(update={"fn": Mortal})


def test_an_engine_that_dies_twice_without_an_answer_is_hopeless() -> None:
    held = suspects.Suspects()
    for _ in range(2):
        held.start("one")
        assert not held.is_hopeless("one")
    held.end("one", ["a"])
    for hopeless in (False, False, True):
        held.start("one")
        assert held.is_hopeless("one") == hopeless
    assert not held.is_hopeless("another")


def test_rows_are_suspects_after_one_death_and_convicted_after_two() -> None:
    held = suspects.Suspects()
    assert held.start("one") == held.start("two") == frozenset()
    held.begin("one", ["a", "b", "c"])
    held.begin("two", ["d"])
    held.end("one", ["a"])
    assert held.start("one") == {"b", "c"}
    assert held.convicted() == []
    held.begin("one", ["b"])
    held.end("one", ["b"])
    held.begin("one", ["c", "e"])
    assert held.start("one") == {"b", "c", "e"}
    assert held.convicted() == ["c"]
    assert suspects.sentence(["c", "a row"]).endswith("--skip-ids c 'a row'")


# ---------------------------------------------------------------- refusals


def test_answers_of_another_kind_are_not_mixed(made: Made) -> None:
    with pytest.raises(settings.UserError, match=r"made with another max_tokens; replace them with --overwrite"):
        generate.main(made.options.model_copy(update={"max_tokens": TOKENS + 1}))


def test_a_folder_of_somebody_else_s_is_left_alone(made: Made) -> None:
    with pytest.raises(settings.UserError, match="holds other files; pass another --output"):
        generate.main(made.options.model_copy(update={"output": made.options.input}))


def test_rows_without_ids_are_refused(made: Made, tmp_path: Path) -> None:
    changes = {"id_column": "number", "output": str(tmp_path / "out")}
    with pytest.raises(settings.UserError, match=r"no row of .* has an id in the column number.*--id-column"):
        generate.main(made.options.model_copy(update=changes))


def test_no_input_is_refused(options: GenerateOptions, tmp_path: Path) -> None:
    with pytest.raises(settings.UserError, match=r"no \.parquet or \.jsonl .* correct input in \[generate\]"):
        generate.main(options.model_copy(update={"input": str(tmp_path)}))


def test_an_engine_that_does_not_start_is_one_sentence(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = settings.load

    def load(section_type: Any, *names: str, **options: Any) -> Any:
        section = real(section_type, *names, **options)
        return section.model_copy(update={"kv_cache_gib": 1e-6}) if section_type is ServeOptions else section

    monkeypatch.setattr(settings, "load", load)
    (tmp_path / "rows.jsonl").write_text('{"id": 1, "prompt": "hello"}')
    asked = made.options.model_copy(update={"input": str(tmp_path / "rows.jsonl"), "output": str(tmp_path / "out")})
    with pytest.raises(settings.UserError, match=r"an engine died \(.*Error: .*\); to read why, serve it: inv submit"):
        generate.main(asked)


def test_an_engine_that_hangs_is_one_sentence(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The timeout is shorter than the start of an engine, which then counts as hanging."""
    context = ray_data.quiet_context()
    context.execution_no_progress_timeout_s = 5
    monkeypatch.setattr(ray_data, "quiet_context", lambda: context)
    (tmp_path / "rows.jsonl").write_text('{"id": 1, "prompt": "hello"}')
    asked = made.options.model_copy(update={"input": str(tmp_path / "rows.jsonl"), "output": str(tmp_path / "out")})
    with pytest.raises(settings.UserError, match=r"no row was answered for .* minutes: .* run the same command again"):
        generate.main(asked)
