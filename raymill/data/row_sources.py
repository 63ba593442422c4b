"""Inputs with training rows: their files, how often their rows are used, and their first rows."""

from collections import Counter
from collections.abc import Iterable
from itertools import chain, islice
from typing import Any, NamedTuple

from raymill import settings
from raymill.data import files, rows
from raymill.data.examples import BadRow
from raymill.data.files import InputFiles
from raymill.data.row_formats import EXPECTED_COLUMNS, FORMATS, UNKNOWN_COLUMNS, Format, format_of
from raymill.data.rows import Piece
from raymill.errors import UserError

PIECE_BYTES = 32 * 2**20  # one task reads this much of a file
MAX_WEIGHT = 1000
SUFFIXES = (".parquet", ".jsonl")
TEXT_BYTES_PER_FILE_BYTE = {".parquet": 4, ".jsonl": 1}  # parquet compresses conversations about fourfold


class RowSource(NamedTuple):
    """One input of training rows."""

    files: InputFiles
    weight: float = 1.0
    """How many times each row is used, on average."""
    formats: tuple[Format, ...] = FORMATS
    """Formats of the rows. The first that fits a row is used."""

    @property
    def name(self) -> str:
        return self.files.name

    @property
    def size(self) -> int:
        """Total bytes of the files."""
        return self.files.size

    @property
    def text_size(self) -> int:
        """Approximate bytes of text in the files."""
        return sum(file.size * TEXT_BYTES_PER_FILE_BYTE[file.suffix] for file in self.files.files)

    @property
    def pieces(self) -> list[Piece]:
        return [
            Piece(file.path, start, min(start + PIECE_BYTES, file.size))
            for file in self.files.files
            for start in range(0, file.size, PIECE_BYTES)
        ]


class Head(NamedTuple):
    """The first rows of a source."""

    rows: list[dict[str, Any]]
    """Each row has the columns `row` and `problem` of `rows.ROWS`."""
    formats: tuple[str, ...]
    """Names of the formats found."""
    unused: tuple[str, ...]
    """Columns that are not read."""


def find(name: str, section: str = "preprocess") -> RowSource:
    """Return a source with the .parquet and .jsonl files that `name` refers to: a file, a folder's files, or a glob.

    `name` is an absolute path or a URI.

    Raises:
        UserError: there is no such file, or it cannot be read.
    """
    return RowSource(files.find(name, SUFFIXES, section))


def find_all(name: str, mix: Iterable[str], formats: tuple[Format, ...] = FORMATS) -> list[RowSource]:
    """Return the source `name`, and the sources in `mix`. Each item of `mix` is written as INPUT=WEIGHT.

    Their rows are in one of these formats.

    Raises:
        UserError: see `find`, an item of `mix` has no valid weight, or an input contains a test split.
    """
    sources = [find(settings.resolve(name))]
    for part in mix:
        other, _, weight = part.rpartition("=")
        try:
            value = float(weight)
        except ValueError:
            value = 0.0
        if not other or not 0 < value < MAX_WEIGHT:
            raise UserError(f"mix has {part!r}; write INPUT=WEIGHT, with a weight above 0 and below {MAX_WEIGHT}.")
        sources.append(find(settings.resolve(other))._replace(weight=value))
    for source in sources:
        files.check_splits(source.files)
    return [source._replace(formats=formats) for source in sources]


def names_by_setting(sources: list[RowSource]) -> list[tuple[str, str]]:
    """Return a pair for each source: the setting that names the source, and its name."""
    return [("mix" if number else "input", source.name) for number, source in enumerate(sources)]


def head(source: RowSource, count: int) -> Head:
    """Return the first `count` rows, their formats, and the columns that are not read.

    Raises:
        UserError: there are no rows, or none of these rows has a known format.
    """
    filesystem = source.files.filesystem
    raw = list(islice(chain.from_iterable(rows.read(filesystem, piece, ()) for piece in source.pieces), count))
    if not raw:
        raise UserError(f"{source.name} holds no rows; correct input in [preprocess], or pass --input.")
    formats, columns, used, problems = set(), set(), set(), Counter[str]()
    for row in raw:
        try:
            values = rows.parse(row)
            columns |= set(values)
            formats.add(found := format_of(values, source.formats))
            used |= found.columns_read(values)
        except BadRow as bad:
            problems[str(bad)] += 1
    if not formats:
        problem = rows.ARRAY if rows.ARRAY in problems else problems.most_common(1)[0][0]
        if problem == UNKNOWN_COLUMNS:
            problem = f"its columns are {', '.join(sorted(columns))}; rename them to {EXPECTED_COLUMNS}"
            problem += ", or add a format to jobs/preprocess.py (docs/data.md)"
        raise UserError(f"no row of {source.name} can be used: {problem}; or pass another --input.")
    return Head(
        [rows.checked(row, source.formats) for row in raw],
        tuple(sorted(row_format.name for row_format in formats)),
        tuple(sorted(columns - used)),
    )
