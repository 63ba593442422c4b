"""Answers the remaining rows of an input: reads prompts, generates with vLLM, and saves answers file by file."""

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa
import ray
from ray.data import DataContext
from ray.data.exceptions import ExecutionTimeoutError
from ray.exceptions import ActorDiedError, RayTaskError

from raymill.data.row_sources import RowSource
from raymill.errors import UserError
from raymill.generation import crash_tracker, prompts, vllm_stage
from raymill.generation.answer_folder import AnswerFolder
from raymill.generation.crash_tracker import CrashTracker
from raymill.generation.options import GenerateOptions
from raymill.generation.prompts import PromptTokenizer, RemainingRows
from raymill.printable import printable
from raymill.ray_support import model_cache, ray_logging
from raymill.ray_support.progress import Progress, time_left
from raymill.serving.options import ServeOptions
from raymill.settings import inv


def recipe(options: GenerateOptions, serving: ServeOptions) -> dict[str, Any]:
    """Return the settings that determine the answer to a prompt."""
    location = model_cache.find(serving.model)
    is_folder = "://" in location or os.path.isdir(location)
    return {
        "model": location,
        "weights": model_cache.version(location) if is_folder else "",
        "dtype": serving.dtype,
        "max_model_len": serving.max_model_len,
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
    } | ({"engine": serving.engine} if serving.engine else {})


def answer_remaining(
    source: RowSource,
    answered: Mapping[str, str],
    tokenizer: PromptTokenizer,
    output: AnswerFolder,
    options: GenerateOptions,
    serving: ServeOptions,
) -> None:
    """Answer all rows that are not in `answered`, and save the answers and the bad rows.

    `answered` has the content hashes of the answered rows, keyed by id. Rows that have changed since then are answered
    again, and their old answers are removed.

    Raises:
        UserError: the input cannot be used, an engine fails or hangs, or the output cannot be written.
    """
    with DataContext.current(ray_logging.quiet_context()):
        try:
            remaining = prompts.find_remaining(source, options.id_column, answered)
            changed = f", {len(remaining.changed):,} have changed since" if remaining.changed else ""
            print(
                f"generate: {remaining.count:,} rows to answer; {len(remaining.answered):,} were answered before"
                f"{changed}",
                flush=True,
            )
            output.remove(remaining.changed)
            # start no engine if all remaining rows are bad
            if prompts.dataset(source, remaining, tokenizer, output).take(1):
                _generate(source, remaining, tokenizer, output, options, serving)
        except (RayTaskError, ActorDiedError, ExecutionTimeoutError) as error:
            raise explain(error, serving.model) from None


def print_summary(output: AnswerFolder) -> None:
    reasons = output.count_rejected()
    print(f"{reasons.total():,} rows were bad.")
    for reason, count in sorted(reasons.items()):
        print(printable(f"  {count:,}: {reason}"))
    print(f"Answers are in {output.uri}/answers, bad rows in {output.uri}/rejected.", flush=True)


def explain(error: RayTaskError | ActorDiedError | ExecutionTimeoutError, model: str) -> Exception:
    """Return a UserError if the input, a disk or an engine is the cause, otherwise `error`."""
    if isinstance(error, ExecutionTimeoutError):
        minutes = DataContext.get_current().execution_no_progress_timeout_s / 60
        return UserError(
            f"no row was answered for {minutes:.0f} minutes: the cluster has no room for an engine, or an engine hangs."
            f" Finished answers are kept. Look at {inv('status')}, then run the same command again."
        )
    if isinstance(error, ActorDiedError):
        reason = str(error).strip().splitlines()[-1]
        return UserError(
            f"an engine died ({reason}). To see why, serve the model: {inv('submit serve_llm -- --model', model)}"
        )
    if isinstance(error.cause, UserError):
        return UserError(str(error.cause).splitlines()[0])  # Ray adds its own advice on the following lines
    return error


class GenerateProgress:
    """Formats the progress line."""

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


def _generate(
    source: RowSource,
    remaining: RemainingRows,
    tokenizer: PromptTokenizer,
    output: AnswerFolder,
    options: GenerateOptions,
    serving: ServeOptions,
) -> None:
    tracker = ray.remote(num_cpus=0)(CrashTracker).remote()
    with Progress(GenerateProgress(remaining.count)) as progress:
        asked = prompts.dataset(source, remaining, tokenizer, output, progress.report)
        # split large blocks, because an engine returns a block only when all its rows are answered
        asked = asked.repartition(target_num_rows_per_block=vllm_stage.BATCH_ROWS)
        answers = vllm_stage.answer(asked, tracker, options, serving)
        saved = answers.map_batches(
            functools.partial(_count, report=progress.report), batch_size=None, batch_format="pyarrow"
        ).map_batches(functools.partial(_save, output=output), batch_size=options.rows_per_file, batch_format="pyarrow")
        try:
            for _ in saved.iter_rows():
                pass
        except ActorDiedError:
            if culprits := ray.get(tracker.culprits.remote()):
                raise UserError(crash_tracker.error_message(culprits)) from None
            raise


def _count(answers: pa.Table, report: Callable[..., Any]) -> pa.Table:
    report(answered=len(answers), tokens=sum(answers["answer_tokens"].to_pylist()))
    return answers


def _save(answers: pa.Table, output: AnswerFolder) -> pa.Table:
    output.save_answers(answers)
    return pa.table({"rows": [len(answers)]})
