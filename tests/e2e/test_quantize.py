"""Test that `quantize` runs llmcompressor in an environment of its own, and that vLLM loads the result."""

import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import packed_rows
import pytest
from pyarrow.fs import copy_files

from jobs import quantize
from raymill import settings
from raymill.errors import UserError
from raymill.quantization import quantization
from raymill.quantization.options import QuantizeOptions
from raymill.ray_support import model_cache
from raymill.serving import preflight
from raymill.serving.options import ServeOptions
from raymill.training import storage

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="vLLM's CPU build exists for Linux only")

LOAD = """
import sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    engine = LLM(sys.argv[1], dtype="bfloat16", enforce_eager=True, max_model_len=64, kv_cache_memory_bytes=2**27)
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
    with pytest.raises(UserError, match="cannot load the model runs/nothing/model"):
        quantize.main(_options(assets, tmp_path, model="runs/nothing/model"))


def test_a_folder_with_other_files_is_left_alone(assets: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds other files; pass another --output"):
        quantize.main(_options(assets, tmp_path, output=str(tmp_path)))
    assert (tmp_path / "packed").is_dir()


@pytest.mark.parametrize("place", ["folder", "bucket"])
def test_an_interrupted_run_leaves_no_model(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    output = str(tmp_path / "quantized") if place == "folder" else f"{s3}/{tmp_path.name}"
    config = {"config.json": '{"quantization_config": {}}', "model.safetensors": "weights", "tokenizer.json": "{}"}
    new = _files(tmp_path / "new", config)
    quantization.replace(_files(tmp_path / "old", config | {"model-00002.safetensors": "more weights"}), output)
    for count in range(len(config)):
        with monkeypatch.context() as interrupted:
            interrupted.setattr(model_cache, "copy_file", _copy_at_most(count))
            with pytest.raises(OSError, match="the node ended"):
                quantization.replace(new, output)
        assert "config.json" not in storage.list_names(output)
        quantization.check_output(output)
    quantization.replace(new, output)
    assert {name: storage.read_text(f"{output}/{name}") for name in storage.list_names(output)} == config


def _copy_at_most(count: int) -> Callable[[Path, str], None]:
    """Return a `copy_file` that fails after `count` files."""
    copied, copy = itertools.count(), model_cache.copy_file

    def copy_some(file: Path, location: str) -> None:
        if next(copied) == count:
            raise OSError("the node ended")
        copy(file, location)

    return copy_some


def _files(folder: Path, texts: dict[str, str]) -> Path:
    """Write files into a new folder. Return the folder."""
    folder.mkdir()
    for name, text in texts.items():
        (folder / name).write_text(text)
    return folder


@pytest.mark.nightly  # the first run installs 1 GB
@pytest.mark.parametrize(("scheme", "bits"), [("W8A8", 8), ("W4A16", 4)])
def test_vllm_loads_the_quantized_model(
    ray_session: None, assets: Path, tmp_path: Path, scheme: str, bits: int
) -> None:
    quantize.main(_options(assets, tmp_path, scheme=scheme))
    model, output = assets / "model", tmp_path / "quantized"
    config = json.loads((output / "config.json").read_text())["quantization_config"]
    assert config["config_groups"]["group_0"]["weights"]["num_bits"] == bits
    assert config["quant_method"] == "compressed-tensors"
    size = (output / "model.safetensors").stat().st_size
    assert size < 0.6 * (model / "model.safetensors").stat().st_size
    serve = settings.load(ServeOptions, "serve", profile="local").model_copy(update={"model": str(output)})
    with pytest.raises(UserError, match=r"is quantized, .* Pass --dtype bfloat16"):
        preflight.check_model(serve)
    preflight.check_model(serve.model_copy(update={"dtype": "bfloat16"}))
    _generate(output, tmp_path)


@pytest.mark.nightly
def test_a_model_in_the_bucket_is_quantized_into_the_bucket(
    ray_session: None, s3: str, assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a cluster, the data and both models are in the bucket."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    folder = f"{s3}/{tmp_path.name}"
    options = _options(assets, tmp_path)
    places = {"data": f"{folder}/packed", "model": f"{folder}/models/tiny", "output": f"{folder}/models/quantized"}
    copy_files(options.data, places["data"])
    copy_files(options.model, places["model"])
    quantize.main(options.model_copy(update=places))
    assert quantization.UNFINISHED not in storage.list_names(places["output"])
    _generate(Path(model_cache.on_this_node(places["output"])), tmp_path)
    assert not (tmp_path / "quantized").exists()


@pytest.mark.nightly
def test_a_model_that_cannot_be_quantized_is_an_error(ray_session: None, assets: Path, tmp_path: Path) -> None:
    narrow = packed_rows.write_model(tmp_path / "narrow", assets, hidden_size=40, intermediate_size=80)
    with pytest.raises(UserError, match=r"\(the widths .* are no multiples of 32\. Use: --scheme W8A8\)"):
        quantize.main(_options(assets, tmp_path, model=str(narrow), scheme="W4A16"))
    assert list((tmp_path / "quantized").iterdir()) == []


def _generate(model: Path, folder: Path) -> None:
    """Load a model with vLLM, and generate four tokens."""
    (folder / "load.py").write_text(LOAD)
    command = [sys.executable, str(folder / "load.py"), str(model)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert "tokens 4" in done.stdout, done.stderr[-3000:]
