"""Writes the model card of a run: the README.md of a model on the Hugging Face hub, with data, settings and results."""

import math
import re
from collections.abc import Collection
from itertools import chain

from raymill.data.report import Cells
from raymill.training.history import History
from raymill.training.report import data_reports

SHOWN = {
    "eval_loss": "evaluation loss {when}",
    "eval_perplexity": "evaluation perplexity {when}",
    "eval_rewards/accuracies": "share of held-out pairs {when} whose chosen answer has the higher reward",
}


def card(run: History, title: str, license_id: str, *, is_adapter: bool, other_parts: Collection[str] = ()) -> str:
    """Return the card as Markdown. Its metadata are those of https://huggingface.co/docs/hub/model-cards.

    `other_parts` are the kinds of input besides text for which the model has parts, which are not trained.
    Paths of this machine or of your bucket are shortened to their last two parts.
    """
    base = base_model(run)
    metadata = {
        "license": license_id,
        "base_model": base,
        "library_name": "peft" if is_adapter else "transformers",
        "pipeline_tag": _pipeline(run, other_parts),
    }
    kind = "A LoRA adapter for" if is_adapter else "A fine-tuned version of"
    if run.identity.get("objective") == "reward":
        kind = "A reward model, which gives scores to answers, trained from"
    sections = {
        f"# {title}": f"{kind} {base or run.identity['model']}.{_untrained(other_parts)}",
        "## Data": _data(run),
        "## Settings": _table([{"setting": name, "value": f"{value}"} for name, value in run.identity.items()]),
        "## Results": _table(_results(run)),
    }
    lines = ["---", *(f"{name}: {value}" for name, value in metadata.items() if value), "---"]
    return "\n".join([*lines, *chain.from_iterable((title, "", text, "") for title, text in sections.items())])


def _pipeline(run: History, other_parts: Collection[str]) -> str:
    if run.identity.get("objective") == "reward":
        return "text-classification"
    return "image-text-to-text" if "vision" in other_parts else "text-generation"


def _untrained(parts: Collection[str]) -> str:
    return f" Only text was trained: the parts for {' and '.join(parts)} are those of the base model." if parts else ""


def base_model(run: History) -> str:
    """Return the hub id of the model that was fine-tuned, or "" if it is not known to be on the hub."""
    location = run.data["tokenizer"]["model"] if run.data else ""
    name = run.identity["model"].partition(" ")[0]  # without the hash of its configuration
    found = re.fullmatch(r"(?:s3://[^/]+/models/)?([\w.-]+/[\w.-]+)", location)  # a model of the hub, or its mirror
    return found[1] if found and found[1].endswith(f"/{name}") else ""


def _data(run: History) -> str:
    [*reports] = data_reports([run])
    if not reports:
        return "The run read a stream of rows."
    inputs = [row | {"input": _short(row["input"])} for row in reports[0].inputs]
    return f"{_table(inputs)}\n\n{_table(reports[0].splits)}"


def _short(source: str) -> str:
    return source if source.startswith("hf://") else "/".join(source.split("/")[-2:])


def _results(run: History) -> Cells:
    last, until = run.rows[-1], run.export["step"] if run.export else math.inf
    exported = [row for row in run.rows if row["step"] <= until]
    results = {"steps": f"{last['step']:,}{', stopped early' if run.stopped_early else ''}"}
    when = "at the end"
    if exported[-1] is not last:
        when = f"at step {until:,}"
        results["exported model"] = f"that of step {until:,}, the best by {run.ranking.title}"
    results[f"training loss {when}"] = f"{exported[-1]['loss']:.4f}"
    if evaluated := [row for row in exported if "eval_loss" in row]:
        shown = {run.ranking.metric: f"{run.ranking.title} {{when}}"} | SHOWN
        digits = {"eval_loss": 4}
        results |= {
            name.format(when=when): f"{evaluated[-1][metric]:.{digits.get(metric, 3)}f}"
            for metric, name in shown.items()
            if metric in evaluated[-1]
        }
    return [{"metric": name, "value": value} for name, value in results.items()]


def _table(rows: Cells) -> str:
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    escaped = [[cell.replace("|", "&#124;") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped)
