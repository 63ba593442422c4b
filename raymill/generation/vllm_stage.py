"""Runs vLLM engines on a Ray dataset through ray.data.llm, with the settings of the server."""

import math
from typing import Any

import ray.data
from ray.actor import ActorHandle

from raymill.generation.answer_folder import ROW_HASH
from raymill.generation.options import GenerateOptions
from raymill.ray_support import model_cache
from raymill.serving.options import ServeOptions

BATCH_ROWS = 32  # rows that an engine receives and returns together; an engine holds several batches


def answer(
    prompts: ray.data.Dataset, tracker: ActorHandle, options: GenerateOptions, serving: ServeOptions
) -> ray.data.Dataset:
    """Return the answers to prompts, with token counts. Engines report their rows to `tracker`."""
    # imported after all checks, because these modules import vLLM
    from ray.data.llm import build_processor, vLLMEngineProcessorConfig

    from raymill.generation import tracked_engine
    from raymill.serving import app

    cpu = serving.accelerator == "cpu"
    bundles = [{"CPU": 1}] * serving.tensor_parallel_size * serving.pipeline_parallel_size
    config = vLLMEngineProcessorConfig(
        model_source=serving.source,
        engine_kwargs=app.engine_args(serving) | {"disable_log_stats": True},
        batch_size=BATCH_ROWS,
        max_concurrent_batches=max(8, math.ceil(2 * serving.max_num_seqs / BATCH_ROWS)),
        max_pending_requests=2 * serving.max_num_seqs,  # enough waiting requests to replace all running ones
        concurrency=options.num_workers,
        accelerator_type=serving.accelerator_type,
        placement_group_config={"bundles": bundles} if cpu else None,  # without it, Ray asks for a GPU
        log_engine_metrics=False,
        chat_template_stage=False,
        tokenize_stage=False,
        detokenize_stage=False,
    )
    sampling = _sampling(options, serving)
    processor = build_processor(
        config,
        preprocess=lambda row: {"sampling_params": sampling},
        postprocess=_as_answer,
        # different resources from generation.py's repartition; otherwise Ray would fuse both steps and merge the blocks
        preprocess_map_kwargs={"num_cpus": 0.5},
    )
    tracked_engine.track(processor, tracker)
    return processor(prompts)


def _sampling(options: GenerateOptions, serving: ServeOptions) -> dict[str, Any]:
    """Return the sampling parameters. As in the server, defaults come from the model's generation_config.json."""
    from vllm.transformers_utils.config import try_get_generation_config

    folder = model_cache.on_this_node(model_cache.find(serving.model), weights=False)
    config = try_get_generation_config(folder, trust_remote_code=False)
    defaults = config.to_diff_dict() if config else {}
    names = ("repetition_penalty", "top_k", "top_p", "min_p")
    parameters = {
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "stream_interval": options.max_tokens,  # return each answer in one piece
    }
    return {name: defaults[name] for name in names if defaults.get(name) is not None} | parameters


def _as_answer(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": row["id"],
        ROW_HASH: row[ROW_HASH],
        "prompt": row["prompt"],
        "answer": row["generated_text"],
        "prompt_tokens": row["num_input_tokens"],
        "answer_tokens": row["num_generated_tokens"],
    }
