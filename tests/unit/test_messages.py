"""Test that each `inv` command in a message can be run as printed: for the right target, with options that exist."""

import ast
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
from invoke import Collection, Context, Exit
from verbs import parsed

from raymill import job_scripts, sections, settings

ONLY_LOCAL = ("raymill/local", "raymill/emulator", "raymill/demo")
"""Folders whose messages name local clusters, or belong to no verb that starts a cluster."""
CODE = [
    path
    for part in ("tasks.py", "jobs", "raymill")
    for path in sorted(
        (settings.PROJECT / part).rglob("*.py") if (settings.PROJECT / part).is_dir() else [settings.PROJECT / part]
    )
    if not str(path.relative_to(settings.PROJECT)).startswith(ONLY_LOCAL)
]
NOT_TYPED = {
    "as in `inv status`",
    "stay until `inv down`",
    "until `inv down` and `inv up`",
    "will be stored by inv up",
    "so inv up will fail",
    "other actions of inv up and inv down",
    "inv up and inv down will ask before they use it",
    "and inv up can use it until its end",
    "also while no instance runs and after inv down",
    "permissions for inv up and inv down",
    "Until it starts, inv up starts nothing",
    "the machine that ran `inv up`",
    "`inv prepare` and `inv up` write this file",
    "`inv down` removes it",
    "and as much per GB, until inv down",
    "`inv down` keeps them",
    "End the other `inv metrics`",
    "inv demo writes one",
    "inv fit has not measured",
    "inv fit, on ",
    "inv that is installing the same packages",
    "inv continues the installation",
}
"""Sentences that name a verb, but are no command to type."""
OTHER_REASONS = {
    "next, in NAME: ./inv chat   or: ./inv status   or: ./inv down": "inv demo starts a local cluster",
    "store them: inv bake": "its default target is aws, where nodes print this; they run it without any settings",
    "inv down, then inv up": "the default without a target, in job_client.py",
}
VALUE, AWS = "NAME", " --target aws"
"""Stand for values in f-strings."""


@dataclass(frozen=True)
class Message:
    """A string in the code that is no docstring."""

    place: str
    text: str


def messages(file: Path) -> Iterator[Message]:
    tree = ast.parse(file.read_text())
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            skipped.add(node.value)  # docstrings
        if isinstance(node, ast.JoinedStr):
            skipped |= {inner for inner in ast.walk(node) if inner is not node and not isinstance(inner, ast.JoinedStr)}
    for node in ast.walk(tree):
        place = f"{file.name}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.JoinedStr):
            yield Message(place, text(node))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in skipped:
            yield Message(place, node.value)


def text(node: ast.expr) -> str:
    """Return the text of a string or f-string. VALUE stands for values, and AWS for those that name the target."""
    found = ""
    for part in node.values if isinstance(node, ast.JoinedStr) else [node]:
        if isinstance(part, ast.Constant):
            found += str(part.value)
        elif ast.unparse(part).rstrip("}'").lower().endswith(("target", "target_option")):
            found += AWS.removeprefix(" --target ") if found.endswith("--target ") else AWS
        else:
            found += VALUE
    return found


ALL = [message for file in CODE for message in messages(file)]


def commands() -> Iterator[tuple[str, str]]:
    """Yield the place and the words of each command in a message, and of each call of `settings.inv`."""
    for message in ALL:
        for found in re.finditer(r"\binv (?=[a-z])", message.text):
            if not excuses(message.text, found.start(), NOT_TYPED):
                rest = message.text[found.end() :]
                yield message.place, re.split(r"   |[.,;:)`](?: |$)|`| and |, | which | \|| &&", rest, maxsplit=1)[0]
    for file in CODE:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("inv", "settings.inv"):
                values = [VALUE for _ in node.args[1:]]
                yield f"{file.name}:{node.lineno}", " ".join([text(node.args[0]), *values])


def excuses(message: str, start: int, known: Iterable[str]) -> set[str]:
    """Return the known parts of a message that contain what begins at `start`."""
    return {one for one in known if (at := message.find(one)) >= 0 and at <= start < at + len(one)}


def with_target(tasks: ModuleType) -> set[str]:
    """Return the verbs that have --target."""
    contexts = Collection.from_module(tasks).to_contexts()
    return {str(one.name) for one in contexts if "--target" in one.flags}


def test_each_message_that_names_a_verb_names_its_target(tasks: ModuleType) -> None:
    found, used = [], set()
    for message in ALL:
        for mention in re.finditer(r"\binv ([a-z-]+)(?![a-z-])", message.text):
            excused = excuses(message.text, mention.start(), (*NOT_TYPED, *OTHER_REASONS))
            used |= excused
            has_target = "--target" in re.split(r"\binv ", message.text[mention.end() :])[0]
            if mention[1] in with_target(tasks) and not has_target and not excused:
                found.append(f"{message.place}: {message.text}")
    assert not found, "\n".join(["use settings.inv for the commands in:", *found])
    assert used == NOT_TYPED | OTHER_REASONS.keys()


@pytest.mark.parametrize(("place", "command"), sorted(set(commands())))
def test_each_command_in_a_message_is_accepted_by_invoke(tasks: ModuleType, place: str, command: str) -> None:
    before, _, after = command.partition(" --" if command.endswith(" --") else " -- ")
    words = shlex.split(before)
    if words[0] == "limits" and words[-1] == VALUE and words[-2] != "--target":  # stands for several options
        words.pop()
    if words[0] not in {str(one.name) for one in Collection.from_module(tasks).to_contexts()}:
        assert words == ["faults"]  # of the template
        return
    if words == ["submit"]:  # the names of all jobs follow
        return
    verb, job = words[0], next((word for word in words[1:] if word in job_scripts.names()), None)
    parsed(tasks, words)
    if after:
        options = job_options({"submit": job, "models": "models"}[verb] or "finetune_ddp")
        for flag in re.findall(r"--([\w-]+)", after):
            assert flag.replace("-", "_") in {*options, "help"}, f"{place}: {job} has no --{flag}"


def job_options(job: str) -> sections.Keys:
    """Return the options of a job, from the `Job` in its script."""
    script = job_scripts.find(job).read_text()
    name = re.findall(r"Job\((\w+)", script)[0]
    module = re.findall(rf"^from ([\w.]+) import .*\b{name}\b", script, re.MULTILINE)[0]
    return sections.keys(f"{module}.{name}")


@pytest.mark.parametrize(
    ("target", "words", "values", "command"),
    [
        ("local", "status", (), "inv status"),
        ("aws", "status", (), "inv status --target aws"),
        (
            "rehearsal",
            "submit preprocess -- --overwrite",
            (),
            "inv submit --target rehearsal preprocess -- --overwrite",
        ),
        ("aws", "models -- --end", ("my model",), "inv models --target aws -- --end 'my model'"),
    ],
)
def test_a_command_names_the_target_and_quotes_values(
    monkeypatch: pytest.MonkeyPatch, target: str, words: str, values: tuple[str, ...], command: str
) -> None:
    monkeypatch.setenv("INV_TARGET", target)
    assert settings.inv(words, *values) == command


@pytest.mark.parametrize("target", ["local", "rehearsal", "aws"])
def test_ctrl_c_proposes_commands_for_the_same_target(
    tasks: ModuleType, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setenv("INV_TARGET", "local")
    monkeypatch.setattr("raymill.targets.get", interrupted)
    for verb in ("up", "down", "prepare", "status"):
        with pytest.raises(Exit) as end:
            getattr(tasks, verb).body(Context(), target=target)
        for command in re.findall(r": (inv .*?)(?:   |$)", str(end.value.message)):
            assert parsed(tasks, shlex.split(command)[1:])["target"] == target
        assert end.value.code == 130
