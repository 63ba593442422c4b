"""Runs a model in vLLM's engine, in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

from raymill import settings

SIZES = {"hidden_size": 64, "head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
"""Sizes that vLLM's kernels for CPUs accept."""
LOGPROBS = """
import json, sys
from vllm import LLM, SamplingParams
from raymill.serving import model_corrections
folder, arguments, ids = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
arguments |= {"enforce_eager": True, "max_model_len": len(ids) + 1, "max_num_seqs": 1, "kv_cache_memory_bytes": 2**26}
engine = LLM(folder, skip_tokenizer_init=True, **arguments, **model_corrections.arguments({}))
[output] = engine.generate({"prompt_token_ids": ids}, SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False))
print(json.dumps([found[token].logprob for found, token in zip(output.prompt_logprobs[1:], ids[1:])]))
"""
VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
TORCHVISION = """
import sys
from unittest.mock import MagicMock

__version__ = "0.28.0"
for name in ("io", "transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional"):
    sys.modules[f"torchvision.{name}"] = MagicMock()
transforms = sys.modules["torchvision.transforms"]
"""
"""A stand-in, because torchvision has no build for this build of torch. For text, vLLM only imports it."""


def variables(scratch: Path) -> dict[str, str]:
    """Return the environment variables of a process that imports vLLM's composite models."""
    (scratch / "torchvision").mkdir(parents=True)
    (scratch / "torchvision" / "__init__.py").write_text(TORCHVISION)
    return os.environ | VARIABLES | {"PYTHONPATH": f"{settings.PROJECT}:{scratch}"}


def prompt_logprobs(folder: Path, ids: list[int], scratch: Path, **arguments: object) -> list[float]:
    """Return the log-probability of each token of a prompt but the first. `arguments` are vLLM's."""
    done = subprocess.run(
        [sys.executable, "-c", LOGPROBS, str(folder), json.dumps(arguments), json.dumps(ids)],
        env=variables(scratch),
        cwd=scratch,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads(done.stdout.splitlines()[-1])
