"""The words of a command line, put in the order in which invoke takes them."""

import shlex
import sys
from itertools import pairwise

from invoke import Exit, Program

TAKES_ID = ("logs", "stop")
OF_SUBMIT = {"--job", "-j", "--target", "-t", "--verbose", "-v"}
WITH_VALUE = ("--target", "-t", "--job", "-j")


def put_in_order(program: Program) -> None:
    """Let `logs` and `stop` take a job's id as it stands, and say where a job's own options belong.

    For tasks.py, which invoke imports between its own options and the verb's: only then are the words at hand.
    """
    words = program.core.unparsed if hasattr(program, "core") else []
    if words in (["submit", "--help"], ["submit", "-h"]):
        words.insert(1, "JOB")  # invoke would take --help for its name
    elif words[:1] == ["submit"]:
        _refuse_options_of_the_job(words)
    elif words and words[0] in TAKES_ID and (places := _bare(words)):
        words.insert(places[0], "--job")


def _bare(words: list[str]) -> list[int]:
    """Where the words stand that are neither the verb, nor an option, nor an option's value."""
    return [
        place
        for place, (before, word) in enumerate(pairwise(words), 1)
        if not word.startswith("-") and before not in WITH_VALUE
    ]


def _refuse_options_of_the_job(words: list[str]) -> None:
    """Name the right form of `inv submit finetune_ddp --steps 10`."""
    bare = _bare(words)
    theirs = [place for place, word in enumerate(words) if word.startswith("-") and word.split("=")[0] not in OF_SUBMIT]
    if not bare or not theirs or theirs[0] < bare[0]:
        return
    job, first = bare[0], theirs[0]
    after = sys.argv[sys.argv.index("--") + 1 :] if "--" in sys.argv else []
    right = ["inv", *words[:first], "--", *words[first:], *after]
    problem = f"{words[first]} is an option of {words[job]}, and those come after --: {shlex.join(right)}"
    raise Exit(f"error: {problem}", 1)
