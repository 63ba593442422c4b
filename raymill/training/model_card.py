"""Writes the model card of a run: the README.md of a model on the Hugging Face hub, with data, settings and results."""

import re
from collections.abc import Collection
from itertools import chain

from raymill.data.report import Cells
from raymill.training.history import History
from raymill.training.report import data_reports

SHOWN = {
    "eval_perplexity": "evaluation perplexity at the end",
    "eval_rewards/accuracies": "share of held-out pairs at the end whose chosen answer has the higher reward",
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
        "pipeline_tag": "image-text-to-text" if "vision" in other_parts else "text-generation",
    }
    kind = "A LoRA adapter for" if is_adapter else "A fine-tuned version of"
    sections = {
        f"# {title}": f"{kind} {base or run.identity['model']}.{_untrained(other_parts)}",
        "## Data": _data(run),
        "## Settings": _table([{"setting": name, "value": f"{value}"} for name, value in run.identity.items()]),
        "## Results": _table(_results(run)),
    }
    lines = ["---", *(f"{name}: {value}" for name, value in metadata.items() if value), "---"]
    return "\n".join([*lines, *chain.from_iterable((title, "", text, "") for title, text in sections.items())])


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
    evaluated = [row for row in run.rows if "eval_loss" in row]
    last = run.rows[-1]
    results = {"steps": f"{last['step']:,}", "training loss at the end": f"{last['loss']:.4f}"}
    if evaluated:
        results |= {
            "evaluation loss at the end": f"{evaluated[-1]['eval_loss']:.4f}",
            **{SHOWN[name]: f"{evaluated[-1][name]:.3f}" for name in SHOWN if name in evaluated[-1]},
        }
    return [{"metric": name, "value": value} for name, value in results.items()]


def _table(rows: Cells) -> str:
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    escaped = [[cell.replace("|", "&#124;") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped)
