"""A job's command line, which is checked before anything slow or costly begins."""

import os
import re
import subprocess
import sys

import pytest

from cluster import submission
from settings import PROJECT

SLOW = {"torch", "ray", "transformers"}


def type_options(job: str, *options: str, checked_for: str = "") -> subprocess.CompletedProcess[str]:
    """`python -m jobs.JOB OPTIONS`, which tells on stderr what it imports."""
    variables = {"JOB_OPTIONS_CHECKED_FOR": checked_for} if checked_for else {}
    return subprocess.run(
        [sys.executable, "-X", "importtime", "-m", f"jobs.{job}", *options],
        cwd=PROJECT,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )


def split(stderr: str) -> tuple[set[str], str]:
    """The packages that were imported, and all else that was said."""
    imported = re.findall(r"^import time: .*\| +(\w+)", stderr, re.MULTILINE)
    return set(imported), re.sub(r"^import time: .*\n", "", stderr, flags=re.MULTILINE)


@pytest.mark.parametrize("job", submission.names())
def test_options_are_read_before_anything_slow_is_imported(job: str) -> None:
    for options in (["--help"], ["--no-such-option"]):
        ended = type_options(job, *options)
        imported, said = split(ended.stderr)
        assert not imported & SLOW
        if options == ["--help"]:
            assert ended.returncode == 0
            assert ended.stdout.startswith(f"usage: python -m jobs.{job} [")
        else:
            assert ended.returncode == 1
            assert said.startswith("error: --no-such-option is no option of this job")
            assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--num-wrokers 4", "--num-wrokers is no option of this job; did you mean --num-workers? All of them: "),
        ("num_workers=4", "num_workers=4 is no option of this job; did you mean --num-workers? All of them: "),
        ("--nonsense", "--nonsense is no option of this job. All of them: "),
        ("--steps many", "--steps takes INT; what it is for: "),
        ("--num-workers few", "--num-workers takes INT|{INT INT}; what it is for: "),
        ("--steps", "--steps takes INT; what it is for: "),
        ("--device tpu", "--device takes {cpu,cuda}; what it is for: "),
        ("--steps 0", "--steps: Input should be greater than 0 (found 0); what it takes: "),
        ("--stream --num-workers 1 2", "stream = true needs one number of workers; set num_workers = N."),
    ],
)
def test_a_wrong_option_is_one_sentence_with_the_command_to_type(options: str, sentence: str) -> None:
    ended = type_options("finetune_ddp", *options.split(), checked_for="inv submit finetune_ddp --")
    help_command = "inv submit finetune_ddp -- --help" if sentence.endswith(": ") else ""
    assert split(ended.stderr)[1] == f"error: {sentence}{help_command}\n"
    assert ended.returncode == 1


def test_options_that_are_only_checked_run_nothing() -> None:
    ended = type_options("finetune_ddp", "--steps", "10", checked_for="inv submit finetune_ddp --")
    assert (ended.returncode, ended.stdout, split(ended.stderr)[1]) == (0, "", "")
