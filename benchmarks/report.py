"""Stores results in JSON files by day, and as tables in README.md. Imports only the standard library."""

import json
import os
import platform
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
# Parts with these prefixes have their results in the serving file, all others in the training file.
SERVING = ("serving", "embed", "rag", "generate")
BEGIN, END = "<!-- ./inv bench writes from here -->", "<!-- to here -->"

Bar = dict[str, Any]
"""A measured number, its target, and whether it meets the target."""

Result = dict[str, Any]
"""What a part returns: `bars`, `rounds` and perhaps `kinds`, which become tables, and anything else to store."""


def at_least(wanted: float, what: str, measured: float) -> Bar:
    """Return a bar for a number that must be at least `wanted`."""
    return {"what": what, "measured": measured, "wanted": f"at least {wanted:g}", "kept": measured >= wanted}


def at_most(wanted: float, what: str, measured: float) -> Bar:
    """Return a bar for a number that must be at most `wanted`."""
    return {"what": what, "measured": measured, "wanted": f"at most {wanted:g}", "kept": measured <= wanted}


def keep(name: str, result: Result, folder: Path = FOLDER) -> None:
    """Store the result of one part in today's file, and rewrite all tables in README.md."""
    subject = "serving" if name.startswith(SERVING) else "training"
    file = folder / "results" / f"{date.today()}-{subject}.json"
    file.parent.mkdir(exist_ok=True)
    parts = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    parts[name] = result | {"date": str(date.today()), "machine": machine()}
    file.write_text(json.dumps(parts, indent=1) + "\n", encoding="utf-8")
    readme = folder / "README.md"
    before, _, rest = readme.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    tables = "\n".join(line for part in _latest(folder).values() for line in section(part))
    readme.write_text(f"{before}{BEGIN}\n{tables}\n{END}{after}", encoding="utf-8")


def section(part: Result) -> Iterator[str]:
    """Yield the lines of README.md that show the result of one part."""
    yield f"\n### {part['title']}"
    versions = ", ".join(f"{package} {version}" for package, version in part["versions"].items())
    yield f"{part['date']}, {part['commit']}, {part['machine']}; {versions}; {part['seconds']:.0f} s in all.\n"
    yield from _table(
        [
            {
                "what": bar["what"],
                "measured": _number(bar["measured"]) if bar["kept"] else f"**{_number(bar['measured'])}, missed**",
                "wanted": bar["wanted"],
            }
            for bar in part["bars"]
        ]
    )
    yield ""
    yield from _table(part["rounds"])
    if kinds := part.get("kinds"):
        yield ""
        yield from _table(kinds)


def machine() -> str:
    """Return a description of the processor, cores and main memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} cores of {_processor()}, {memory:.0f} GiB"


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def _latest(folder: Path) -> dict[str, Result]:
    """Return the latest result of each part."""
    parts: dict[str, Result] = {}
    for file in sorted((folder / "results").glob("*.json")):
        parts |= json.loads(file.read_text(encoding="utf-8"))
    return parts


def _table(rows: list[dict[str, Any]]) -> Iterator[str]:
    for number, row in enumerate(rows):
        if number == 0:
            yield f"| {' | '.join(row)} |"
            yield "|---" * len(row) + "|"
        yield f"| {' | '.join(_number(value) for value in row.values())} |"


def _number(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
