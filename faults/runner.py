"""Run fault tests one after another inside the emulated cloud.

All tests use the same cluster. If a test stops it, the next test starts it again. Some waits are shortened: the idle
timeout of workers, the time until a lease expires, and the hours and dollars until a limit.
"""

import importlib
import sys
import time
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from faults import catalog
from faults.catalog import Fault
from faults.harness import Harness, control
from raymill.aws.target import Aws
from raymill.emulator import scenario
from raymill.errors import UserError

CONSOLE = Console(highlight=False)
STACK_S = 5
"""How long an operation on the stack takes. Many tests make the stack again."""


@dataclass
class FaultResult:
    """The outcome of one fault test."""

    fault: Fault
    seconds: float = 0.0
    summary: str = ""
    problem: str = ""
    """Empty if the test passed."""


def run(only: str) -> None:
    """Run the tests of the faults that `catalog.choose` returns for `only`.

    Raises:
        UserError: a test failed, or `down` left something behind.
    """
    faults = catalog.choose(only)
    harness, target = Harness(), Aws()
    control(stack_s=STACK_S)
    target.prepare()
    scenario.upload_assets(harness.file)
    results = [_run_fault(harness, fault) for fault in faults]
    left = target.down()
    _show(results)
    if failed := [result.fault.name for result in results if result.problem]:
        raise UserError(f"faults not handled as expected: {'; '.join(failed)}")
    if left:
        raise UserError(f"left behind after down: {', '.join(left)}")


def _run_fault(harness: Harness, fault: Fault) -> FaultResult:
    result = FaultResult(fault)
    CONSOLE.print(f"\n[bold]{fault.name}[/]: {fault.expected}")
    module, _, function = fault.test.partition(".")
    started = time.monotonic()
    try:
        harness.ensure_up()
        harness.stop_jobs()
        started = time.monotonic()
        result.summary = getattr(importlib.import_module(f"faults.{module}"), function)(harness)
    except Exception as error:  # the remaining tests still run
        result.problem = f"{type(error).__name__}: {error}"
    finally:
        control(faults={"no_capacity": []})
    result.seconds = time.monotonic() - started
    CONSOLE.print(f"[dim]{result.seconds:.0f} s[/] {escape(result.summary or result.problem)}")
    return result


def _show(results: list[FaultResult]) -> None:
    table = Table(title="Faults", title_justify="left", title_style="bold", box=None, pad_edge=False)
    for column in ("", "fault", "took", "expected, and what happened"):
        table.add_column(column, header_style="dim", overflow="fold", max_width=24 if column == "fault" else None)
    for result in results:
        mark = "[bold red]✗[/]" if result.problem else "[green]✓[/]"
        details = escape(result.summary or result.problem)
        table.add_row(mark, result.fault.name, f"{result.seconds:.0f} s", f"{result.fault.expected}\n[dim]{details}[/]")
    CONSOLE.print("\n", table)


if __name__ == "__main__":
    try:
        run(sys.argv[1])
    except UserError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
