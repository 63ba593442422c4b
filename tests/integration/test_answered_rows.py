"""Test which rows `generate` answers again. The engine is a fake that repeats the prompt."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raymill import settings
from raymill.data import row_sources
from raymill.generation import generation, vllm_stage
from raymill.generation.answer_folder import ROW_HASH, AnswerFolder
from raymill.generation.options import GenerateOptions
from raymill.generation.prompts import PromptTokenizer
from raymill.serving.options import ServeOptions


def chat(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}


ROWS: list[dict[str, Any]] = [
    {"id": "plain", "prompt": "one"},
    {"id": "chat", "messages": chat("two")},
    {"id": "tools", "messages": chat("three"), "tools": [tool("first")]},
    *({"id": f"same{number}", "prompt": f"number {number}"} for number in range(3)),
]
CHANGES: dict[str, dict[str, Any]] = {
    "another prompt": {"id": "plain", "prompt": "one!"},
    "messages instead of a prompt": {"id": "plain", "messages": chat("one")},
    "another message": {"id": "chat", "messages": chat("two!")},
    "one more message": {"id": "chat", "messages": [{"role": "system", "content": "be brief"}, *chat("two")]},
    "another tool": {"id": "tools", "messages": chat("three"), "tools": [tool("second")]},
    "no tool": {"id": "tools", "messages": chat("three")},
}


class Job(NamedTuple):
    """A job that can run several times."""

    folder: Path
    run: Callable[[list[dict[str, Any]]], list[str]]
    """Answers rows, and returns the ids of those that the engine received."""

    def answers(self) -> dict[str, str]:
        """Return the saved prompts, keyed by id. Each id has one answer."""
        files = (self.folder / "output" / "answers").iterdir()
        found = [row for file in files for row in pq.read_table(file).to_pylist()]
        saved = {row["id"]: row["prompt"] for row in found}
        assert len(saved) == len(found)
        assert all(row["answer"] == f"answer to {row['prompt']}" for row in found)
        return saved


@pytest.fixture
def job(ray_session: None, assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    def answer(asked: Any, *_: object) -> Any:
        def repeat(row: dict[str, Any]) -> dict[str, Any]:
            with (tmp_path / "asked").open("a") as file:
                file.write(f"{row['id']}\n")
            kept = {name: row[name] for name in ("id", "prompt", ROW_HASH) if name in row}
            return kept | {"answer": f"answer to {row['prompt']}", "answer_tokens": 1}

        return asked.map(repeat)

    def run(rows: list[dict[str, Any]]) -> list[str]:
        (tmp_path / "asked").write_text("")
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        source = row_sources.find(str(tmp_path / "rows.jsonl"), "generate")
        output = AnswerFolder(str(tmp_path / "output"))
        tokenizer = PromptTokenizer(str(assets / "model"), "id", 256)
        loaded = settings.load(GenerateOptions, "generate", profile="local")
        serving = settings.load(ServeOptions, "serve", profile="local")
        answered = output.begin({"model": "a model"}, overwrite=False)
        generation.answer_remaining(source, answered, tokenizer, output, loaded, serving)
        return sorted((tmp_path / "asked").read_text().split())

    monkeypatch.setattr(vllm_stage, "answer", answer)
    made = Job(tmp_path, run)
    assert len(made.run(ROWS)) == len(ROWS)
    return made


def test_a_changed_row_is_answered_again_and_its_old_answer_is_replaced(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    assert job.run(ROWS) == []
    for name, changed in CHANGES.items():
        before = job.answers()
        rows = [changed if row["id"] == changed["id"] else row for row in ROWS]
        assert job.run(rows) == [changed["id"]], name
        after = job.answers()
        assert {key: after[key] for key in after if key != changed["id"]} == {
            key: before[key] for key in before if key != changed["id"]
        }, name
        if "messages" in changed:
            assert json.loads(after[changed["id"]]) == changed["messages"], name
        else:
            assert after[changed["id"]] == changed["prompt"], name
        assert "1 have changed since" in capsys.readouterr().out
        job.run(ROWS)
    assert job.run([{**row, "note": "other columns do not matter"} for row in reversed(ROWS)]) == []


def test_a_row_that_became_bad_or_ambiguous_loses_its_answer(job: Job) -> None:
    broken = {"id": "plain", "prompt": ""}
    twice = {"id": "chat", "messages": chat("another")}
    assert job.run([broken, *ROWS[1:], twice]) == []
    assert job.answers().keys() == {row["id"] for row in ROWS} - {"plain", "chat"}
    reasons = AnswerFolder(str(job.folder / "output")).count_rejected()
    assert reasons == {"neither messages nor a prompt that is text": 1, "an id that another row also has": 2}


def test_answers_to_rows_that_are_not_in_the_input_stay(job: Job) -> None:
    before = job.answers()
    assert job.run([{"id": "new", "prompt": "new"}]) == ["new"]
    assert job.answers() == before | {"new": "new"}


def test_answers_without_a_hash_of_their_row_are_replaced(job: Job) -> None:
    """Earlier versions wrote such answers."""
    for file in (job.folder / "output" / "answers").iterdir():
        table: pa.Table = pq.read_table(file)
        pq.write_table(table.drop_columns([ROW_HASH]), file)
    assert len(job.run(ROWS)) == len(ROWS)
    assert len(job.answers()) == len(ROWS)
