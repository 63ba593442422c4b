"""Print what `preprocess` found in an input, and examples with their trained tokens, before the work starts."""

import contextlib
from collections.abc import Iterator
from itertools import groupby, islice
from typing import Any

from rich.console import Console
from rich.text import Text

from raymill.data import row_sources
from raymill.data.examples import BadRow
from raymill.data.row_sources import Head, RowSource
from raymill.data.tokenization import NOT_TRAINED, DocumentTokenizer, TokenizedDocument
from raymill.printable import printable

HEAD_ROWS = 100  # read before the work starts
ROWS_SHOWN, ROW_CHARACTERS = 3, 100


def show(source: RowSource, tokenizer: DocumentTokenizer, examples: int) -> None:
    """Print the formats and first rows of a source, and its first `examples` documents.

    Raises:
        UserError: no row can be used.
    """
    head = row_sources.head(source, max(examples, HEAD_ROWS))
    _show_rows(head, source)
    _show_documents(head.rows, examples, tokenizer)


def _show_rows(head: Head, source: RowSource) -> None:
    unused = f"; not used: {', '.join(head.unused)}" if head.unused else ""
    print(printable(f"{source.name}: {' and '.join(head.formats)}{unused}"))
    for row in head.rows[:ROWS_SHOWN]:
        text = row["row"].decode(errors="replace")
        shown = f"{text[:ROW_CHARACTERS]}{'…' if len(text) > ROW_CHARACTERS else ''}"
        print(printable(f"  {row['problem'] or 'row'}: {shown}"))


def _show_documents(rows: list[dict[str, Any]], count: int, tokenizer: DocumentTokenizer) -> None:
    """Print documents with the trained tokens in green."""
    # a submitted job's log is not a terminal, but users read the log in a terminal
    console = Console(force_terminal=True, soft_wrap=True)
    for number, document in enumerate(islice(_documents(rows, tokenizer), count), 1):
        console.print(Text(f"example {number} (green: trained)", style="bold"))
        console.print(_colored(document, tokenizer))


def _documents(rows: list[dict[str, Any]], tokenizer: DocumentTokenizer) -> Iterator[TokenizedDocument]:
    for row in rows:
        with contextlib.suppress(BadRow):
            yield from tokenizer.documents(row)


def _colored(document: TokenizedDocument, tokenizer: DocumentTokenizer) -> Text:
    text = Text()
    pairs = zip(document.input_ids.tolist(), document.labels.tolist(), strict=True)
    for trained, run in groupby(pairs, key=lambda pair: pair[1] != NOT_TRAINED):
        decoded = printable(tokenizer.tokenizer.decode([token for token, _ in run]), "\n\t")
        text.append(decoded, style="green" if trained else "dim")
    return text
