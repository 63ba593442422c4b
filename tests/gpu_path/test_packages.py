"""Test the packages of the nodes: every job prints its help, and compiled extensions find the libraries they need."""

import pytest

from gpu_path.conftest import Run
from raymill import job_scripts

EXTENSIONS = (
    "bitsandbytes",
    "deepspeed",
    "flashinfer",
    "liger_kernel.transformers",
    "ray.serve.llm",
    "vllm._C_stable_libtorch",
    "vllm._moe_C_stable_libtorch",
    "vllm.cumem_allocator",
    "vllm.vllm_flash_attn._vllm_fa2_C",
    "xgrammar",
)


@pytest.mark.parametrize("job", job_scripts.names())
def test_a_job_prints_its_help(run: Run, job: str) -> None:
    code = "import runpy, sys; module = sys.argv.pop(1); runpy.run_module(module, run_name='__main__')"
    assert run(code, f"jobs.{job}", "--help").startswith("usage:")


@pytest.mark.parametrize("name", EXTENSIONS)
def test_an_extension_loads(run: Run, name: str) -> None:
    """RTLD_NOW resolves all symbols when the extension is loaded, not when they are first used."""
    code = "import importlib, os, sys, torch; sys.setdlopenflags(os.RTLD_NOW); importlib.import_module(sys.argv[1])"
    run(code, name)
