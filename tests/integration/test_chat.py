"""Test `inv chat` with several served models: which model answers, and which messages it sees."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from pretend_api import PretendApi, running

from raymill.clients import chat


@pytest.fixture
def api(tmp_path: Path) -> Iterator[PretendApi]:
    with running(tmp_path) as started:
        yield started


def converse(api: PretendApi, monkeypatch: pytest.MonkeyPatch, *typed: str) -> None:
    lines = iter([*typed, "/quit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    chat.chat(api.url, {})


def test_after_a_switch_the_other_model_sees_all_messages(
    api: PretendApi, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    converse(api, monkeypatch, "hello", "/model", "/model large", "and you?", "/model huge", "again")
    printed = capsys.readouterr().out
    assert [asked["model"] for asked in api.requests] == ["small", "large", "large"]
    assert [message["content"] for message in api.requests[1]["messages"]] == ["hello", "All is well.", "and you?"]
    assert "* small\n  large\n" in printed
    assert "  small\n* large\n" in printed
    assert "no model is named huge. Served models: small, large\n" in printed


def test_a_deleted_model_does_not_end_the_chat(
    api: PretendApi, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    api.deleted = {"large"}
    converse(api, monkeypatch, "/model large", "hello", "/model small", "hello")
    assert "the model large does not exist" in capsys.readouterr().out
    assert [asked["model"] for asked in api.requests] == ["large", "small"]
    assert [message["content"] for message in api.requests[1]["messages"]] == ["hello"]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_reasoning_is_shown_only_in_a_terminal_and_not_remembered(
    api: PretendApi, is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    api.reasoning = "Let me look."
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal)
    converse(api, monkeypatch, "hello", "again")
    printed = capsys.readouterr().out
    assert ("\033[2mLet me look.\033[0m\nAll is well.\n" in printed) == is_terminal
    assert ("Let me look." in printed) == is_terminal
    assert [message["content"] for message in api.requests[1]["messages"]] == ["hello", "All is well.", "again"]
