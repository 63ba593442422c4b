"""Test that `quantize` runs llmcompressor in an environment of its own, and that vLLM loads the result."""

import json
import subprocess
import sys
from pathlib import Path

import packed_rows
import pytest

import settings
from jobs import quantize
from pipeline.quantization.options import QuantizeOptions

pytestmark = [
    pytest.mark.nightly,  # the first run installs 1 GB
    pytest.mark.skipif(sys.platform != "linux", reason="vLLM's CPU build exists for Linux only"),
]

LOAD = """
import sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    model, dtype = sys.argv[1:]
    engine = LLM(model, dtype=dtype, enforce_eager=True, max_model_len=64, kv_cache_memory_bytes=2**27)
    answer = engine.generate(["a"], SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))[0].outputs[0]
    print("tokens", len(answer.token_ids))
"""


@pytest.mark.parametrize(("scheme", "bits", "dtype"), [("W8A8", 8, "float32"), ("W4A16", 4, "bfloat16")])
def test_vllm_loads_the_quantized_model(
    ray_session: None, assets: Path, tmp_path: Path, scheme: str, bits: int, dtype: str
) -> None:
    model, data = assets / "model", tmp_path / "packed"
    data.mkdir()
    packed_rows.write(data, packed_rows.tokenize(assets, model, 128), model, 128, [8], 1)
    output = tmp_path / "quantized"
    options = settings.load(QuantizeOptions, "quantize", profile="local")
    changes = {"model": str(model), "data": str(data), "output": str(output), "scheme": scheme, "rows": 4}
    quantize.main(options.model_copy(update=changes))
    config = json.loads((output / "config.json").read_text())["quantization_config"]
    assert config["config_groups"]["group_0"]["weights"]["num_bits"] == bits
    assert config["quant_method"] == "compressed-tensors"
    size = (output / "model.safetensors").stat().st_size
    assert size < 0.6 * (model / "model.safetensors").stat().st_size
    (tmp_path / "load.py").write_text(LOAD)
    command = [sys.executable, str(tmp_path / "load.py"), str(output), dtype]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert "tokens 4" in done.stdout, done.stderr[-3000:]
