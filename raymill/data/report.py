"""Shows a data set on one self-contained HTML page, for `inv data`, and its counts for `inv report`."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import plotly.graph_objects as go
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow.fs import FileSelector, FileSystem
from rich.console import Console
from rich.table import Table

from raymill import plots, settings
from raymill.data import samples
from raymill.data.filters import language
from raymill.data.filters.options import FilterOptions
from raymill.data.packed_folder import MANIFEST
from raymill.data.samples import Sample, Samples
from raymill.errors import UserError
from raymill.printable import printable
from raymill.settings import inv

FILE = settings.PROJECT / "results" / "data.html"
TEMPLATE = "data/report.html.jinja"
RANDOM_SHOWN = 20
FILES_READ = 50  # of the rows left out, which are in random order
ROWS_SHOWN, ROW_CHARACTERS = 10, 2000  # for each reason to leave out a row
TITLE_CHARACTERS = 80
MIN_CHARACTERS = 40  # of a text whose language is told
UNCLEAR = "too short to tell"

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
        dropped = sum(map(Counter, self.manifest.get("dropped_by_reason", {}).values()), Counter[str]())
        reasons = {**self.manifest["rejected_by_reason"], **dropped, "a duplicate": self.manifest["rows_duplicate"]}
        return [
            {
                "rows left out": f"{count:,}",
                "of those read": _share(count, self.manifest["rows_read"]),
                "reason": reason,
            }
            for reason, count in sorted(reasons.items(), key=lambda pair: -pair[1])
            if count
        ]


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


class LeftOut(NamedTuple):
    """A row that is not used."""

    reason: str
    source: str
    """The input, or an empty string if it is not known."""
    kept: str
    """The key of the row that is used instead, or an empty string."""
    row: str


def draw(folder: str, console: Console) -> None:
    """Write the page about the data set in a folder, at an absolute path or URI, and print its counts.

    Raises:
        UserError: there is no complete data set, or it cannot be read.
    """
    try:
        filesystem, path = FileSystem.from_uri(folder)
        manifest = json.loads(_read(filesystem, f"{path}/{MANIFEST}"))
        found = _samples(filesystem, f"{path}/{samples.FILE}")
        left_out = [*_dropped(filesystem, path), *_rejected(filesystem, path)]
    except FileNotFoundError as error:
        raise UserError(
            f"{folder} holds no complete data set ({error}). Make one with {inv('submit preprocess')}, or pass "
            "--folder."
        ) from None
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{folder} cannot be read ({reason}). Pass another --folder.") from None
    report = DataReport(manifest["content_hash"][:12], [], manifest)
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(page(folder, report, found, left_out), encoding="utf-8")
    console.print(_table(report.splits))
    console.print(f"documents, languages and rows left out: {FILE}", soft_wrap=True, highlight=False, markup=False)


def _samples(filesystem: FileSystem, path: str) -> Samples:
    if filesystem.get_file_info(path).is_file:
        return Samples.model_validate_json(_read(filesystem, path))
    print("note: an older version made this data set, so the page shows no documents; another --output gets them")
    return Samples()


def page(folder: str, report: DataReport, found: Samples, left_out: list[LeftOut]) -> str:
    """Return the page as HTML."""
    names = [source["name"] for source in report.manifest["input"]]
    documents = {
        "Random documents": found.random[:RANDOM_SHOWN],
        "The shortest documents": found.shortest,
        "The longest documents": found.longest,
    }
    return plots.page(
        TEMPLATE,
        folder=folder,
        drawn=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        report=report,
        settings=_settings(report.manifest),
        lengths=plots.html(lengths([report]), "lengths"),
        languages=languages(found.random),
        documents={title: [_shown(one, names) for one in some] for title, some in documents.items()},
        left_out={reason: list(rows) for reason, rows in _by_reason(left_out).items()},
    )


def languages(found: Sequence[Sample]) -> Cells:
    """Return the languages of what is trained in random documents, which stand for all."""
    texts = ["".join(piece.text for piece in one.pieces if piece.is_trained) for one in found]
    codes = Counter(language.detect(text)[0] if len(text) >= MIN_CHARACTERS else UNCLEAR for text in texts)
    return [
        {"language": code, f"of {len(texts):,} documents": _share(count, len(texts))}
        for code, count in codes.most_common()
    ]


def _settings(manifest: dict[str, Any]) -> Cells:
    filters = manifest.get("filters") or {}
    defaults = FilterOptions().model_dump(mode="json") | {"user_filters": []}
    shown = {
        "model": manifest["tokenizer"]["model"],
        "tokens in a row": f"{manifest['sequence_length']:,}",
        **{
            name: manifest[name]
            for name in ("turns", "past_reasoning", "overlong", "deduplicate", "eval_share", "seed")
        },
        **{f"filters.{name}": value for name, value in filters.items() if value != defaults.get(name, value)},
    }
    return [{"setting": name, "value": str(value)} for name, value in shown.items()]


def _shown(one: Sample, names: list[str]) -> dict[str, Any]:
    is_cut = one.tokens > samples.SHOWN_TOKENS
    trained = printable("".join(piece.text for piece in one.pieces if piece.is_trained))
    beginning = f"{trained[:TITLE_CHARACTERS]}…" if len(trained) > TITLE_CHARACTERS else trained
    return {
        "title": f"{one.tokens:,} tokens, {one.trained_tokens:,} trained" + (", the beginning" if is_cut else ""),
        "trained": beginning,
        "source": names[one.source] if len(names) > 1 else "",
        "pieces": [(printable(piece.text, "\n\t"), piece.is_trained) for piece in one.pieces],
    }


def _by_reason(left_out: Iterable[LeftOut]) -> dict[str, list[LeftOut]]:
    found: dict[str, list[LeftOut]] = defaultdict(list)
    for one in left_out:
        if len(found[one.reason]) < ROWS_SHOWN:
            found[one.reason].append(one._replace(row=printable(one.row[:ROW_CHARACTERS])))
    return found


def _dropped(filesystem: FileSystem, folder: str) -> Iterator[LeftOut]:
    """Yield the rows that filters dropped."""
    for path in _files(filesystem, f"{folder}/dropped"):
        table = pq.read_table(path, filesystem=filesystem)
        for reason in table["reason"].unique():
            for row in table.filter(pc.equal(table["reason"], reason)).slice(0, ROWS_SHOWN).to_pylist():
                yield LeftOut(row["reason"], row["source"], row["kept"] or "", row["row"])


def _rejected(filesystem: FileSystem, folder: str) -> Iterator[LeftOut]:
    """Yield the bad rows."""
    for path in _files(filesystem, f"{folder}/rejected"):
        shown = Counter[str]()
        for line in _read(filesystem, path).splitlines():
            row = json.loads(line)
            shown[row["problem"]] += 1
            if shown[row["problem"]] <= ROWS_SHOWN:
                yield LeftOut(row["problem"], "", "", row["row"][:ROW_CHARACTERS])


def _files(filesystem: FileSystem, folder: str) -> list[str]:
    found = filesystem.get_file_info(FileSelector(folder, allow_not_found=True))
    return sorted(info.path for info in found)[:FILES_READ]


def _read(filesystem: FileSystem, path: str) -> bytes:
    with filesystem.open_input_file(path) as file:
        return file.read()


def _table(rows: Cells) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in rows[0]:
        table.add_column(column, header_style="dim", justify="left" if column == "split" else "right")
    for one in rows:
        table.add_row(*one.values())
    return table


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "—"
