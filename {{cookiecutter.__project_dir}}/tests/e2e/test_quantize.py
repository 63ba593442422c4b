"""Test that `quantize` runs llmcompressor in an environment of its own, and that vLLM loads the result."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import packed_rows
import pytest

import settings
from jobs import quantize
from pipeline.quantization.options import QuantizeOptions

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="vLLM's CPU build exists for Linux only")

LOAD = """
import sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    model, dtype = sys.argv[1:]
    engine = LLM(model, dtype=dtype, enforce_eager=True, max_model_len=64, kv_cache_memory_bytes=2**27)
    answer = engine.generate(["a"], SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))[0].outputs[0]
    print("tokens", len(answer.token_ids))
"""


def _options(assets: Path, folder: Path, **changes: Any) -> QuantizeOptions:
    """Return options with packed data in `folder`."""
    data = folder / "packed"
    data.mkdir()
    packed_rows.write(data, packed_rows.tokenize(assets, assets / "model", 128), assets / "model", 128, [8], 1)
    options = settings.load(QuantizeOptions, "quantize", profile="local")
    own = {"model": str(assets / "model"), "data": str(data), "output": str(folder / "quantized"), "rows": 4}
    return options.model_copy(update=own | changes)


def test_a_missing_model_is_an_error(ray_session: None, assets: Path, tmp_path: Path) -> None:
    with pytest.raises(settings.UserError, match="cannot load the model runs/nothing/model"):
        quantize.main(_options(assets, tmp_path, model="runs/nothing/model"))


def test_a_folder_with_other_files_is_left_alone(assets: Path, tmp_path: Path) -> None:
    with pytest.raises(settings.UserError, match="holds other files; pass another --output"):
        quantize.main(_options(assets, tmp_path, output=str(tmp_path)))
    assert (tmp_path / "packed").is_dir()


@pytest.mark.nightly  # the first run installs 1 GB
@pytest.mark.parametrize(("scheme", "bits", "dtype"), [("W8A8", 8, "float32"), ("W4A16", 4, "bfloat16")])
def test_vllm_loads_the_quantized_model(
    ray_session: None, assets: Path, tmp_path: Path, scheme: str, bits: int, dtype: str
) -> None:
    quantize.main(_options(assets, tmp_path, scheme=scheme))
    model, output = assets / "model", tmp_path / "quantized"
    config = json.loads((output / "config.json").read_text())["quantization_config"]
    assert config["config_groups"]["group_0"]["weights"]["num_bits"] == bits
    assert config["quant_method"] == "compressed-tensors"
    size = (output / "model.safetensors").stat().st_size
    assert size < 0.6 * (model / "model.safetensors").stat().st_size
    (tmp_path / "load.py").write_text(LOAD)
    command = [sys.executable, str(tmp_path / "load.py"), str(output), dtype]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert "tokens 4" in done.stdout, done.stderr[-3000:]
