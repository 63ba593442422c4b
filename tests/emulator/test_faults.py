"""Run two fault tests, and check that the code still contains the messages that the fault tests look for."""

import ast
import importlib
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import skeleton

import bake
import faults
from faults.catalog import FAULTS, Fault
from raymill import settings
from raymill.emulator import sandbox

MIN_LETTERS = 8  # a shorter phrase could match by chance
VALUES = re.compile(r"[\w.']*\d[\w./']*|\b(?:spot|rehearsal|autoscaler)\b")
"""Values that the project's code fills into its messages."""
FOREIGN = {
    "gathered {'zone'",
    "'instance_type': '",
    "no-such-package",
    "not authorized to perform: ec2:RunInstances",
    "this is new",
}
"""Phrases from other programs, from jobs that the fault tests submit, and from code that they change."""


@pytest.mark.nightly
@pytest.mark.skipif(bool(sandbox.unsupported_reason()), reason=sandbox.unsupported_reason() or "supported")
def test_a_cluster_handles_two_faults() -> None:
    """`./inv faults` runs all fault tests, which takes an hour."""
    with skeleton.complete_project("faults") as project:
        done = subprocess.run(
            [sys.executable, "-m", "faults", "full disk,another account"],
            cwd=project,
            env=os.environ | {"PYTHONPATH": f"{project}{os.pathsep}{bake.TEMPLATE}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=3600,  # in case the tests hang
        )
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("✓") == 2


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_each_fault_has_a_test(fault: Fault) -> None:
    module, _, function = fault.test.partition(".")
    assert callable(getattr(importlib.import_module(f"faults.{module}"), function))


def constants(node: ast.AST) -> list[str]:
    return [one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str)]


def expected_phrases() -> list[str]:
    """Return the phrases that the fault tests look for in outputs, with `in` or with regular expressions."""
    texts: set[str] = set()
    for file in Path(str(faults.__file__)).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            match node:
                case ast.Compare(left=ast.Constant() | ast.JoinedStr() as text, ops=[ast.In()]):
                    texts.update(constants(text))
                case ast.Call(func=ast.Attribute(attr="findall"), args=[ast.Constant(value=str(pattern)), _]):
                    fragments = re.split(r"\.\*\??|\\[Swd][+*]|[\[(][^\])]*[\])][*+]?|\\\)", pattern)
                    texts.update(fragment.replace("\\", "") for fragment in fragments)
    phrases = {phrase.strip(" ,:") for text in texts for phrase in VALUES.split(text)}
    return sorted(phrase for phrase in phrases - FOREIGN if len(re.sub(r"\W", "", phrase)) >= MIN_LETTERS)


@pytest.mark.parametrize("phrase", expected_phrases())
def test_the_code_prints_what_the_fault_tests_look_for(phrase: str) -> None:
    """Without this test, only a run of all fault tests, which takes an hour, would show that a message has changed."""
    assert any(phrase in text for text in printed_texts())


@cache
def printed_texts() -> list[str]:
    """Return all string literals in jobs/ and raymill/."""
    folders = [settings.PROJECT / name for name in ("jobs", "raymill")]
    files = [file for folder in folders for file in folder.rglob("*.py")]
    return [text for file in files for text in constants(ast.parse(file.read_text(encoding="utf-8")))]
