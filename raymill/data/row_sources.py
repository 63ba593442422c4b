"""Inputs with training rows: their files, how often their rows are used, and their first rows."""

import json
from collections import Counter
from collections.abc import Iterable
from itertools import chain, islice
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import numpy as np
from pyarrow.fs import FileSystem

from raymill import settings
from raymill.data import file_formats, files, rows, tables
from raymill.data.examples import BadRow
from raymill.data.file_formats import Piece, read_arrow
from raymill.data.files import InputFile, InputFiles
from raymill.data.row_formats import EXPECTED_COLUMNS, FORMATS, UNKNOWN_COLUMNS, Format, format_of
from raymill.errors import UserError

PIECE_BYTES = 32 * 2**20  # one task reads this much of a file
MAX_WEIGHT = 1000
SAVED_STATE, CACHE = "state.json", "/cache-"
SAVED_FILES = ("_data_files", "_indices_data_files")
SUFFIXES = tuple(suffix for suffix in file_formats.FORMATS if suffix != file_formats.LANCE)  # of files with rows


class RowSource(NamedTuple):
    """One input of training rows."""

    files: InputFiles
    text_size: int
    """Approximate bytes of text in the files."""
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
    def pieces(self) -> list[Piece]:
        return [
            Piece(file.path, start, min(start + size, file.size), 0, file.values, file.deleted, self.files.table)
            for file in self.files.files
            for size in [PIECE_BYTES if file_formats.format_of(file.path).is_split else max(1, file.size)]
            for start in range(0, file.size, size)
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
    """Return a source with the files with rows that `name` refers to: a file, a folder's files, a glob, or a table.

    `name` is an absolute path or a URI. After that of a table, @version=N may follow.

    Raises:
        UserError: there is no such file, table or version, or it cannot be read.
    """
    found = tables.find(name, section) or _saved(files.find(name, SUFFIXES, section))
    return RowSource(found, file_formats.text_size(found.filesystem, found.files))


def find_all(name: str, mix: Iterable[str], formats: tuple[Format, ...] = FORMATS) -> list[RowSource]:
    """Return the source `name`, and the sources in `mix`. Each item of `mix` is written as INPUT=WEIGHT.

    Their rows are in one of these formats.

    Raises:
        UserError: see `find`, an item of `mix` has no valid weight, or an input contains a test split, or files of
            several formats.
    """
    sources = [find(settings.resolve(name))]
    for part in mix:
        other, _, weight = part.rpartition("=")
        try:
            value = float(weight)
        except ValueError:
            value = 0.0
        if f"{other}=".endswith(tables.VERSION):
            raise UserError(f"mix has {part!r}, without a weight after the version; write {part}=WEIGHT.")
        if not other or not 0 < value < MAX_WEIGHT:
            raise UserError(f"mix has {part!r}; write INPUT=WEIGHT, with a weight above 0 and below {MAX_WEIGHT}.")
        sources.append(find(settings.resolve(other))._replace(weight=value))
    for source in sources:
        files.check_splits(source.files)
        _refuse_several_formats(source.files)
    return [source._replace(formats=formats) for source in sources]


def _refuse_several_formats(found: InputFiles) -> None:
    """Raise UserError if a folder or a glob has files of several formats: they may be copies of the same rows."""
    counts = Counter(file_formats.format_of(file.path).name for file in found.files)
    if len(counts) > 1:
        each = ", ".join(f"{count:,} {name}" for name, count in sorted(counts.items()))
        pattern = str(PurePosixPath(found.files[0].path).with_name(f"*{found.files[0].suffix}"))
        raise UserError(
            f"{found.name} has files of several formats ({each}), which may be copies of the same rows; name those of "
            f"one format, for example --input {files.uri(found.name, pattern)}, and add others with --mix INPUT=1."
        )


def _saved(found: InputFiles) -> InputFiles:
    """Return the input with only the files of data, if `save_to_disk` of the library `datasets` wrote the folder.

    Old versions of the library also wrote which rows of these files belong to the data set.

    Raises:
        UserError: a file is missing, or a row is chosen twice.
    """
    state = f"{found.root}/{SAVED_STATE}"
    if found.files[0].suffix != ".arrow" or not found.filesystem.get_file_info(state).is_file:
        return found
    with found.filesystem.open_input_file(state) as file:
        content = json.load(file)
    entries = [content.get(key) or [] for key in SAVED_FILES]
    listed, chosen = ([one["filename"] for one in some] for some in entries)
    if not listed:  # the state of another program
        return found
    if parts := [one["filename"] for some in entries for one in some if one.get("skip") or one.get("take") is not None]:
        raise UserError(
            f"{found.root} uses only a part of {parts[0]}; load the folder with datasets.load_from_disk, save "
            "the result of its flatten_indices(), and pass that --input."
        )
    # the library's `map` and `filter` store their results beside the data
    names = {PurePosixPath(file.path).name: file for file in found.files}
    names = {name: file for name, file in names.items() if CACHE not in file.path or name in {*listed, *chosen}}
    if others := sorted(names.keys() - {*listed, *chosen}):
        raise UserError(
            f"{found.root}/{others[0]} is not data of {found.root}, and may choose among its rows; load the folder "
            "with datasets.load_from_disk, save the result of its flatten_indices(), and pass that --input."
        )
    is_whole = found.name.rstrip("/").endswith(found.root)
    if chosen and not is_whole:
        raise UserError(
            f"{found.root}/{chosen[0]} chooses among the rows of all files of {found.root}; pass the folder as --input."
        )
    if is_whole and (missing := sorted({*listed, *chosen} - names.keys())):
        raise UserError(
            f"{found.name} is incomplete: {missing[0]} is missing; copy it again, or pass the other files as a glob "
            "with --input."
        )
    data = [names[name] for name in listed if name in names]
    if chosen:
        data = _only_chosen(data, [names[name] for name in chosen], found.filesystem)
    return found._replace(files=data)


def _only_chosen(data: list[InputFile], indices: list[InputFile], filesystem: FileSystem) -> list[InputFile]:
    """Return Arrow files without the rows whose numbers, counted over all files, the files of indices do not have.

    Raises:
        UserError: a number occurs twice, or is too large.
    """
    numbers = [
        batch.column(0).to_numpy(zero_copy_only=False).astype(np.uint64)
        for file in indices
        for batch in read_arrow(filesystem, file.path)
    ]
    rows = [sum(map(len, read_arrow(filesystem, file.path))) for file in data]
    wanted = np.concatenate([np.zeros(0, np.uint64), *numbers])
    if len(np.unique(wanted)) < len(wanted) or wanted.max(initial=0) >= max(1, sum(rows)):
        raise UserError(
            f"{indices[0].path} chooses rows twice, or rows that do not exist; load the folder with "
            "datasets.load_from_disk, save the result of its flatten_indices(), and pass that --input."
        )
    counts = np.bincount(wanted.astype(np.int64), minlength=sum(rows))
    bounds = np.cumsum([0, *rows])
    return [
        file._replace(deleted=files.deleted_rows(counts[start:stop] == 0))
        for file, start, stop in zip(data, bounds[:-1], bounds[1:], strict=True)
    ]


def names_by_setting(sources: list[RowSource]) -> list[tuple[str, str]]:
    """Return a pair for each source: the setting that names the source, and its name."""
    return [("mix" if number else "input", source.name) for number, source in enumerate(sources)]


def head(source: RowSource, count: int) -> Head:
    """Return the first `count` rows, their formats, and the columns that are not read.

    Raises:
        UserError: there are no rows, or none of these rows has a known format.
    """
    filesystem = source.files.filesystem
    raw = list(islice(chain.from_iterable(file_formats.read(filesystem, piece, ()) for piece in source.pieces), count))
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
