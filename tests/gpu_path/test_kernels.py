"""Test that Triton compiles Liger's kernels for A100 and H100, with the assembler that Triton contains."""

import pytest

from gpu_path.conftest import Run

KERNELS = """
import sys
from liger_kernel.ops import cross_entropy, rms_norm, rope, swiglu
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

def build(kernel, types, constants, warps):
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in kernel.arg_names}
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    target = GPUTarget("cuda", int(sys.argv[1]), 32)
    source = ASTSource(fn=kernel, signature=signature, constexprs=values)
    print(kernel.__name__, len(compile(source, target=target, options={"num_warps": warps}).asm["cubin"]))

half, full = "*bf16", "*fp32"
build(
    rms_norm._rms_norm_forward_kernel,
    {"Y_ptr": half, "X_ptr": half, "W_ptr": full, "RSTD_ptr": full, "eps": "fp32", "offset": "fp32"},
    {"casting_mode": 0, "elementwise_affine": True, "BLOCK_SIZE": 4096},
    8,
)
build(
    swiglu._swiglu_forward_kernel,
    {"a_ptr": half, "b_ptr": half, "c_ptr": half, "gate_multiplier": "fp32"},
    {"n_cols": 12288, "BLOCK_SIZE": 16384},
    16,
)
build(
    rope._triton_rope,
    {"q_ptr": half, "k_ptr": half, "cos": half, "sin": half},
    {"bs": 1, "cos_bs": 1, "n_qh": 32, "n_kh": 8, "hd": 128, "pad_n_qh": 32, "pad_n_kh": 8, "pad_hd": 128,
     "pad_rd": 128, "rd": 128, "BLOCK_SIZE": 32, "BACKWARD_PASS": False},
    4,
)
loss = cross_entropy.liger_cross_entropy_kernel
pointers = [name for name in loss.arg_names if name.endswith("_ptr")]
types = {name: half if name == "X_ptr" else full for name in pointers}
types |= {"Y_ptr": "*i64", "predicted_tokens_ptr": "*i64", "sum_non_ignore_weight": "fp32", "weight_sum": "fp32"}
flags = ("RETURN_Z_LOSS", "RETURN_TOKEN_ACCURACY", "RETURN_PREDICTED_TOKENS", "HAS_WEIGHT", "HAS_SOFTCAPPING")
build(
    loss,
    types | {"softcap": "fp32"},
    dict.fromkeys(flags, False)
    | {"lse_square_scale": 0.0, "label_smoothing": 0.0, "reduction": "sum", "BLOCK_SIZE": 32768, "HAS_GRADIENTS": True},
    32,
)
"""


@pytest.mark.parametrize("capability", ["80", "90"])
def test_ligers_kernels_compile(run: Run, capability: str) -> None:
    built = dict(line.split() for line in run(KERNELS, capability).splitlines())
    assert len(built) == 4
    assert all(int(size) > 1000 for size in built.values())
