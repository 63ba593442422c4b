"""Test that vLLM, with the server's corrections, computes what transformers computes in training, for each family."""

from pathlib import Path
from typing import Any

import architectures
import pytest
import served
import torch

from raymill.serving import app
from raymill.training import weight_files

IDS = list(range(1, 31))
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
CHANGES: dict[str, dict[str, Any]] = {
    "Qwen2": {"use_sliding_window": False},  # vLLM supports a window only in all layers
    # beyond the original 16 tokens, queries are scaled
    "Ministral3": {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}},
}
CHANGES["Mistral3"] = CHANGES["Ministral3"]
NO_KERNEL = {"DeepseekV3", "GptOss", "Qwen3_5", "Qwen3_5Moe"}
"""vLLM's build for CPUs has no float32 kernels for attention sinks and Qwen's convolutions, and rotates the queries of
DeepSeek wrongly: its kernel for interleaved RoPE, unlike that for GPUs, does not know queries in three dimensions."""
FAMILIES = sorted({*architectures.FAMILIES, *architectures.COMPOSITES} - NO_KERNEL)


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
def test_the_server_computes_what_was_trained(family: str, tmp_path: Path) -> None:
    changes = {**served.SIZES, "initializer_range": 0.3, **CHANGES.get(family, {})}
    model = architectures.build(family, **changes)
    with torch.no_grad():
        for _, value in weight_files.saved_buffers(model):
            value += torch.rand_like(value)  # all ones in a new model, but not in published ones
        ids = torch.tensor([IDS])
        expected = model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    model.save_pretrained(tmp_path / "model")
    media = app.NO_MEDIA if family in architectures.COMPOSITES else {}
    found = served.prompt_logprobs(tmp_path / "model", IDS, tmp_path, dtype="float32", **media)
    torch.testing.assert_close(torch.tensor(found), expected, atol=1e-3, rtol=0)
