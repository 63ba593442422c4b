"""Test that rows are the same in each file format, with the oddities of files that other programs write."""

import bz2
import csv
import gzip
import io
import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.fs
import pyarrow.parquet as pq
import pytest

from raymill.data import file_formats, manifest, row_sources, rows
from raymill.errors import UserError

ROWS = [
    {"instruction": "Say \u201chello\u201d,\nplease", "output": 'He said "hi"; caf\u00e9 \U0001f600', "id": "1"},
    {"instruction": "tab\tand , comma", "output": "two\r\nlines", "id": "2"},
    *({"instruction": f"Question {number}", "output": "x" * number, "id": str(number)} for number in range(3, 300)),
]


def as_jsonl(made: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in made).encode()


def as_csv(made: list[dict[str, Any]], delimiter: str = ",") -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(made[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(made)
    return text.getvalue().encode()


def as_arrow(made: list[dict[str, Any]], new: Callable[..., Any]) -> bytes:
    sink = pa.BufferOutputStream()
    table = pa.Table.from_pylist(made)
    with new(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=100)
    return sink.getvalue().to_pybytes()


def as_feather(made: list[dict[str, Any]]) -> bytes:
    sink = io.BytesIO()
    feather.write_feather(pa.Table.from_pylist(made), sink)
    return sink.getvalue()


def as_parquet(made: list[dict[str, Any]]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(made), sink)
    return sink.getvalue()


def zstd(content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


HALF = len(ROWS) // 2
FILES: dict[str, bytes] = {
    "rows.jsonl": as_jsonl(ROWS),
    "rows.jsonl.gz": gzip.compress(as_jsonl(ROWS)),
    "members.jsonl.gz": gzip.compress(as_jsonl(ROWS[:HALF])) + gzip.compress(as_jsonl(ROWS[HALF:])),
    "rows.jsonl.zst": zstd(as_jsonl(ROWS)),
    "frames.jsonl.zst": zstd(as_jsonl(ROWS[:HALF])) + zstd(as_jsonl(ROWS[HALF:])),
    "rows.jsonl.bz2": bz2.compress(as_jsonl(ROWS)),
    "streams.jsonl.bz2": bz2.compress(as_jsonl(ROWS[:HALF])) + bz2.compress(as_jsonl(ROWS[HALF:])),
    "rows.json": json.dumps(ROWS, indent=2).encode(),
    "escaped.json": b"\xef\xbb\xbf \n" + json.dumps(ROWS, ensure_ascii=True).encode(),
    "lines.json": as_jsonl(ROWS),
    "objects.json": "".join(json.dumps(row, indent=1) for row in ROWS).encode(),
    "rows.json.gz": gzip.compress(json.dumps(ROWS).encode()),
    "rows.csv": as_csv(ROWS),
    "excel.csv": b"\xef\xbb\xbf" + as_csv(ROWS),
    "rows.tsv": as_csv(ROWS, "\t"),
    "rows.csv.gz": gzip.compress(as_csv(ROWS)),
    "file.arrow": as_arrow(ROWS, pa.ipc.new_file),
    "stream.arrow": as_arrow(ROWS, pa.ipc.new_stream),
    "rows.feather": as_feather(ROWS),
    "rows.parquet": as_parquet(ROWS),
}


def read(name: str) -> list[file_formats.RawRow]:
    source = row_sources.find(name)
    pieces = source.pieces
    return [row for piece in pieces for row in file_formats.read(source.files.filesystem, piece, ())]


def checked(name: str) -> list[tuple[bytes, str | None]]:
    return [tuple(rows.checked(row, row_sources.FORMATS).values()) for row in read(name)]


@pytest.mark.parametrize("where", ["local", "s3"])
@pytest.mark.parametrize("name", FILES)
def test_each_format_has_the_same_rows(name: str, where: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    base = str(tmp_path) if where == "local" else f"{request.getfixturevalue('s3')}/formats"
    filesystem, folder = pyarrow.fs.FileSystem.from_uri(base)
    for file, content in (("expected.jsonl", FILES["rows.jsonl"]), (name, FILES[name])):
        with filesystem.open_output_stream(f"{folder}/{file}", compression=None) as stream:
            stream.write(content)
    found = checked(f"{base}/{name}")
    assert found == checked(f"{base}/expected.jsonl")
    assert len(found) == len(ROWS)
    assert all(problem is None for _, problem in found)


def cut(name: str) -> bytes:
    return FILES[name][: len(FILES[name]) * 2 // 3]


DAMAGED = {
    "cut.jsonl.gz": (cut("rows.jsonl.gz"), "JSONL"),
    "cut.jsonl.zst": (cut("rows.jsonl.zst"), "JSONL"),
    "cut.jsonl.bz2": (cut("rows.jsonl.bz2"), "JSONL"),
    "plain.jsonl.gz": (FILES["rows.jsonl"], "JSONL"),
    "plain.jsonl.zst": (FILES["rows.jsonl"], "JSONL"),
    "plain.jsonl.bz2": (FILES["rows.jsonl"], "JSONL"),
    "cut.json": (cut("rows.json"), "JSON"),
    "cut.csv": (b'instruction,output\n"a,b\n', "CSV"),
    "twice.csv": (b"output,instruction,output\na,b,c\n", "CSV"),
    "cut-file.arrow": (cut("file.arrow"), "Arrow"),
    "cut-stream.arrow": (cut("stream.arrow"), "Arrow"),
    "text.arrow": (FILES["rows.jsonl"], "Arrow"),
    "cut.feather": (cut("rows.feather"), "Feather"),
    "cut.parquet": (cut("rows.parquet"), "parquet"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_one_sentence(name: str, tmp_path: Path) -> None:
    content, kind = DAMAGED[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=rf"{name} is not a valid {kind} file \(.+\)\. Replace or remove it\.") as error:
        read(f"{tmp_path}/{name}")
    assert "\n" not in str(error.value)


ODD_ROWS = {
    "a.csv": (b"instruction,output\nq,a\nq\nq,a,b\n\nq,a\n", ["another number of values than the header"] * 2),
    "latin.csv": (b"instruction,output\nq,a\nq,caf\xe9\n", ["text that is not valid Unicode"]),
    "items.json": (b'[{"instruction": "q", "output": "a"}, 5, ["q", "a"]]', ["not a JSON object"] * 2),
}


@pytest.mark.parametrize("name", ODD_ROWS)
def test_a_bad_row_is_rejected_alone(name: str, tmp_path: Path) -> None:
    content, problems = ODD_ROWS[name]
    (tmp_path / name).write_bytes(content)
    found = checked(f"{tmp_path}/{name}")
    assert [problem for _, problem in found if problem] == problems
    assert any(problem is None for _, problem in found)


def test_files_of_several_formats_may_be_copies(tmp_path: Path) -> None:
    for name in ("rows.jsonl", "rows.parquet"):
        (tmp_path / name).write_bytes(FILES[name])
    with pytest.raises(UserError, match=rf"several formats \(1 JSONL, 1 parquet\).* --input {tmp_path}/\*\.jsonl, and"):
        row_sources.find_all(str(tmp_path), ())
    assert len(row_sources.find_all(f"{tmp_path}/*.jsonl", ())[0].files.files) == 1
    assert len(row_sources.find(str(tmp_path)).files.files) == 2, "generate has ids, and refuses repeated ones"


def test_a_folder_of_save_to_disk(tmp_path: Path) -> None:
    import datasets

    data: Any = datasets.Dataset.from_list(ROWS)
    data.select(range(5, 100)).shuffle(seed=0).save_to_disk(str(tmp_path / "saved"), num_shards=3)
    found = checked(str(tmp_path / "saved"))
    assert len(found) == 95
    assert {row for row, _ in found} == {rows.checked(row, row_sources.FORMATS)["row"] for row in ROWS[5:100]}


def saved(folder: Path, *files: str) -> str:
    """Write a folder as `save_to_disk` does, whose state lists two files, and return its path."""
    for name in files:
        (folder / name).write_bytes(FILES["stream.arrow"])
    state = {"_data_files": [{"filename": "data-0.arrow"}, {"filename": "data-1.arrow"}]}
    (folder / "state.json").write_text(json.dumps(state))
    return str(folder)


def test_a_saved_folder_with_other_files_or_without_one_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path, "data-0.arrow", "cache-0123.arrow")
    with pytest.raises(UserError, match=r"is incomplete: data-1\.arrow is missing; copy it again, .* --input\."):
        row_sources.find(folder)
    assert len(row_sources.find(f"{folder}/data-*.arrow").files.files) == 1
    saved(tmp_path, "data-1.arrow")
    assert len(row_sources.find(folder).files.files) == 2, "what the library caches is not data"
    saved(tmp_path, "indices.arrow")  # which the state does not name
    with pytest.raises(UserError, match=r"indices\.arrow is not data of .* flatten_indices\(\), and pass that --input"):
        row_sources.find(folder)


def with_indices(folder: Path, numbers: list[int]) -> str:
    """Write a folder of two files as datasets 1.0 did after `select`, and return its path."""
    half = len(ROWS) // 2
    for number, made in enumerate((ROWS[:half], ROWS[half:])):
        (folder / f"data-{number}.arrow").write_bytes(as_arrow(made, pa.ipc.new_stream))
    table = pa.table({"indices": pa.array(numbers, pa.uint64())})
    with pa.OSFile(str(folder / "indices.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    state = {"_data_files": [{"filename": "data-0.arrow"}, {"filename": "data-1.arrow"}]}
    state["_indices_data_files"] = [{"filename": "indices.arrow"}]
    (folder / "state.json").write_text(json.dumps(state))
    return str(folder)


def test_an_old_saved_folder_has_only_the_rows_that_its_indices_choose(tmp_path: Path) -> None:
    chosen = [len(ROWS) - 1, 3, 17, len(ROWS) // 2, len(ROWS) // 2 - 1]
    found = [row for row, _ in checked(with_indices(tmp_path, chosen))]
    assert found == [rows.checked(ROWS[at], row_sources.FORMATS)["row"] for at in sorted(chosen)]
    assert checked(with_indices(tmp_path, [])) == []
    identities = set()
    for numbers in ([1, 6], [2, 7]):
        [source] = row_sources.find_all(with_indices(tmp_path, numbers), ())
        identities.add(manifest._hash(source.files))
    assert len(identities) == 2, "another choice is another data set"
    with pytest.raises(UserError, match=r"indices\.arrow chooses among the rows of all files of .*; pass the folder"):
        row_sources.find(f"{tmp_path}/data-*.arrow")
    for wrong in ([3, 3], [len(ROWS)], [10**13], [2**63 + 5]):
        with pytest.raises(
            UserError, match=r"indices\.arrow chooses rows twice, or rows that do not exist; .*flatten_ind"
        ):
            row_sources.find(with_indices(tmp_path, wrong))
    folder = with_indices(tmp_path, chosen)
    content = (tmp_path / "indices.arrow").read_bytes()
    (tmp_path / "indices.arrow").write_bytes(content[:-40])
    with pytest.raises(UserError, match=r"indices\.arrow is not a valid Arrow file"):
        row_sources.find(folder)
    (tmp_path / "indices.arrow").unlink()
    with pytest.raises(UserError, match=r"incomplete: indices\.arrow is missing"):
        row_sources.find(folder)


def test_little_text_that_shrinks_a_lot_is_measured_whole(tmp_path: Path) -> None:
    content = as_jsonl([{"completion": "same " * 400}]) * 20_000
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(content))
    assert row_sources.find(f"{tmp_path}/a.jsonl.gz").text_size == pytest.approx(len(content), rel=0.05)


@pytest.mark.parametrize("alike", [False, True])
def test_partitions_are_planned_by_the_text_in_compressed_files(tmp_path: Path, alike: bool) -> None:
    rng = random.Random(0)
    lines = [{"completion": "same " * 400 if alike else rng.randbytes(1000).hex()} for _ in range(1000)]
    content = as_jsonl(lines)
    for name, packed in (("a.jsonl.gz", gzip.compress(content)), ("b.jsonl.zst", zstd(content))):
        (tmp_path / name).write_bytes(packed)
        found = row_sources.find(f"{tmp_path}/{name}").text_size
        assert found == pytest.approx(len(content), rel=0.05)
    assert row_sources.find(f"{tmp_path}/*.jsonl.*").text_size == pytest.approx(2 * len(content), rel=0.1)


def test_an_old_saved_folder_may_name_cache_files_but_no_part_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "cache-0123.arrow").write_bytes(FILES["stream.arrow"])
    entry: dict[str, Any] = {"filename": "cache-0123.arrow"}
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [entry]}))
    assert len(checked(str(tmp_path))) == len(ROWS)
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [entry | {"skip": 0, "take": 2}]}))
    with pytest.raises(UserError, match=r"uses only a part of cache-0123\.arrow; .*flatten_indices"):
        row_sources.find(str(tmp_path))


def test_arrow_files_beside_the_state_of_another_program_are_read(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text('{"step": 1}')
    (tmp_path / "a.arrow").write_bytes(FILES["stream.arrow"])
    assert len(row_sources.find(str(tmp_path)).files.files) == 1


JSON_ROWS = (
    rb'{"instruction": "half a pair \ud800", "output": "a"}',
    rb'{"instruction": "a pair \ud83d\ude00", "output": "a"}',
    rb'{"instruction": "q", "output": "a", "score": NaN, "id": 123456789012345678901234567890}',
    rb'{"instruction": "\u0000", "output": "]},{["}',
)


@pytest.mark.parametrize("characters", [1, 2, 7, 64, 2**20])
def test_an_array_has_the_same_rows_and_bad_rows_as_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, characters: int
) -> None:
    monkeypatch.setattr(file_formats, "JSON_CHARACTERS", characters)
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(JSON_ROWS))
    (tmp_path / "a.json").write_bytes(b" [ " + b" ,\n".join(JSON_ROWS) + b" ]\n")
    (tmp_path / "b.json").write_bytes(b"\n".join(JSON_ROWS))
    lines, array, objects = (checked(f"{tmp_path}/{name}") for name in ("a.jsonl", "a.json", "b.json"))
    assert [problem for _, problem in lines] == ["text that is not valid Unicode", None, None, None]
    assert array[1:] == objects[1:] == lines[1:]
    assert [problem for _, problem in array] == [problem for _, problem in objects] == [problem for _, problem in lines]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'[{"a": 1}', "it ends after item 1, within the array"),
        (b'[{"a": 1},', "item 2: "),
        (b'[{"a": 1} {"a": 2}]', "no comma after item 1"),
        (b'[{"a": 1}] {"a": 2}', "text after the end of the array"),
        (b'{"a": 1}]', r"\] without \["),
        (b'{"a": 1} {"a": ', "item 2: "),
        (b"[" * 100_000, "item 1 is nested too deeply"),
    ],
)
def test_a_damaged_json_file_says_where(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(UserError, match=rf"a\.json is not a valid JSON file \({reason}"):
        read(f"{tmp_path}/a.json")


@pytest.mark.parametrize("content", [b"", b" \n", b"[]", b"[ ]\n"])
def test_an_empty_json_file_has_no_rows(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.json").write_bytes(content)
    assert read(f"{tmp_path}/a.json") == []


def test_a_damaged_csv_file_says_where(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b'instruction,output\nq,a\nq,"a"b\n')
    with pytest.raises(UserError, match=r"not a valid CSV file \(line 3: "):
        read(f"{tmp_path}/a.csv")


@pytest.mark.parametrize("where", ["local", "s3"])
def test_partitions_are_columns(where: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    base = str(tmp_path) if where == "local" else f"{request.getfixturevalue('s3')}/partitions"
    filesystem, folder = pyarrow.fs.FileSystem.from_uri(base)
    answers = [{"output": "a"}, {"output": "b", "instruction": "own"}]
    files = {
        "instruction=What%3F/lang=de/a.parquet": as_parquet(answers[:1]),
        "instruction=Why/lang=en/a.jsonl": as_jsonl(answers) + b"5\n",
        "instruction=__HIVE_DEFAULT_PARTITION__/a.csv": b"output\nc\n",
        "other/a.jsonl": as_jsonl(answers),
    }
    for file, content in files.items():
        filesystem.create_dir(f"{folder}/{Path(file).parent}")
        with filesystem.open_output_stream(f"{folder}/{file}", compression=None) as stream:
            stream.write(content)
    with pytest.raises(UserError, match="several formats"):
        row_sources.find_all(base, ())
    for file in ("instruction=Why/lang=en/a.jsonl", "instruction=__HIVE_DEFAULT_PARTITION__/a.csv"):
        filesystem.delete_file(f"{folder}/{file}")
    assert [file.path.rpartition("instruction")[2] for file in row_sources.find(base).files.files] == [
        "=What%3F/lang=de/a.parquet"
    ]
    assert read(base) == [{"instruction": "What?", "lang": "de", "output": "a"}]


def test_partitions_of_lines_and_nulls(tmp_path: Path) -> None:
    for name, content in (
        ("x=1/y=2", b'{"a": 1}\n{"x": "own"}\n5\n{\n'),
        ("x=__HIVE_DEFAULT_PARTITION__", b'{"a": 2}'),
    ):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "a.jsonl").write_bytes(content)
    assert read(str(tmp_path)) == [
        {"x": "1", "y": "2", "a": 1},
        {"x": "own", "y": "2"},
        b"5",
        b"{",
        b'{"a": 2}',
    ]


def test_a_partition_can_be_a_test_split(tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / f"split={split}").mkdir()
        (tmp_path / f"split={split}" / "a.jsonl").write_bytes(FILES["rows.jsonl"])
    with pytest.raises(UserError, match=r"test split \(split=test/a\.jsonl\); pass --input .*/split=train/a\.jsonl"):
        row_sources.find_all(str(tmp_path), ())


LARGE = """
import resource, sys
from raymill.data import file_formats, row_sources
source = row_sources.find(sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
count = sum(1 for piece in source.pieces for _ in file_formats.read(source.files.filesystem, piece, ()))
print(count, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl.gz", "rows.csv"])
def test_a_large_file_is_read_as_a_stream(name: str, tmp_path: Path) -> None:
    row = {"instruction": "q" * 1000, "output": "a" * 9000}
    count = 20_000  # 200 MB
    content = {
        "rows.json": b"[" + b",".join([json.dumps(row).encode()] * count) + b"]",
        "rows.jsonl.gz": gzip.compress(as_jsonl([row]) * count, 1),
        "rows.csv": b"instruction,output\n" + f"{row['instruction']},{row['output']}\n".encode() * count,
    }[name]
    (tmp_path / name).write_bytes(content)
    made = subprocess.run(
        [sys.executable, "-c", LARGE, f"{tmp_path}/{name}"], capture_output=True, text=True, check=True
    )
    found, added_mib = map(float, made.stdout.split())
    assert found == count
    assert added_mib < 60
