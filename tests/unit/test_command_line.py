"""Test that every verb answers a wrong command line with one sentence, without a traceback."""

import inspect
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from invoke import Argument, Collection, Context, Exit
from verbs import parsed

from raymill import command_line
from raymill.emulator import sandbox


def sentence(tasks: ModuleType, words: list[str]) -> str:
    """Return the error for a command line."""
    with pytest.raises(Exit) as error:
        parsed(tasks, words)
    assert error.value.code == 1
    text = str(error.value.message)
    assert text.startswith("error: ")
    assert "\n" not in text
    return text


def arguments(tasks: ModuleType) -> list[tuple[str, list[Argument]]]:
    """Return the name and the arguments of each verb."""
    return [(str(verb.name), list(verb.args.values())) for verb in Collection.from_module(tasks).to_contexts()]


def required(found: list[Argument]) -> list[str]:
    """Return the words that a verb needs."""
    return [
        word
        for one in sorted(found, key=lambda each: not each.positional)
        if one.default is None
        for word in (["NAME"] if one.positional else [f"--{one.names[0]}", "VALUE"])
    ]


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("sumbit", "there is no verb 'sumbit'. Did you mean submit? List all: inv --list"),
        ("Status", "there is no verb 'Status'. Did you mean status? List all: inv --list"),
        ("qqq", "there is no verb 'qqq'. List all: inv --list"),
        ("x\x1b[2J", "there is no verb 'x\\x1b[2J'. List all: inv --list"),
    ],
)
def test_a_mistyped_verb_gets_the_nearest(tasks: ModuleType, typed: str, said: str) -> None:
    assert sentence(tasks, [typed, "--target", "aws"]) == f"error: {said}"


def test_a_word_that_a_verb_does_not_take_is_named(tasks: ModuleType) -> None:
    assert sentence(tasks, ["down", "aws"]) == "error: down takes no 'aws'. Run: inv down --help"
    assert sentence(tasks, ["plan", "org/model", "aws"]) == "error: plan takes no 'aws'. Run: inv plan --help"


def test_a_verb_without_what_it_needs_says_so(tasks: ModuleType) -> None:
    for name, found in arguments(tasks):
        words = required(found)
        given = parsed(tasks, [name, *words])
        inspect.signature(Collection.from_module(tasks)[name].body).bind(Context(), **given)
        assert None not in given.values()
        if name == "keys":  # it has a default action
            continue
        for one in (each for each in found if each.default is None):
            others = required([each for each in found if each is not one])
            shown = "a job" if name == "submit" else one.names[0].upper() if one.positional else f"--{one.names[0]}"
            text = sentence(tasks, [name, *others])
            assert f"{name} needs {shown}" in text
            assert f"Run: inv {name} " in text


def test_an_option_without_a_value_says_so(tasks: ModuleType) -> None:
    for name, found in arguments(tasks):
        for one in found:
            if one.takes_value and not one.positional:
                for flag in one.names:
                    option = f"{'-' * min(len(flag), 2)}{flag}"
                    words = required([each for each in found if each is not one])
                    assert f"{option} needs a value. Run: inv {name} --help" in sentence(tasks, [name, *words, option])


def test_a_word_for_a_number_is_refused_in_each_form(tasks: ModuleType) -> None:
    count = 0
    for name, found in arguments(tasks):
        for one in found:
            if one.kind is int:
                long, *short = one.names
                forms = [[f"--{long}", "x"], [f"--{long}=x"], [f"--{long}=1.5"], [f"--{long}=-1"]]
                forms += [form for each in short for form in ([f"-{each}", "x"], [f"-{each}=x"], [f"-{each}x"])]
                for form in forms:
                    assert "needs a whole number" in sentence(tasks, [name, *required(found), *form])
                    count += 1
                for form in ([f"--{long}", "12"], [f"--{long}=12"], *([f"-{each}12"] for each in short)):
                    assert parsed(tasks, [name, *required(found), *form])[str(one.name)] == 12
    assert count > 20


def test_each_verb_has_a_help(tasks: ModuleType) -> None:
    for name, found in arguments(tasks):
        for option in ("--help", "-h"):
            if option[1:] in [short for one in found for short in one.names]:
                continue  # -h of `limits` is --hours
            words = [name, option]
            verbs = Collection.from_module(tasks)
            program: Any = SimpleNamespace(core=SimpleNamespace(unparsed=words))
            command_line.normalize(program, verbs)
            assert words == [name, *(one.names[0].upper() for one in found if one.positional), option]


def test_the_help_still_describes_the_options(tasks: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """invoke removes the texts from a verb when it lists the arguments."""
    program: Any = SimpleNamespace(core=SimpleNamespace(unparsed=["submit", "--help"]))
    verbs = Collection.from_module(tasks)
    monkeypatch.setattr(verbs["submit"], "help", {"job": "one of many"})
    command_line.normalize(program, verbs)
    assert verbs["submit"].help == {"job": "one of many"}


def test_down_runs_once_inside_the_emulated_aws(tasks: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second `down` would find nothing to end, and say so."""
    runs: list[Any] = []
    monkeypatch.setattr(sandbox, "is_running", lambda: True)
    monkeypatch.setattr(sandbox, "is_inside", lambda: False)
    monkeypatch.setattr(sandbox, "run", lambda command: runs.append(command) or 0)
    monkeypatch.setattr(sandbox, "stop", lambda: [])
    tasks.down.body(Context(), target="rehearsal")
    assert len(runs) == 1
