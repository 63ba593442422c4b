"""Test that each target does something sensible for every method of the interface."""

import inspect

import pytest

from raymill.aws.target import Aws
from raymill.emulator import sandbox
from raymill.emulator.target import Rehearsal
from raymill.errors import UserError
from raymill.local.target import REFUSED, Local
from raymill.target import Target

METHODS = [name for name, _ in inspect.getmembers(Target, inspect.isfunction) if name != "by_default"]


def test_aws_defines_every_method() -> None:
    assert set(METHODS) <= set(vars(Aws))


@pytest.mark.parametrize("method", METHODS)
def test_local_defines_a_method_or_says_what_to_do_instead(method: str) -> None:
    assert (method in vars(Local)) != (method in REFUSED)


@pytest.mark.parametrize("method", sorted(REFUSED))
def test_a_refusal_names_what_to_do(method: str) -> None:
    needed = len(inspect.signature(getattr(Local, method)).parameters) - 1
    with pytest.raises(UserError, match=r"[Rr]un|Use") as refused:
        getattr(Local(), method)(*[None] * needed)
    assert str(refused.value) == REFUSED[method]


@pytest.mark.parametrize(("method", "starts"), [("doctor", True), ("past_jobs", False)])
def test_the_rehearsal_runs_the_verb_inside(method: str, starts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(sandbox, "start", lambda region: calls.append("start"))
    monkeypatch.setattr(sandbox, "run", lambda command: calls.append(command[2]) or 7)
    with pytest.raises(SystemExit, match="7"):
        getattr(Rehearsal(), method)()
    assert calls == (["start", "invoke"] if starts else ["invoke"])
