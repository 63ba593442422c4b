"""Test that `inv lm-eval` explains the errors of lm-eval. tests/e2e/test_tools.py runs the real lm-eval."""

from pathlib import Path

import pytest
from pretend_api import running
from rich.console import Console

from raymill.clients import lm_eval
from raymill.errors import UserError

UV = """#!/bin/sh
echo 'API request failed! Status code: 429, Response text: {"error": {"message": "busy"}}. Retrying...' >&2
echo 'aiohttp.client_exceptions.ClientResponseError: 429' >&2
exit 1
"""
"""Stands in for uv, and writes what lm-eval writes if the server answers with 429."""


def test_a_rate_limit_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uv = tmp_path / "uv"
    uv.write_text(UV)
    uv.chmod(0o700)
    monkeypatch.setenv("UV", str(uv))
    with running(tmp_path) as api, pytest.raises(UserError) as caught:
        lm_eval.run(api.url, {}, lm_eval.Request("greets"), Console(), tmp_path / "results")
    assert "the key's rate limit is exceeded. Raise it, then try again: inv submit serve_llm" in str(caught.value)
    [log] = (tmp_path / "results").rglob("log.txt")
    assert str(log) in str(caught.value)
    assert "Status code: 429" in log.read_text()


def test_the_questions_of_tasks_are_written_by_a_script_in_the_environment_of_lm_eval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    uv = tmp_path / "uv"
    uv.write_text("""#!/bin/sh
echo "$@" >> "$0.called"
while [ "$1" != python ]; do shift; done
test "$2" = -P && test -f "$3" && echo '{"question": "q"}' > "$5"
""")
    uv.chmod(0o700)
    monkeypatch.setenv("UV", str(uv))
    request = lm_eval.Request("evals/greets.yaml", options=("--include_path", "evals"))
    file = lm_eval.write_questions(request, tmp_path / "results")
    assert file == tmp_path / "results" / "questions" / "evals_greets.yaml.jsonl"
    assert file.read_text() == '{"question": "q"}\n'
    assert (tmp_path / "uv.called").read_text().endswith(f"evals/greets.yaml {file} --include_path evals\n")
    assert f'decontaminate = ["{file}"]' in capfd.readouterr().out
    many = lm_eval.write_questions(lm_eval.Request(",".join(f"task{n}" for n in range(100))), tmp_path / "results")
    assert many.name.startswith("task0,task1,")
    assert len(many.name) < 100
    with pytest.raises(UserError, match=r"--write-questions asks no model"):
        lm_eval.write_questions(lm_eval.Request("greets", completions=True), tmp_path / "results")
    uv.write_text(UV)
    with pytest.raises(UserError, match=r"rate limit"):
        lm_eval.write_questions(request, tmp_path / "results")


def test_a_model_that_is_not_served_is_an_error(tmp_path: Path) -> None:
    with running(tmp_path) as api, pytest.raises(UserError, match=r"absent\. Served models: small, large"):
        lm_eval.run(api.url, {}, lm_eval.Request("greets", model="absent"), Console(), tmp_path / "results")


def test_a_model_without_a_tokenizer_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROJECT_DIR", str(tmp_path))
    with running(tmp_path) as api, pytest.raises(UserError, match="so there is no tokenizer for small"):
        lm_eval.run(api.url, {}, lm_eval.Request("greets", completions=True), Console(), tmp_path / "results")
