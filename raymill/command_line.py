"""Rewrite command lines into the form that invoke accepts."""

import difflib
import shlex
import sys
from collections.abc import Iterable, Iterator
from itertools import pairwise

from invoke import Argument, Collection, Exit, ParserContext, Program

from raymill import job_scripts
from raymill.printable import printable

JOB_ID_VERBS = ("logs", "stop")
SUBMIT_OPTIONS = {"--job", "-j", "--target", "-t", "--verbose", "-v"}
HELP = {"--help", "-h"}


def normalize(program: Program, verbs: Collection) -> None:
    """Accept a job's id after `logs` and `stop`, and a name after an action of `keys`, without a flag.

    Reject an unknown verb, a missing job or option, job options before `--`, and a word where a verb expects a number.

    tasks.py has this called when it is imported: after invoke parses its own options, but before it parses the verb's.
    """
    words = program.core.unparsed if hasattr(program, "core") else []
    if words[:1] == ["drill"]:
        raise Exit("error: the fault tests are in this project's template. In its folder, run: ./inv faults", 1)
    if not words or words[0].startswith("-"):
        return
    found = {name: each for each in _contexts(verbs) for name in (str(each.name), *each.aliases)}
    verb = found.get(words[0])
    if verb is None:
        near = "".join(f" Did you mean {name}?" for name in difflib.get_close_matches(words[0], found, 1))
        raise Exit(printable(f"error: there is no verb {words[0]!r}.{near} List all: inv --list"), 1)
    arguments = list(verb.args.values())
    flags = {f"{'-' * min(len(name), 2)}{name}": argument for argument in arguments for name in argument.names}
    positions = _positional(words, flags)
    required = [argument for argument in arguments if argument.default is None and argument.positional]
    if (HELP - flags.keys()) & set(words):  # -h of `limits` is --hours
        words[1:1] = [argument.names[0].upper() for argument in required[len(positions) :]]  # or it would be --help
        return
    if words[0] == "submit" and not positions:
        raise Exit(
            f"error: submit needs a job. Run: {shlex.join(['inv', *words])} {' | '.join(job_scripts.names())}", 1
        )
    if words[0] == "submit":
        _reject_job_options(words, positions)
    elif words[0] == "keys" and len(positions) > 1:
        words.insert(positions[1], "--name")
    elif words[0] == "keys" and not positions:
        words.insert(1, "list")
    elif words[0] in JOB_ID_VERBS and positions:
        words.insert(positions[0], "--job")
    _check_options(words, flags, required)
    _refuse_more_words(words, flags, sum(argument.positional for argument in arguments), found)


def _check_options(words: list[str], flags: dict[str, Argument], required: list[Argument]) -> None:
    """Reject a missing argument or value, and a word where an option expects a number.

    `required` are the positional arguments that the verb needs.
    """
    given = list(_options(words, flags))
    missing = [argument.names[0].upper() for argument in required[len(_positional(words, flags)) :]]
    found = [argument for _, argument, _ in given]
    missing += [
        f"--{argument.names[0]}"
        for argument in dict.fromkeys(flags.values())
        if argument.default is None and not argument.positional and argument not in found
    ]
    if missing:
        raise Exit(f"error: {words[0]} needs {' and '.join(missing)}. Run: inv {words[0]} --help", 1)
    for flag, argument, value in given:
        if argument.takes_value and value is None:
            raise Exit(f"error: {flag} needs a value. Run: inv {words[0]} --help", 1)
        if argument.kind is int and value is not None and not value.isdecimal():
            raise Exit(f"error: {flag} needs a whole number, not {value!r}. Run: inv {words[0]} --help", 1)


def _refuse_more_words(words: list[str], flags: dict[str, Argument], count: int, verbs: Iterable[str]) -> None:
    """Reject a word that is neither one of the `count` positional arguments nor the next verb of several."""
    more = next((words[index] for index in _positional(words, flags)[count:]), None)
    if more is not None and more not in verbs:
        raise Exit(printable(f"error: {words[0]} takes no {more!r}. Run: inv {words[0]} --help"), 1)


def _contexts(verbs: Collection) -> list[ParserContext]:
    """Return the verbs with their arguments, and keep their help, which invoke removes from them."""
    helps = [(verb, dict(verb.help)) for verb in verbs.tasks.values()]
    contexts = verbs.to_contexts()
    for verb, texts in helps:
        verb.help = texts
    return contexts


def _options(words: list[str], flags: dict[str, Argument]) -> Iterator[tuple[str, Argument, str | None]]:
    """Yield each option of a verb: the flag, the argument, and the value. None: the value is missing.

    invoke accepts `--days 5`, `--days=5`, `-d 5` and `-d5`.
    """
    for word, after in pairwise([*words, None]):
        assert word is not None
        flag, has_value, value = word.partition("=")
        if not has_value and not word.startswith("--") and len(word) > 2:
            flag, value = word[:2], word[2:]
        if flag in flags:
            yield flag, flags[flag], value or after


def _positional(words: list[str], flags: dict[str, Argument]) -> list[int]:
    """Return the indices of the positional arguments after the verb."""
    return [
        index
        for index, (before, word) in enumerate(pairwise(words), 1)
        if not word.startswith("-") and not (before in flags and flags[before].takes_value)
    ]


def _reject_job_options(words: list[str], positions: list[int]) -> None:
    """Reject `inv submit finetune_ddp --steps 10`, and show the correct command."""
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
