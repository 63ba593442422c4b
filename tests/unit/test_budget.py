"""Test what [cluster.budget] of settings.toml makes of the stack's parameters."""

from pathlib import Path

import pytest

from raymill import settings
from raymill.aws import stack_sections
from raymill.errors import UserError


def parameters(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str) -> dict[str, str]:
    file = folder / "settings.toml"
    file.write_text(text)
    monkeypatch.setattr(settings.load, "__kwdefaults__", {"profile": None, "file": file})
    return stack_sections.budget_parameters()


def test_there_is_no_budget_unless_the_settings_have_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert stack_sections.budget_parameters() == {}
    assert parameters(monkeypatch, tmp_path, "") == {}


def test_a_budget_has_an_amount_and_an_address(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = '[cluster.budget]\ndollars_per_month = 2000\nemail = "you@example.com"'
    expected = {"BudgetDollars": "2000.00", "BudgetEmail": "you@example.com"}
    assert parameters(monkeypatch, tmp_path, text) == expected


def test_a_budget_without_an_address_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a budget warns by e-mail\. Set email, or set dollars_per_month = 0"):
        parameters(monkeypatch, tmp_path, "[cluster.budget]\ndollars_per_month = 2000")
