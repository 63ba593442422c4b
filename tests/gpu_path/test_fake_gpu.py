"""Test the fake GPU: what torch, Triton and Inductor see, and that it counts each byte of its memory."""

import json

import pytest

from gpu_path.conftest import Run

MEMORY = """
import json, resource, torch
seen = {"name": torch.cuda.get_device_name(), "free": torch.cuda.mem_get_info()[0]}
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
held = torch.empty(30 << 30, dtype=torch.uint8, device="cuda")
seen["allocated"] = torch.cuda.memory_allocated()
seen["main memory, MiB"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
try:
    torch.empty(12 << 30, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError as error:
    seen["refused"] = str(error)
del held
seen["afterwards"] = torch.empty(12 << 30, dtype=torch.uint8, device="cuda").numel()
print(json.dumps(seen))
"""

EXPANDABLE = """
import json, os, sys, torch
os.environ["PYTORCH_ALLOC_CONF"] = f"expandable_segments:{sys.argv[1]}"  # read when CUDA starts
take = lambda gib: torch.empty(int(gib * 2**30), dtype=torch.uint8, device="cuda")
free = lambda: torch.cuda.mem_get_info()[0]
unused = []
for tenths in range(10, 20):  # without expandable segments, each tensor gets a new block, and the old block stays
    held = take(tenths / 10)
    unused.append(torch.cuda.memory_reserved() - torch.cuda.memory_allocated())
    del held
seen = {"unused": unused, "mapped": 40 * 2**30 - free() == torch.cuda.memory_reserved()}
held = take(30)
try:
    take(12)
except torch.OutOfMemoryError as error:
    seen["refused"] = str(error)
del held
seen["afterwards"] = take(39).numel()
torch.cuda.empty_cache()
seen["free"] = free()
print(json.dumps(seen))
"""

REFUSED = """
import torch
from raymill.training import cuda_allocator

cuda_allocator.use_expandable_segments(torch.device("cuda"))
print(torch.empty(30 << 30, dtype=torch.uint8, device="cuda").numel())
"""

RESULT = """
import torch
torch.tensor([True], device="cuda")
print(torch.zeros(1, dtype=torch.bool, device="cuda").item())  # in the same place, which would still hold True
"""

COMPILED = """
import torch

@torch.compile
def softmax_of_product(a, b):
    return torch.softmax(a @ b + 1, dim=-1)

a = torch.ones(64, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
softmax_of_product(a, torch.ones(4096, 128, device="cuda", dtype=torch.bfloat16)).sum().backward()
print(tuple(a.grad.shape))
"""


def test_each_byte_is_counted_and_takes_no_main_memory(run: Run) -> None:
    seen = json.loads(run(MEMORY))
    assert seen["name"] == "NVIDIA A100-SXM4-40GB"
    assert seen["free"] == 40 << 30
    assert seen["allocated"] == 30 << 30
    assert seen["main memory, MiB"] < 200
    assert "40.00 GiB" in seen["refused"]
    assert seen["afterwards"] == 12 << 30


def test_expandable_segments_grow_in_small_steps(run: Run) -> None:
    seen = json.loads(run(EXPANDABLE, "True"))
    assert max(seen["unused"]) <= 20 << 20
    assert seen["mapped"]
    assert "12.00 GiB. GPU 0 has a total capacity of 40.00 GiB" in seen["refused"]
    assert seen["afterwards"] == 39 << 30
    assert seen["free"] == 40 << 30
    assert json.loads(run(EXPANDABLE, "False"))["unused"][-1] > 10 << 30


def test_training_uses_ordinary_segments_if_the_gpu_refuses_others(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(REFUSED).split() == [str(30 << 30)]
    monkeypatch.setenv("FAKE_GPU_FABRIC", "0")
    note, size = run(REFUSED).splitlines()
    assert note.startswith("note: training uses no expandable segments")
    assert int(size) == 30 << 30


def test_the_result_of_a_check_is_false(run: Run) -> None:
    assert run(RESULT).split() == ["False"]


def test_inductor_and_triton_compile_for_the_fake_gpu(run: Run) -> None:
    assert run(COMPILED).splitlines()[-1] == "(64, 4096)"


@pytest.mark.parametrize("mib", [40 * 1024, 80 * 1024])
def test_the_fake_gpu_has_the_requested_memory(run: Run, mib: int) -> None:
    code = "import torch; print(torch.cuda.mem_get_info()[1] >> 20)"
    assert run(code, mib=mib).split() == [str(mib)]
