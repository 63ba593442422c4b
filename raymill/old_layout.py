"""Finds what an upgrade from before `raymill/` left behind: files in old folders, and imports of old modules.

git moves edited files to their new places, but not files that only the project has, or files that were edited
here and deleted in the template.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from raymill import settings

MODULES = ("settings", "sections", "instance_types")
"""Modules that were at the top of the project."""
CLIENTS = ("bench", "chat", "lm_eval")
RENAMED = {
    "raymill.aws.authorized_keys": "raymill.aws.ssh",
    "raymill.aws.ssh_config": "raymill.aws.ssh",
    "raymill.aws.budget": "raymill.aws.stack_sections",
    "raymill.emulator.launch_failures": "raymill.emulator.launches",
    "raymill.emulator.launch_rules": "raymill.emulator.launches",
    "raymill.emulator.slow_ends": "raymill.emulator.consistency",
    "raymill.evaluation.results": "raymill.evaluation.evaluation",
    "raymill.evaluation.stopping": "raymill.evaluation.scoring",
    "raymill.fit": "raymill.fake_gpu.fit",
    "raymill.ray_support.gpu_section": "raymill.ray_support.aws_sections",
    "raymill.ray_support.ray_data": "raymill.ray_support.ray_logging",
    "raymill.ray_support.private.autoscaler": "raymill.ray_support.private.core",
    "raymill.ray_support.private.gcs": "raymill.ray_support.private.core",
    "raymill.ray_support.private.key_value": "raymill.ray_support.private.core",
    "raymill.ray_support.private.tune": "raymill.ray_support.private.train",
    "raymill.serving.accelerator": "raymill.serving.preflight",
    "raymill.serving.access_log": "raymill.serving.accounting",
    "raymill.serving.canary": "raymill.serving.routing_state",
    "raymill.serving.engine_hook": "raymill.serving.accounting",
    "raymill.serving.key_metrics": "raymill.serving.accounting",
    "raymill.serving.lifecycle": "raymill.serving.deploy",
    "raymill.serving.metrics_middleware": "raymill.serving.accounting",
    "raymill.serving.placement": "raymill.serving.preflight",
    "raymill.training.data_report": "raymill.training.report",
    "raymill.training.strategies": "raymill.training.strategy",  # DDP is in raymill.training.ddp
}
"""Modules that got another name, or became a part of another one, when they moved into raymill/."""
LIBRARY_TESTS = ("unit", "integration", "e2e", "clients")
"""Folders in tests/ that had the tests of the library, which are in the template now."""
COMMAND_LINE = re.compile(r"^\s*(?:from (?:pipeline|raymill)\.ray_support import .*\bcli\b|.*\bray_support\.cli\b)")
IMPORT = re.compile(r"^\s*(?:from|import) ((?:pipeline|cluster|demo|settings|sections|instance_types)\b[\w.]*)")


def notes() -> Iterator[str]:
    """Yield one sentence for each file and each import, with its new place."""
    for file in _files():
        old = file.relative_to(settings.PROJECT)
        new = Path(*new_name(".".join(old.with_suffix("").parts)).split(".")).with_suffix(old.suffix)
        if (settings.PROJECT / new).exists():
            yield f"{old} is now {new}: move your changes there, and delete {old}"
        else:
            yield f"{old} is in a folder of the old layout: move it to {new} if you need it, and else delete it"
    for folder in LIBRARY_TESTS:
        for file in sorted((settings.PROJECT / "tests" / folder).rglob("*.py")):
            old = file.relative_to(settings.PROJECT)
            fate = "move it to tests/ if it is yours, and else delete it"
            yield f"{old} is in a folder of the library's tests, which are gone: {fate}"
    for file in [*settings.PROJECT.glob("*.py"), *sorted((settings.PROJECT / "jobs").rglob("*.py"))]:
        for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            place = f"{file.relative_to(settings.PROJECT)} line {number}"
            if COMMAND_LINE.match(line):
                instead = "make a Job and end with JOB.run(main), as jobs/evaluate.py does"
                yield f"{place} imports cli, which is gone: {instead}"
            elif found := IMPORT.match(line):
                new = new_name(found[1])
                moved = [
                    f", with {name} in {RENAMED[f'{new}.{name}']}"
                    for name in re.findall(r"\w+", line.partition(" import ")[2])
                    if f"{new}.{name}" in RENAMED
                ]
                yield f"{place} imports {found[1]}, which is now {new}{''.join(moved)}"


def new_name(old: str) -> str:
    """Return the dotted name under which the library has a module or package of the old layout."""
    top, _, rest = old.partition(".")
    if top in MODULES or top == "demo":
        new = f"raymill.{old}"
    elif top == "cluster" and rest.partition(".")[0] in CLIENTS:
        new = f"raymill.clients.{rest}"
    else:
        new = f"raymill.{rest}".rstrip(".")
    return RENAMED.get(new, new)


def _files() -> Iterator[Path]:
    for folder in ("pipeline", "cluster", "demo"):
        yield from sorted((settings.PROJECT / folder).rglob("*.py"))
    for module in MODULES:
        if (file := settings.PROJECT / f"{module}.py").exists():
            yield file
