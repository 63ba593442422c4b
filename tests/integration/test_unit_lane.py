"""Test that unit tests import neither Ray nor vLLM, and that other tests share one Ray instance."""

import subprocess
import sys
from pathlib import Path

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


def test_tests_that_run_preprocess_use_the_shared_ray() -> None:
    """Otherwise the job would start a Ray instance of its own, which the next file of the same process would find."""
    files = [file for file in Path(__file__).parent.glob("test_*.py") if "preprocess.main(" in file.read_text()]
    others = [file.name for file in files if file != Path(__file__) and "ray_session" not in file.read_text()]
    assert len(files) > 5
    assert others == []
