"""`inv chat` where several models are served: which one is asked, and what it has been told."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from pretend_api import PretendApi, running

from cluster import chat


@pytest.fixture
def api(tmp_path: Path) -> Iterator[PretendApi]:
    with running(tmp_path) as started:
        yield started


def converse(api: PretendApi, monkeypatch: pytest.MonkeyPatch, *typed: str) -> None:
    lines = iter([*typed, "/quit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    chat.chat(api.url, {})


def test_another_model_is_asked_and_knows_what_was_said(
    api: PretendApi, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    converse(api, monkeypatch, "hello", "/model", "/model large", "and you?", "/model huge", "again")
    printed = capsys.readouterr().out
    assert [asked["model"] for asked in api.requests] == ["small", "large", "large"]
    assert [message["content"] for message in api.requests[1]["messages"]] == ["hello", "All is well.", "and you?"]
    assert "* small\n  large\n" in printed
    assert "  small\n* large\n" in printed
    assert "no model huge is served; there is: small, large\n" in printed


def test_a_model_that_has_gone_ends_no_conversation(
    api: PretendApi, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    api.deleted = {"large"}
    converse(api, monkeypatch, "/model large", "hello", "/model small", "hello")
    assert "the model large does not exist" in capsys.readouterr().out
    assert [asked["model"] for asked in api.requests] == ["large", "small"]
    assert [message["content"] for message in api.requests[1]["messages"]] == ["hello"]
