"""Test the identity of a run that depends on the user's code: what changes it, and what does not."""

import importlib.util
import sys
from pathlib import Path

import pytest

from raymill import code_identity, settings
from raymill.training import preflight
from raymill.training.ddp import DDP

SCRIPT = '''
"""A job."""
import math
from jobs import losses
from jobs.losses import focal as mine

from raymill.training.ddp import DDP

GAMMA = 2.0
OTHER = 3.0


def scaled(value):
    return GAMMA * value


class Base(DDP):
    """A base class."""

    def loss(self, batch):
        return scaled(mine(batch)) + losses.extra(batch)


class Mine(Base):
    def make_optimizer(self, model, options):
        return math.nan  # a comment


def main(options):
    print("main")
'''
LOSSES = "FACTOR = 1.0\n\ndef focal(batch):\n    return FACTOR\n\ndef extra(batch):\n    return 0\n"


def identity(
    folder: Path,
    script: str = SCRIPT,
    losses: str = LOSSES,
    name: str = "jobs.mine",
    place: str = "jobs/losses.py",
) -> str:
    """Return the identity of the class Mine in a project with this script."""
    modules = {"jobs": folder / "jobs" / "__init__.py", "jobs.losses": folder / place}
    modules["jobs.losses"].parent.mkdir(parents=True, exist_ok=True)
    modules["jobs.losses"].write_text(losses)
    (folder / "jobs" / "mine.py").write_text(script)
    modules["jobs"].touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings, "PROJECT", folder)
        for each, file in (modules | {name: folder / "jobs" / "mine.py"}).items():
            spec = importlib.util.spec_from_file_location(each, file)
            assert spec
            assert spec.loader
            module = importlib.util.module_from_spec(spec)
            patch.setitem(sys.modules, each, module)
            if "." in each:
                patch.setattr(sys.modules["jobs"], each.rpartition(".")[2], module, raising=False)
            spec.loader.exec_module(module)
        return code_identity.identify(sys.modules[name].Mine)[code_identity.KEY]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return math.nan", "return math.inf"),
        ("GAMMA = 2.0", "GAMMA = 2.5"),
        ("GAMMA * value", "value * GAMMA"),
        ("scaled(mine(batch)) +", "mine(batch) +"),
        ("import focal as mine", "import extra as mine"),
    ],
)
def test_a_change_of_the_code_changes_the_identity(tmp_path: Path, old: str, new: str) -> None:
    assert old in SCRIPT
    assert identity(tmp_path) != identity(tmp_path, SCRIPT.replace(old, new))


@pytest.mark.parametrize(("old", "new"), [("FACTOR = 1.0", "FACTOR = 1.5"), ("return 0", "return 1")])
def test_a_change_in_another_file_changes_the_identity(tmp_path: Path, old: str, new: str) -> None:
    assert identity(tmp_path) != identity(tmp_path, losses=LOSSES.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("  # a comment", ""),
        ('    """A base class."""\n\n', ""),
        ("scaled(mine(batch)) + losses", "(scaled( mine(batch) )\n            + losses"),
        ('print("main")', 'print("other")'),
        ("OTHER = 3.0", "OTHER = 4.0"),
    ],
)
def test_comments_docstrings_formatting_and_other_code_do_not_count(tmp_path: Path, old: str, new: str) -> None:
    assert old in SCRIPT
    changed = SCRIPT.replace(old, new)
    if "(scaled" in new:
        changed = changed.replace("losses.extra(batch)", "losses.extra(batch))")
    assert identity(tmp_path) == identity(tmp_path, changed)


@pytest.mark.parametrize(
    "line",
    [
        "from jobs.losses import focal as mine",
        "from .losses import focal as mine",
        "from jobs.losses import *\nmine = focal",
        "import jobs.losses\nmine = jobs.losses.focal",
        "try:\n    from jobs.losses import focal as mine\nexcept ImportError:\n    mine = None",
        "def mine(batch):\n    from jobs.losses import focal\n    return focal(batch)",
        "if True:\n    def mine(batch):\n        return losses.focal(batch)",
    ],
)
@pytest.mark.parametrize("place", ["jobs/losses.py", "jobs/losses/__init__.py"])
def test_a_changed_loss_is_seen_however_it_is_imported(tmp_path: Path, line: str, place: str) -> None:
    script = SCRIPT.replace("from jobs.losses import focal as mine", line).replace("+ losses.extra(batch)", "")
    before = identity(tmp_path, script, place=place)
    assert before != identity(tmp_path, script, LOSSES.replace("FACTOR = 1.0", "FACTOR = 1.5"), place=place)
    assert before == identity(tmp_path, script, f"# a comment\n{LOSSES}", place=place)


def test_how_the_script_was_started_does_not_count(tmp_path: Path) -> None:
    assert identity(tmp_path) == identity(tmp_path, name="__main__")


def test_runs_of_an_older_version_have_the_librarys_strategy(tmp_path: Path) -> None:
    old, mine = {"model": "a"}, {"model": "a", code_identity.KEY: "Mine (0123)"}
    preflight._refuse_another_identity(old, old | code_identity.identify(DDP), "name")
    with pytest.raises(preflight.UserError, match=r"started with code of the strategy = the library's, not Mine"):
        preflight._refuse_another_identity(old, mine, "name")
