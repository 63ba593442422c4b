"""Show what each API key used, from the access logs of the served models. `inv usage` runs this."""

import datetime
import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from raymill.console import cell
from raymill.errors import UserError
from raymill.status import empty_table

DEFAULT_DAYS = 7


@dataclass
class Usage:
    """What a key used of a model."""

    requests: int = 0
    errors: int = 0
    """Requests that ended with status 400 or above."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    last: str = ""
    """Time of the last request, in ISO format and UTC."""

    def add(self, line: dict[str, Any]) -> None:
        """Add a line of an access log."""
        self.requests += 1
        self.errors += line["status"] >= 400
        self.prompt_tokens += line["prompt_tokens"]
        self.completion_tokens += line["completion_tokens"]
        self.last = max(self.last, line["time"])


def start(days: int, since: str) -> datetime.datetime:
    """Return the start of the period that `--days` or `--since` names: by default, the last DEFAULT_DAYS days.

    Raises:
        UserError: both are given, or one of them is not valid.
    """
    if days and since:
        raise UserError("--days and --since are both given. Use only one of them")
    if days < 0:
        raise UserError(f"--days is {days}. Use a positive number, such as --days {DEFAULT_DAYS}")
    if not since:
        return datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=days or DEFAULT_DAYS)
    try:
        return datetime.datetime.fromisoformat(since).astimezone(datetime.UTC)
    except ValueError:
        raise UserError(f"--since is {since!r}. Use a date, such as --since 2026-01-31") from None


def show(logs: Iterable[str], since: datetime.datetime, console: Console) -> None:
    """Print a table of the requests since then. `logs` are the texts of access logs."""
    usages = collect(logs, since.isoformat(timespec="milliseconds"))
    if not usages:
        console.print(f"nothing was served since {since.astimezone():%Y-%m-%d %H:%M}")
        return
    names = ("requests", "errors", "prompt tokens", "completion tokens")
    table = empty_table(f"Usage since {since.astimezone():%Y-%m-%d %H:%M}", "key", "model", *names, "last use")
    for column in table.columns[2:-1]:
        column.justify = "right"
    for (key, model), usage in sorted(usages.items()):
        numbers = (usage.requests, usage.errors, usage.prompt_tokens, usage.completion_tokens)
        last = datetime.datetime.fromisoformat(usage.last).astimezone()
        table.add_row(cell(key), cell(model or "-"), *(f"{one:,}" for one in numbers), f"{last:%Y-%m-%d %H:%M}")
    console.print(table)


def collect(logs: Iterable[str], since: str) -> dict[tuple[str, str], Usage]:
    """Return what each pair of key and model used since a time in the format of the log.

    Only POST requests count. A line that is cut off is skipped: the end of a log may be copied while it is written.
    """
    usages: defaultdict[tuple[str, str], Usage] = defaultdict(Usage)
    for text in logs:
        for row in text.splitlines():
            try:
                line = json.loads(row)
            except ValueError:
                continue
            if line["time"] >= since and line["route"].startswith("POST "):
                usages[line["key"], line["model"]].add(line)
    return usages
