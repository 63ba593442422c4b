"""The data section of the report: what `preprocess` counted in each dataset that the runs used."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

import plotly.graph_objects as go

from raymill.training.history import History

SPLITS = ("train", "eval")

Cells = list[dict[str, str]]
"""The rows of a table. Each row maps column names to cells."""


class DataReport(NamedTuple):
    """The counts of one dataset, as tables."""

    hash: str
    """The first characters of the dataset's content hash, as in `data` of run.json."""
    runs: list[str]
    manifest: dict[str, Any]

    @property
    def splits(self) -> Cells:
        return [{"split": split, **self._split(self.manifest[split])} for split in SPLITS]

    def _split(self, counts: dict[str, Any]) -> dict[str, str]:
        capacity = counts["rows"] * self.manifest["sequence_length"]
        return {
            "documents": f"{counts['documents']:,}",
            "cut": f"{counts['cut_documents']:,}",
            f"rows of {self.manifest['sequence_length']:,} tokens": f"{counts['rows']:,}",
            "tokens": f"{counts['tokens']:,}",
            "filled": _share(counts["tokens"], capacity),
            "trained": _share(counts["trained_tokens"], counts["tokens"]),
        }

    @property
    def inputs(self) -> Cells:
        weights = {source["name"]: source["weight"] for source in self.manifest["input"]}
        total = sum(counts["tokens"] for counts in self.manifest["sources"].values())
        return [
            {
                "input": name,
                "weight": f"{weights[name]:g}",
                "documents": f"{counts['documents']:,}",
                "tokens": f"{counts['tokens']:,}",
                "share": _share(counts["tokens"], total),
                "trained": _share(counts["trained_tokens"], counts["tokens"]),
            }
            for name, counts in self.manifest["sources"].items()
        ]

    @property
    def left_out(self) -> Cells:
        """Number of input rows that were left out, by reason. The most frequent reason comes first."""
        reasons = {**self.manifest["rejected_by_reason"], "a duplicate": self.manifest["rows_duplicate"]}
        return [
            {
                "rows left out": f"{count:,}",
                "of those read": _share(count, self.manifest["rows_read"]),
                "reason": reason,
            }
            for reason, count in sorted(reasons.items(), key=lambda pair: -pair[1])
            if count
        ]


def data_reports(runs: Iterable[History]) -> list[DataReport]:
    """Return a report for each dataset of the runs, except for streams and for data from older project versions."""
    manifests: dict[str, dict[str, Any]] = {}
    names = defaultdict(list)
    for run in runs:
        if run.data and "sources" in run.data:
            short = run.data["content_hash"][:12]
            manifests[short] = run.data
            names[short].append(run.name)
    return [DataReport(short, names[short], manifest) for short, manifest in manifests.items()]


def lengths(reports: list[DataReport]) -> go.Figure:
    """Return a histogram of the lengths of the training documents."""
    figure = go.Figure()
    for report in reports:
        counts = report.manifest["train"]["lengths"]
        total = max(1, report.manifest["train"]["documents"])
        shares = [count / total for count in counts.values()]
        figure.add_trace(go.Bar(x=[f"≤ {bound}" for bound in counts], y=shares, name=report.hash))
    bounds = sorted({int(bound) for report in reports for bound in report.manifest["train"]["lengths"]})
    figure.update_xaxes(
        title_text="tokens per document",
        categoryorder="array",
        categoryarray=[f"≤ {bound}" for bound in bounds],
    )
    figure.update_yaxes(title_text="share of documents", tickformat=".0%")
    return figure.update_layout(height=320, showlegend=len(reports) > 1)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "—"
