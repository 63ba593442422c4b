"""Test that importing the unit tests imports neither Ray nor vLLM, because these imports are slow."""

import subprocess
import sys

import bake

CODE = """
import sys
import pytest
code = pytest.main(["--collect-only", "-q", "tests/unit"])
sys.exit(code or bool({"ray", "vllm"} & set(sys.modules)))
"""


def test_unit_tests_import_neither_ray_nor_vllm() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], cwd=bake.TEMPLATE, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
