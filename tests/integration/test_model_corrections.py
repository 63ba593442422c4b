"""Test that what vLLM computes wrongly is corrected, and that vLLM still needs each correction."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import architectures
import pytest
import served
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import YaRNScalingRotaryEmbedding, get_rope

from raymill import settings
from raymill.model_config import text_config
from raymill.serving import app, model_corrections
from raymill.serving.options import ServeOptions

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
ROPES: dict[str, dict[str, Any]] = {
    "two scales": {"mscale": 1.0, "mscale_all_dim": 1.0},
    "two different scales": {"mscale": 0.7, "mscale_all_dim": 0.4},
    "attention factor": {"attention_factor": 1.0},
    "factor of 1": {"factor": 1.0, "attention_factor": 0.5},
    "plain": {},
}


def _config(family: str, **rope: Any) -> PreTrainedConfig:
    return architectures.config_of(family, **served.SIZES, rope_parameters=YARN | rope)


def _scale(config: PreTrainedConfig) -> float:
    """Return by what vLLM multiplies cosines and sines."""
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device="cpu"))):
        rope = get_rope(32, 64, rope_parameters=dict(text_config(config).rope_parameters))
    assert isinstance(rope, YaRNScalingRotaryEmbedding)
    return rope.mscale


@pytest.mark.parametrize("family", ["Llama", "Ministral3", "Mistral3"])
@pytest.mark.parametrize("name", ROPES)
def test_attention_is_scaled_as_in_training(name: str, family: str) -> None:
    config = _config(family, **ROPES[name])
    _, expected = ROPE_INIT_FUNCTIONS["yarn"](text_config(config), "cpu")
    # if this fails, vLLM reads the parameters itself, and does not need the correction
    assert (_scale(config) == pytest.approx(expected)) == (name == "plain")
    assert _scale(model_corrections.override({}, config)) == pytest.approx(expected)


@pytest.mark.parametrize(("rope", "scale"), [({"attn_factor": 2.0}, 2 * 1.1386), ({"apply_yarn_scaling": False}, 1.0)])
def test_parameters_that_vllm_reads_stay(rope: dict[str, Any], scale: float) -> None:
    config = _config("Ministral3", mscale=1.0, mscale_all_dim=1.0, **rope)
    assert _scale(model_corrections.override({}, config)) == pytest.approx(scale, abs=1e-4)


def test_other_models_stay_as_they_are() -> None:
    for family in architectures.FAMILIES:
        config = architectures.config_of(family)
        before = config.to_dict()
        assert model_corrections.override({}, config).to_dict() == before or family in ("GptOss", "Ministral3")


def test_queries_are_scaled_beyond_the_original_length() -> None:
    config = model_corrections.override({}, _config("Mistral3", llama_4_scaling_beta=0.1))
    assert text_config(config).llama_4_scaling == {"beta": 0.1, "original_max_position_embeddings": 16}


def test_the_users_overrides_stay() -> None:
    engine = {"hf_overrides": {"text_config": {"rope_parameters": YARN | {"attention_factor": 1.0}}, "tag": "mine"}}
    options = settings.load(ServeOptions, "serve", profile="local").model_copy(update={"engine": engine})
    config = app.engine_args(options)["hf_overrides"](_config("Mistral3"))
    assert config.tag == "mine"
    assert _scale(config) == pytest.approx(1.0)


def test_ray_passes_the_corrections_to_vllm() -> None:
    options = settings.load(ServeOptions, "serve", profile="local")
    passed = app.llm_config(options).get_engine_config().get_initialization_kwargs()
    assert _scale(passed["hf_overrides"](_config("Mistral3", attention_factor=1.0))) == pytest.approx(1.0)
    assert passed["model_class_overrides"] == model_corrections.CLASSES


@pytest.mark.parametrize(
    ("module", "error"),
    [
        # if this succeeds, vLLM does not need the correction
        pytest.param(
            "vllm.model_executor.models.mistral3",
            "cannot import name 'PixtralRotaryEmbedding'",
            marks=pytest.mark.nightly,
        ),
        (model_corrections.CLASSES["Mistral3ForConditionalGeneration"].partition(":")[0], ""),
    ],
)
def test_mistral_3_can_be_imported(module: str, error: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", f"import {module}"]
    done = subprocess.run(command, env=served.variables(tmp_path), capture_output=True, text=True)
    assert error in done.stderr
    assert bool(error) == bool(done.returncode)
