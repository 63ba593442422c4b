"""Rewrite command lines into the form that invoke accepts."""

import shlex
import sys
from itertools import pairwise

from invoke import Exit, Program

from cluster import job_scripts

JOB_ID_VERBS = ("logs", "stop")
SUBMIT_OPTIONS = {"--job", "-j", "--target", "-t", "--verbose", "-v"}
OPTIONS_WITH_VALUE = ("--target", "-t", "--job", "-j", "--name", "-n", "--days", "-d", "--models", "-m")
NUMBERS = ("--days", "--instances", "--seconds", "--tokens")


def normalize(program: Program) -> None:
    """Accept a job's id after `logs` and `stop`, and a name after an action of `keys`, without a flag.

    Reject a missing job, job options before `--`, and a word where a verb expects a number.

    tasks.py calls this when it is imported: after invoke parses its own options, but before it parses the verb's.
    """
    words = program.core.unparsed if hasattr(program, "core") else []
    _reject_words_for_numbers(words)
    if words in (["submit", "--help"], ["submit", "-h"]):
        words.insert(1, "JOB")  # otherwise invoke reads --help as the job's name
    elif words[:1] == ["submit"] and not _positional(words):
        raise Exit(f"error: submit needs a job. Run: inv submit {' | '.join(job_scripts.names())}", 1)
    elif words[:1] == ["submit"]:
        _reject_job_options(words)
    elif words[:1] == ["drill"]:
        raise Exit("error: the fault tests are in this project's template. In its folder, run: ./inv faults", 1)
    elif words[:1] == ["keys"]:
        positions = _positional(words)
        if len(positions) > 1:
            words.insert(positions[1], "--name")
        if not positions and not {"--help", "-h"} & set(words):
            words.insert(1, "list")
    elif words and words[0] in JOB_ID_VERBS and (positions := _positional(words)):
        words.insert(positions[0], "--job")


def _positional(words: list[str]) -> list[int]:
    """Return the indices of the positional arguments after the verb."""
    return [
        index
        for index, (before, word) in enumerate(pairwise(words), 1)
        if not word.startswith("-") and before not in OPTIONS_WITH_VALUE
    ]


def _reject_words_for_numbers(words: list[str]) -> None:
    """Reject `inv bench --seconds abc`, for which invoke would print a traceback."""
    for before, word in pairwise(words):
        option, _, value = word.partition("=") if word.startswith(NUMBERS) and "=" in word else (before, "=", word)
        if option in NUMBERS and not value.isdecimal():
            raise Exit(f"error: {option} needs a whole number, not {value!r}. Run: inv {words[0]} --help", 1)


def _reject_job_options(words: list[str]) -> None:
    """Reject `inv submit finetune_ddp --steps 10`, and show the correct command."""
    positions = _positional(words)
    options = [
        index for index, word in enumerate(words) if word.startswith("-") and word.split("=")[0] not in SUBMIT_OPTIONS
    ]
    jobs = [index for index in positions if words[index] in job_scripts.names()]
    jobs = jobs or [index for index in positions[:1] if options and index < options[0]]  # the name may be misspelled
    if not jobs or not options:
        return
    job, first = jobs[0], options[0]
    if first < job:  # inv submit --steps 10 finetune_ddp
        words = [*words[:first], words[job], *words[first:job], *words[job + 1 :]]
        job, first = first, first + 1
    after = sys.argv[sys.argv.index("--") + 1 :] if "--" in sys.argv else []
    command = ["inv", *words[:first], "--", *words[first:], *after]
    option = f"{words[first]} is an option of {words[job]}"
    problem = f"{option}, and job options come after --. Run: {shlex.join(command)}"
    raise Exit(f"error: {problem}", 1)
