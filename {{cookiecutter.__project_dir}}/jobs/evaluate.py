"""Measures loss, perplexity, exact match, and how many generated answers end with a stop token, on held-out rows."""

from raymill.evaluation.options import EvaluateOptions
from raymill.job import Job, connect

JOB = Job(EvaluateOptions, "evaluate")  # reads the options, before the slow imports below

from raymill import settings
from raymill.errors import UserError
from raymill.evaluation import candidates, evaluation, rewards, scoring
from raymill.evaluation.candidates import Candidate
from raymill.evaluation.scoring import Metric
from raymill.ray_support import capacity
from raymill.training.dataset import PackedRows, read_manifest

METRICS: list[Metric] = []  # functions that measure something else: docs/training.md


def main(options: EvaluateOptions) -> None:
    """Measure how well models predict held-out rows. Compare each with the last model in the list."""
    paths = {"data": settings.resolve(options.data), "output": settings.resolve(options.output)}
    options = options.model_copy(update=paths)
    manifest, rows = read_manifest(options.data), len(PackedRows(options.data, "eval"))
    if not rows:
        raise UserError(f"{options.data} holds no rows for evaluation; run preprocess with a larger --eval-share.")
    found = [candidates.find(model) for model in options.models]
    for candidate in found:
        candidates.check(candidate, options.data, manifest)
    has_rewards = candidates.are_reward_models(found, manifest)
    connect()
    _check_cluster(options, found)
    if has_rewards:
        return rewards.evaluate_all(found, options, rows, manifest, METRICS)
    metrics = [*scoring.METRICS_OF_TASK[manifest.task], *METRICS]
    sums = [evaluation.evaluate(candidate, options, rows, metrics) for candidate in found]
    measured = [evaluation.from_sums(candidate, totals, metrics) for candidate, totals in zip(found, sums, strict=True)]
    evaluation.print_table(measured, sums[0])
    evaluation.save(measured, sums[0], options, manifest)


def _check_cluster(options: EvaluateOptions, found: list[Candidate]) -> None:
    device = "GPU" if options.device == "cuda" else "CPU"
    capacity.refuse_too_many_workers(options.num_workers, {device: 1}, "device in [evaluate]")
    paths = {"data": options.data, "output": options.output}
    for candidate in found:
        for location in filter(None, (candidate.model, candidate.adapter)):
            capacity.refuse_private_paths(paths | {"models": location}, options.shared_paths, "evaluate")


JOB.run(main)
