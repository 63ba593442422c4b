"""Test vLLM's engine on a fake A100, with the options of [cluster.serve] and dummy weights."""

from collections.abc import Callable

import pytest
from published_models import MODELS

from gpu_path.conftest import Run
from raymill.planner import serving
from raymill.planner.shape import shape_of

ENGINE = """
import os, sys
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1"}
os.environ |= {"VLLM_NO_USAGE_STATS": "1", "PROFILE": "cluster"}
from vllm import LLM
from raymill import settings
from raymill.serving import app
from raymill.serving.options import ServeOptions

options = settings.load(ServeOptions, "serve").model_copy(update={"enforce_eager": sys.argv[2] == "eager"})
engine = LLM(sys.argv[1], load_format="dummy", skip_tokenizer_init=True, **app.engine_args(options)).llm_engine
cache = engine.vllm_config.cache_config
print(cache.num_gpu_blocks * cache.block_size, flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("mode", ["eager", "graphs"])
def test_the_engine_has_room_for_as_many_tokens_as_planned(
    run: Run, folder_of: Callable[[str], str], mode: str
) -> None:
    planned = serving.serve(shape_of(MODELS["Qwen3-8B"]), 2, 32 * 4096, 40)
    assert planned is not None
    found = int(run(ENGINE, folder_of("Qwen3-8B"), mode, mib=39 * 1024).splitlines()[-1])
    assert planned.cache_tokens == pytest.approx(found, rel=0.1)
