"""Print what `preprocess` found in an input, and examples with their trained tokens, before the work starts."""

import contextlib
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pyarrow.parquet as pq
from pyarrow.fs import FileSelector, FileSystem
from rich.console import Console
from rich.text import Text

from raymill.data import row_sources, samples
from raymill.data.examples import BadRow
from raymill.data.filters.gate import Gate
from raymill.data.row_sources import Head, RowSource
from raymill.data.tokenization import DocumentTokenizer, TokenizedDocument
from raymill.printable import printable

HEAD_ROWS = 100  # read before the work starts
ROWS_SHOWN, ROW_CHARACTERS = 3, 100


def show(source: RowSource, tokenizer: DocumentTokenizer, examples: int, gate: Gate | None = None) -> None:
    """Print the formats and first rows of a source, and its first `examples` documents, as `gate` changes them.

    Raises:
        UserError: no row can be used.
    """
    head = row_sources.head(source, max(examples, HEAD_ROWS))
    if gate:
        head = head._replace(rows=gate.filter_head(head.rows))
    _show_rows(head, source)
    _show_documents(head.rows, examples, tokenizer)


def _show_rows(head: Head, source: RowSource) -> None:
    unused = f"; not used: {', '.join(head.unused)}" if head.unused else ""
    print(printable(f"{source.name}: {' and '.join(head.formats)}{unused}"))
    for row in head.rows[:ROWS_SHOWN]:
        text = row["row"].decode(errors="replace")
        print(printable(f"  {row['problem'] or _dropped(row) or 'row'}: {_short(text)}"))


def _show_documents(rows: list[dict[str, Any]], count: int, tokenizer: DocumentTokenizer) -> None:
    """Print documents with the trained tokens in green."""
    # a submitted job's log is not a terminal, but users read the log in a terminal
    console = Console(force_terminal=True, soft_wrap=True)
    for number, document in enumerate(islice(_documents(rows, tokenizer), count), 1):
        console.print(Text(f"example {number} ({_which(number, document, tokenizer)}green: trained)", style="bold"))
        console.print(_colored(document, tokenizer))


def _which(number: int, document: TokenizedDocument, tokenizer: DocumentTokenizer) -> str:
    if tokenizer.task == "preference":
        return ("chosen, ", "rejected, ")[(number - 1) % 2]
    return "" if document.is_good is None else ("bad, ", "good, ")[document.is_good]


def _documents(rows: list[dict[str, Any]], tokenizer: DocumentTokenizer) -> Iterator[TokenizedDocument]:
    for row in rows:
        if _dropped(row):
            continue
        with contextlib.suppress(BadRow):
            yield from tokenizer.documents(row)


def show_dropped(output: str, count: int) -> None:
    """Print up to `count` rows that filters dropped, with the reasons."""
    if not count:
        return
    filesystem, folder = FileSystem.from_uri(output)
    found = filesystem.get_file_info(FileSelector(f"{folder}/dropped", allow_not_found=True))
    for info in sorted(found, key=lambda info: info.path):
        rows = pq.read_table(info.path, filesystem=filesystem).slice(0, count).to_pylist()
        for row in rows:
            print(printable(f"  dropped ({row['reason']}): {_short(row['row'])}"))
        count -= len(rows)


def _dropped(row: dict[str, Any]) -> str:
    return f"dropped ({row['dropped']})" if row.get("dropped") else ""


def _colored(document: TokenizedDocument, tokenizer: DocumentTokenizer) -> Text:
    text = Text()
    for piece in samples.pieces(document.input_ids.tolist(), document.labels.tolist(), tokenizer.tokenizer):
        text.append(printable(piece.text, "\n\t"), style="green" if piece.is_trained else "dim")
    return text


def _short(text: str) -> str:
    return f"{text[:ROW_CHARACTERS]}{'…' if len(text) > ROW_CHARACTERS else ''}"
