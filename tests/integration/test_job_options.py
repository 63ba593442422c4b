"""Test that a job's command line is checked before anything slow or costly starts."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from raymill import job_scripts, settings
from raymill.settings import PROJECT

SLOW = {"torch", "ray", "transformers", "boto3"}


def type_options(job: str, *options: str, checked_for: str = "") -> subprocess.CompletedProcess[str]:
    """Run `python -m jobs.JOB OPTIONS`. Python lists the imports on stderr."""
    return _run([f"jobs.{job}", *options], {"JOB_OPTIONS_CHECKED_FOR": checked_for} if checked_for else {})


def inv(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a verb. Python lists the imports on stderr."""
    return _run(["invoke", *words], {})


def _run(words: list[str], variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-X", "importtime", "-m", *words]
    environment = os.environ | {"COLUMNS": "120"} | variables
    return subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True, check=False)


def split(stderr: str) -> tuple[set[str], str]:
    """Return the imported packages, and the rest of stderr."""
    imported = re.findall(r"^import time: .*\| +(\w+)", stderr, re.MULTILINE)
    return set(imported), re.sub(r"^import time: .*\n", "", stderr, flags=re.MULTILINE)


@pytest.mark.parametrize("job", job_scripts.names())
def test_options_are_read_before_anything_slow_is_imported(job: str) -> None:
    for options in (["--help"], ["--no-such-option"]):
        ended = type_options(job, *options)
        imported, stderr = split(ended.stderr)
        assert not imported & SLOW
        if options == ["--help"]:
            assert ended.returncode == 0
            assert ended.stdout.startswith(f"usage: python -m jobs.{job} [")
        else:
            assert ended.returncode == 1
            assert stderr.startswith("error: unknown option --no-such-option")
            assert stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--num-wrokers 4", "unknown option --num-wrokers; did you mean --num-workers? List all options: "),
        ("num_workers=4", "unknown option num_workers=4; did you mean --num-workers? List all options: "),
        ("--nonsense", "unknown option --nonsense. List all options: "),
        ("--steps many", "--steps expects INT. Details: "),
        ("--num-workers few", "--num-workers expects INT|{INT INT}. Details: "),
        ("--steps", "--steps expects INT. Details: "),
        ("--device tpu", "--device expects {cpu,cuda}. Details: "),
        ("--steps -1", "--steps: Input should be greater than or equal to 0 (found -1). Details: "),
        ("--epochs 2 --steps=3", "a run needs either steps or epochs; set one of them."),
        (
            "--epochs 2 --stream",
            "stream = true needs steps: it is not known how many rows a stream packs; set steps.",
        ),
        ("--rslora", "rslora needs adapters; set lora_rank = 16."),
        (
            "--stream --num-workers 1 2",
            "stream = true needs a fixed number of workers, not a range; set num_workers = N.",
        ),
    ],
)
def test_a_wrong_option_gives_a_one_sentence_error_with_the_command_to_type(options: str, sentence: str) -> None:
    ended = type_options("finetune_ddp", *options.split(), checked_for="inv submit finetune_ddp --")
    help_command = "inv submit finetune_ddp -- --help" if sentence.endswith(": ") else ""
    assert split(ended.stderr)[1] == f"error: {sentence}{help_command}\n"
    assert ended.returncode == 1


@pytest.mark.parametrize(
    ("engine", "sentence"),
    [
        ('{"quantisation": "fp8"}', "vLLM has no argument quantisation; did you mean quantization?"),
        ("quantization", "--engine expects JSON. Details: inv submit serve_llm -- --help"),
        ('{"quantization": "fp8"}', ""),
    ],
)
def test_arguments_of_vllm_can_be_typed_as_json(engine: str, sentence: str) -> None:
    ended = type_options("serve_llm", "--engine", engine, checked_for="inv submit serve_llm --")
    assert split(ended.stderr)[1] == (f"error: {sentence}\n" if sentence else "")
    assert ended.returncode == bool(sentence)


def test_checking_options_does_not_run_the_job() -> None:
    for options in (["--steps", "10"], ["--epochs", "2"]):  # which replaces the steps of settings.toml
        ended = type_options("finetune_ddp", *options, checked_for="inv submit finetune_ddp --")
        assert (ended.returncode, ended.stdout, split(ended.stderr)[1]) == (0, "", "")


def test_help_of_a_job_needs_no_cluster() -> None:
    ended = inv("submit", "finetune_ddp", "--", "--help")
    imported, stderr = split(ended.stderr)
    assert (ended.returncode, stderr) == (0, "")
    assert ended.stdout.startswith("usage: inv submit finetune_ddp -- [OPTIONS]\n")
    assert "--micro-batch-rows INT" in ended.stdout
    assert not imported & SLOW


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("submit", f"submit needs a job. Run: inv submit {' | '.join(job_scripts.names())}"),
        (
            "submit --target aws -- --steps 4",
            f"submit needs a job. Run: inv submit --target aws {' | '.join(job_scripts.names())}",
        ),
        (
            "submit finetune_ddp -- --num-wrokers 4",
            "unknown option --num-wrokers; did you mean --num-workers? List all options: "
            "inv submit finetune_ddp -- --help",
        ),
        (
            "submit --target aws finetune_ddp -- --learning-rate fast",
            "--learning-rate expects FLOAT. Details: inv submit --target aws finetune_ddp -- --help",
        ),
        (
            "submit finetune_ddp --num-workers 4",
            "--num-workers is an option of finetune_ddp, and job options come after --. Run: "
            "inv submit finetune_ddp -- --num-workers 4",
        ),
        (
            "submit --num-workers 4 finetune_ddp --fresh",
            "--num-workers is an option of finetune_ddp, and job options come after --. Run: "
            "inv submit finetune_ddp -- --num-workers 4 --fresh",
        ),
        (
            "submit finetune_dpp --num-workers 4",
            "--num-workers is an option of finetune_dpp, and job options come after --. Run: "
            "inv submit finetune_dpp -- --num-workers 4",
        ),
        (
            "submit finetune_ddp -t aws --steps=4 -- --fresh",
            "--steps=4 is an option of finetune_ddp, and job options come after --. Run: "
            "inv submit finetune_ddp -t aws -- --steps=4 --fresh",
        ),
        ("submit finetune_ddp --target azure", "unknown target 'azure'. Use: --target local | rehearsal | aws"),
        ("publish NAME", "publish needs --to and --license. Run: inv publish --help"),
        ("down --drain x", "--drain needs a whole number, not 'x'. Run: inv down --help"),
        ("bench --seconds abc", "--seconds needs a whole number, not 'abc'. Run: inv bench --help"),
        ("usage --days=1.5", "--days needs a whole number, not '1.5'. Run: inv usage --help"),
    ],
)
def test_a_wrong_command_line_gives_a_one_sentence_error_and_connects_to_nothing(words: str, sentence: str) -> None:
    ended = inv(*words.split())
    imported, stderr = split(ended.stderr)
    assert (ended.returncode, ended.stdout, stderr) == (1, "", f"error: {sentence}\n")
    assert not imported & SLOW


def test_help_of_submit_lists_the_jobs() -> None:
    assert "one of: check_network, embed, " in inv("submit", "--help").stdout


@pytest.mark.parametrize("words", ["logs some-job-1", "stop some-job-1", "logs -t local some-job-1", "logs"])
def test_the_id_of_a_job_needs_no_flag(words: str) -> None:
    stderr = split(inv(*words.split()).stderr)[1]
    assert "No idea what" not in stderr
    assert stderr.startswith("error: ")


def test_drill_says_where_the_fault_tests_are() -> None:
    ended = inv("drill", "--only", "limit")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert split(ended.stderr)[1].endswith("In its folder, run: ./inv faults\n")


def test_the_verbs_are_listed_before_anything_slow_is_imported() -> None:
    ended = inv("--list")
    imported, stderr = split(ended.stderr)
    assert "submit" in ended.stdout
    assert stderr == ""
    assert not imported & SLOW


def test_a_job_with_its_own_command_line_is_not_run_on_the_laptop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "PROJECT", tmp_path)
    script = tmp_path / "jobs" / "mine.py"
    script.parent.mkdir()
    script.write_text('if __name__ == "__main__":\n    open("ran", "w").close()\n')
    assert job_scripts.check("mine", ["--help"], "local"), "the job must be submitted, not run on the laptop"
    assert not (tmp_path / "ran").exists()
