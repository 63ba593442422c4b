"""`inv drill`: faults, one after the other, in the emulated cloud, and whether the cluster answers each as it should.

One cluster serves all rows; where one has ended it, the next starts another. Some clocks are turned, as nobody wants to
wait for them: the idle timeout of workers, the age of leases, the hours and dollars of a cluster that reaches a limit.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.table import Table

import settings
from cluster.aws.target import Aws
from cluster.emulator import scenario
from cluster.emulator.drill import heads, markets, operators, setups
from cluster.emulator.drill.stage import Stage, tell

CONSOLE = Console(highlight=False)
Body = Callable[[Stage], str]

ROWS: list[tuple[str, str, Body]] = [
    ("no spot capacity in the first zone", "the next zone", markets.first_zone_refuses),
    ("half a gang", "given back, together elsewhere", markets.half_a_gang),
    ("no spot capacity anywhere", "on demand", markets.all_spot_refuses),
    ("no capacity at all", "waits, says so, recovers", markets.everything_refuses),
    ("spot interruption in mid-training", "resumes on a replacement, with the same losses", markets.spot_interruption),
    ("spot interruption without replacement", "goes on with fewer", markets.interruption_without_replacement),
    ("eight workers", "come together in one zone", markets.eight_workers),
    ("a set-up command fails", "said within a minute, stopped after three", setups.setup_fails),
    ("another Python on a worker", "refused, and said by status", setups.other_python_on_a_worker),
    ("another Ray here", "refused by the doctor", setups.other_ray_here),
    ("no boto3 on the head", "up fails and says so; the next up mends it", setups.boto3_missing),
    ("up again", "disturbs nothing, or says what ends", operators.up_again),
    ("a permission is missing", "named", operators.permission_missing),
    ("a secret", "found nowhere", operators.secret_stays_secret),
    ("two clusters side by side", "each its own", operators.two_clusters),
    ("Ray on the head killed", "up repairs it within 3 minutes", heads.ray_on_the_head_killed),
    ("head killed in mid-training", "up repairs within 3 minutes, the job resumes", heads.head_killed),
    ("head lost for good", "workers end themselves", heads.head_lost),
    ("time limit", "the cluster ends itself", heads.time_limit),
    ("spend limit", "the cluster ends itself", heads.spend_limit),
    ("up interrupted three times", "down leaves nothing", operators.interrupted_up),
    ("bare ray up and ray down", "work, and leave the stack only", operators.bare_ray),
    ("down elsewhere, twice", "nothing is left", operators.down_twice),
]


@dataclass
class Row:
    """One fault and what came of it."""

    fault: str
    expected: str
    seconds: float = 0.0
    evidence: str = ""
    problem: str = ""


def choose(only: str) -> list[tuple[str, str, Body]]:
    """Return the rows whose fault contains a part of `only`, which commas separate; all rows if it is empty.

    Raises:
        settings.UserError: no fault contains one of the parts.
    """
    parts = [part.strip() for part in only.split(",") if part.strip()]
    for part in parts:
        if not any(part in row[0] for row in ROWS):
            raise settings.UserError(f"no fault is named like {part!r}; there are: {', '.join(row[0] for row in ROWS)}")
    return [row for row in ROWS if not parts or any(part in row[0] for part in parts)]


def run(only: str) -> None:
    """Run the rows that `choose` finds.

    Raises:
        settings.UserError: a row did not go as expected, or something is left at the end.
    """
    chosen = choose(only)
    stage, target = Stage(), Aws()
    target.prepare()
    scenario.upload_assets(stage.file)
    rows = [_run_row(stage, *row) for row in chosen]
    left = target.down()
    _show(rows)
    if wrong := [row.fault for row in rows if row.problem]:
        raise settings.UserError(f"not as expected: {'; '.join(wrong)}")
    if left:
        raise settings.UserError(f"still there after down: {', '.join(left)}")


def _run_row(stage: Stage, fault: str, expected: str, body: Body) -> Row:
    row = Row(fault, expected)
    CONSOLE.print(f"\n[bold]{fault}[/]: {expected}")
    started = time.monotonic()
    try:
        stage.set_up()
        stage.stop_jobs()
        started = time.monotonic()
        row.evidence = body(stage)
    except Exception as error:  # whatever a row meets, the rows after it are of use
        row.problem = f"{type(error).__name__}: {error}"
    finally:
        tell(faults={"no_capacity": []})
    row.seconds = time.monotonic() - started
    CONSOLE.print(f"[dim]{row.seconds:.0f} s[/] {escape(row.evidence or row.problem)}")
    return row


def _show(rows: list[Row]) -> None:
    table = Table(title="Drill", title_justify="left", title_style="bold", box=None, pad_edge=False)
    for column in ("", "fault", "took", "what came of it"):
        table.add_column(column, header_style="dim", overflow="fold", max_width=24 if column == "fault" else None)
    for row in rows:
        mark = "[bold red]✗[/]" if row.problem else "[green]✓[/]"
        told = escape(row.evidence or row.problem)
        table.add_row(mark, row.fault, f"{row.seconds:.0f} s", f"{row.expected}\n[dim]{told}[/]")
    CONSOLE.print("\n", table)


if __name__ == "__main__":
    try:
        run(sys.argv[1])
    except settings.UserError as refusal:
        sys.exit(f"error: {refusal}")
