"""Answers many prompts at once: vLLM engines on Ray Data, with the settings of the server and so with its answers.

python -m jobs.generate             answers the rows of [generate] in settings.toml; again: those that are left
python -m jobs.generate --help      explains every option
"""

from pipeline.generation.options import GenerateOptions
from pipeline.ray_support import cli

if __name__ == "__main__":
    cli.parse(GenerateOptions, "generate")  # before the imports below, which take seconds

import functools
import math
import os
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import ray
import ray.data
from ray.actor import ActorHandle
from ray.data import DataContext
from ray.data.exceptions import ExecutionTimeoutError
from ray.exceptions import ActorDiedError, RayTaskError

import settings
from pipeline.data import rows
from pipeline.generation import prompts, suspects
from pipeline.generation.output import Output
from pipeline.ray_support import capacity, model_cache, ray_data
from pipeline.ray_support.progress import Progress, time_left
from pipeline.serving import preflight
from pipeline.serving.options import ServeOptions
from settings import UserError

BATCH_ROWS = 32  # handed to an engine, and by it, together; several such are in it at once


def main(options: GenerateOptions) -> None:
    """Answer the prompts of all rows that are not answered yet; bad rows go aside, each with its reason."""
    serving = settings.load(ServeOptions, "serve")
    serving = serving.model_copy(update={"model": options.model or serving.model})
    preflight.check_model(serving)
    source = rows.find(settings.resolve(options.input), "generate")
    tokenize = prompts.Tokenize(serving.model, options.id_column, serving.max_model_len, options.skip_ids)
    cli.connect(log_to_driver=False)  # vLLM's start fills screens; its log files keep it
    output = Output(settings.resolve(options.output))
    _check_cluster(options, serving, source.name, output.uri)
    answered = output.begin(_recipe(options, serving), options.overwrite)
    with DataContext.current(ray_data.quiet_context()):
        try:
            found = prompts.survey(source, options.id_column, answered)
            print(f"generate: {found.rows:,} rows to do, {len(found.skipped):,} were answered before", flush=True)
            # no engine is started for bad rows alone
            if prompts.dataset(source, found, tokenize, output).take(1):
                _generate(source, found, tokenize, output, options, serving)
        except (RayTaskError, ActorDiedError, ExecutionTimeoutError) as error:
            raise _explained(error, serving.model) from None
    _print_summary(output)


def _check_cluster(options: GenerateOptions, serving: ServeOptions, source: str, output: str) -> None:
    device = "CPU" if serving.accelerator == "cpu" else "GPU"
    needs = {device: float(serving.tensor_parallel_size * serving.pipeline_parallel_size)}
    capacity.refuse_too_many_workers(options.num_workers, needs, "accelerator in [serve]")
    paths = {"input": source, "output": output, "model": serving.source}
    capacity.refuse_private_paths(paths, options.shared_paths, "generate")


def _recipe(options: GenerateOptions, serving: ServeOptions) -> dict[str, Any]:
    """What decides the answer to a prompt."""
    location = model_cache.find(serving.model)
    is_folder = "://" in location or os.path.isdir(location)
    return {
        "model": location,
        "weights": model_cache.version(location) if is_folder else "",
        "dtype": serving.dtype,
        "max_model_len": serving.max_model_len,
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
    }


def _generate(
    source: rows.Source,
    found: prompts.Survey,
    tokenize: prompts.Tokenize,
    output: Output,
    options: GenerateOptions,
    serving: ServeOptions,
) -> None:
    held = ray.remote(num_cpus=0)(suspects.Suspects).remote()
    with Progress(_Line(found.rows)) as progress:
        asked = prompts.dataset(source, found, tokenize, output, progress.report)
        # an engine hands on a block once all of it is answered, and a whole file could be one block
        answers = _answers(asked.repartition(target_num_rows_per_block=BATCH_ROWS), held, options, serving)
        saved = answers.map_batches(
            functools.partial(_count, report=progress.report), batch_size=None, batch_format="pyarrow"
        ).map_batches(functools.partial(_save, output=output), batch_size=options.rows_per_file, batch_format="pyarrow")
        try:
            for _ in saved.iter_rows():
                pass
        except ActorDiedError:
            if convicted := ray.get(held.convicted.remote()):
                raise UserError(suspects.sentence(convicted)) from None
            raise


def _answers(
    asked: ray.data.Dataset, held: ActorHandle, options: GenerateOptions, serving: ServeOptions
) -> ray.data.Dataset:
    """What vLLM makes of the prompts, by way of ray.data.llm: the engine's own words, and how many tokens they are."""
    from ray.data.llm import build_processor, vLLMEngineProcessorConfig

    from pipeline.generation import engine
    from pipeline.serving import app  # imports vLLM, now that nothing is left to refuse

    cpu = serving.accelerator == "cpu"
    bundles = [{"CPU": 1}] * serving.tensor_parallel_size * serving.pipeline_parallel_size
    config = vLLMEngineProcessorConfig(
        model_source=serving.source,
        engine_kwargs=app.engine_args(serving) | {"disable_log_stats": True},
        batch_size=BATCH_ROWS,
        max_concurrent_batches=max(8, math.ceil(2 * serving.max_num_seqs / BATCH_ROWS)),
        max_pending_requests=2 * serving.max_num_seqs,  # answers may all end at once: as many wait to take their places
        concurrency=options.num_workers,
        accelerator_type=None if cpu else serving.accelerator,
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
        preprocess_map_kwargs={"num_cpus": 0.5},  # else Ray fuses it with what cut the blocks, and joins them again
    )
    engine.watch(processor, held)
    return processor(asked)


def _sampling(options: GenerateOptions, serving: ServeOptions) -> dict[str, Any]:
    """How tokens are chosen: as the options say, and else as the model's own file does, which the server heeds too."""
    from vllm.transformers_utils.config import try_get_generation_config

    folder = model_cache.on_this_node(model_cache.find(serving.model), weights=False)
    config = try_get_generation_config(folder, trust_remote_code=False)
    own = config.to_diff_dict() if config else {}
    names = ("repetition_penalty", "top_k", "top_p", "min_p")
    chosen = {
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "stream_interval": options.max_tokens,  # nobody reads along: an answer is handed on whole
    }
    return {name: own[name] for name in names if own.get(name) is not None} | chosen


def _as_answer(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": row["id"],
        "prompt": row["prompt"],
        "answer": row["generated_text"],
        "prompt_tokens": row["num_input_tokens"],
        "answer_tokens": row["num_generated_tokens"],
    }


def _count(answers: pa.Table, report: Callable[..., Any]) -> pa.Table:
    report(answered=len(answers), tokens=sum(answers["answer_tokens"].to_pylist()))
    return answers


def _save(answers: pa.Table, output: Output) -> pa.Table:
    output.save_answers(answers)
    return pa.table({"rows": [len(answers)]})


class _Line:
    """The progress line."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._loaded_after_s = 0.0

    def __call__(self, totals: dict[str, int], seconds: float) -> str:
        answered, rejected, tokens = (totals.get(name, 0) for name in ("answered", "rejected", "tokens"))
        if not answered:
            self._loaded_after_s = seconds
            return f"generate: starting engines: {seconds:.0f} s"
        seconds -= self._loaded_after_s
        speed, left = tokens / seconds, time_left(answered, self._rows - rejected, seconds)
        return f"generate: {answered:,} of {self._rows - rejected:,} rows, {speed:,.0f} tokens/s, {left}"


def _explained(error: RayTaskError | ActorDiedError | ExecutionTimeoutError, model: str) -> Exception:
    """What to tell a person: one sentence where the input, the disk or an engine is at fault."""
    if isinstance(error, ExecutionTimeoutError):
        minutes = DataContext.get_current().execution_no_progress_timeout_s / 60
        return UserError(
            f"no row was answered for {minutes:.0f} minutes: the cluster has no room for an engine, or an engine hangs."
            " Finished answers are kept. Look at inv status, then run the same command again."
        )
    if isinstance(error, ActorDiedError):
        reason = str(error).strip().splitlines()[-1]
        return UserError(f"an engine died ({reason}); to read why, serve it: inv submit serve_llm -- --model {model}.")
    if isinstance(error.cause, UserError):
        return UserError(str(error.cause).splitlines()[0])  # Ray adds advice of its own in the lines below
    return error


def _print_summary(output: Output) -> None:
    reasons = output.reasons()
    print(f"{reasons.total():,} rows were bad.")
    for reason, count in sorted(reasons.items()):
        print(f"  {count:,}: {reason}")
    print(f"Answers are in {output.uri}/answers, bad rows in {output.uri}/rejected.", flush=True)


if __name__ == "__main__":
    cli.run(main)
