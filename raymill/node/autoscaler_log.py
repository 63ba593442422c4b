"""Find refused launches and failed setups in the logs of Ray's autoscaler."""

import re
from collections import Counter
from pathlib import Path

LOGS = Path("/tmp/ray/session_latest/logs")
TAIL_BYTES = 400_000  # enough for a few hundred launches


def failed_setups(text: str, log: str) -> list[str]:
    """Return why the setup of new nodes failed, oldest failure first, with the last lines of each failed command.

    `text` is the content of monitor.out: the output of all nodes' setup commands, and Ray's own lines, which begin
    with a date. `log` is the content of monitor.log. It names the nodes that the autoscaler terminated before they were
    ready. These nodes are left out, because their setup did not fail.
    """
    not_needed = re.findall(r"RAY_INSTALLING->TERMINATING \(.*cloud_instance_id=(i-\w+)", log)
    failures: dict[str, str] = {}
    output: list[str] = []
    for line in re.sub(r"\x1b\[[\d;]*m", "", text).splitlines():
        if found := re.search(r"NodeUpdater: (i-\w+): (\w[\w ]*) failed", line):
            # Ray retries on the same node, so the last failure counts
            failures.pop(found[1], None)
            failures[found[1]] = f"{found[1]}: {found[2].lower()} failed: {' / '.join(output[-3:]) or 'no output'}"
            output = []
        elif line.strip() and not re.match(r"\d{4}-\d\d-\d\d", line):
            output.append(line.strip()[:200])
    return [failure for instance, failure in failures.items() if instance not in not_needed]


def refusals(text: str) -> list[dict[str, str]]:
    """Return the launches that AWS refused, oldest first.

    Each has the keys `type` (the node type), `at` (the time of the refusal by the head's clock), `code` and `message`
    (AWS's reason). `text` is the content of monitor.log, because the autoscaler's own report gives no reason.
    """
    line = r"(\S+ [\d:]+),\d+.*Failed to launch \d+ nodes of type (\S+): Node Launch Exception \(([\w.]+)\): (.*)"
    return [dict(zip(("at", "type", "code", "message"), found, strict=True)) for found in re.findall(line, text)]


def recent_refusals() -> list[dict[str, str]]:
    """Return the refused launches in the last TAIL_BYTES of monitor.log."""
    return refusals(tail(LOGS / "monitor.log"))


def failed_setups_by_type() -> Counter[str]:
    """Count the failed setups of each node type in the last TAIL_BYTES of monitor.log."""
    return Counter(re.findall(r"->RAY_INSTALL_FAILED \(id=[\w-]+, type=([\w.-]+),", tail(LOGS / "monitor.log")))


def tail(file: Path, size: int = TAIL_BYTES) -> str:
    """Return the last `size` bytes of a file as text, or "" if there is no such file."""
    if not file.exists():
        return ""
    with file.open("rb") as opened:
        opened.seek(max(0, file.stat().st_size - size))
        return opened.read().decode(errors="replace").strip()
