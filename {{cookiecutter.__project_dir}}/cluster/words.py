"""Reorders the words of a command line to the order that invoke accepts."""

import shlex
import sys
from itertools import pairwise

from invoke import Exit, Program

from cluster import job_scripts

TAKES_ID = ("logs", "stop")
OF_SUBMIT = {"--job", "-j", "--target", "-t", "--verbose", "-v"}
WITH_VALUE = ("--target", "-t", "--job", "-j")


def put_in_order(program: Program) -> None:
    """Let `logs` and `stop` take a job's id without a flag, and say where a job's own options belong.

    tasks.py calls this, because invoke imports it after it has read its own options and before the verb's.
    """
    words = program.core.unparsed if hasattr(program, "core") else []
    if words in (["submit", "--help"], ["submit", "-h"]):
        words.insert(1, "JOB")  # otherwise invoke takes --help for the name of a job
    elif words[:1] == ["submit"]:
        _refuse_options_of_the_job(words)
    elif words[:1] == ["drill"]:
        raise Exit("error: the fault tests are in the template that made this project. Run there: ./inv faults", 1)
    elif words and words[0] in TAKES_ID and (places := _bare(words)):
        words.insert(places[0], "--job")


def _bare(words: list[str]) -> list[int]:
    """Return the places of the words that are neither the verb, nor an option, nor an option's value."""
    return [
        place
        for place, (before, word) in enumerate(pairwise(words), 1)
        if not word.startswith("-") and before not in WITH_VALUE
    ]


def _refuse_options_of_the_job(words: list[str]) -> None:
    """Refuse `inv submit finetune_ddp --steps 10`, and say how to type it."""
    bare = _bare(words)
    theirs = [place for place, word in enumerate(words) if word.startswith("-") and word.split("=")[0] not in OF_SUBMIT]
    jobs = [place for place in bare if words[place] in job_scripts.names()]
    jobs = jobs or [place for place in bare[:1] if theirs and place < theirs[0]]  # a misspelt one
    if not jobs or not theirs:
        return
    job, first = jobs[0], theirs[0]
    if first < job:  # inv submit --steps 10 finetune_ddp
        words = [*words[:first], words[job], *words[first:job], *words[job + 1 :]]
        job, first = first, first + 1
    after = sys.argv[sys.argv.index("--") + 1 :] if "--" in sys.argv else []
    right = ["inv", *words[:first], "--", *words[first:], *after]
    problem = f"{words[first]} is an option of {words[job]}, and those come after --: {shlex.join(right)}"
    raise Exit(f"error: {problem}", 1)
