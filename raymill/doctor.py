"""Findings of `inv doctor`, and how they are printed. Each target has its own checks."""

from dataclasses import dataclass
from typing import Literal

from rich.console import Console

from raymill.console import cell

Status = Literal["ok", "warning", "error"]
MARKS = {"ok": "[green]✓[/]", "warning": "[yellow]![/]", "error": "[bold red]✗[/]"}


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report."""

    status: Status
    """With a warning, all verbs work, perhaps with limitations. With an error, at least one verb fails."""
    text: str
    """What was found and, unless `status` is ok, what to do."""


def judge(is_ok: bool, text: str, remedy: str, otherwise: Status = "error") -> Finding:
    """Return an ok finding if `is_ok`. Otherwise, return one with status `otherwise` and the remedy after the text."""
    return Finding("ok", text) if is_ok else Finding(otherwise, f"{text}. {remedy}")


def show(findings: list[Finding], console: Console) -> bool:
    """Print findings. Return whether there are no errors."""
    for finding in findings:
        console.print(f"{MARKS[finding.status]} {cell(finding.text)}", highlight=False)
    return all(finding.status != "error" for finding in findings)
