"""Test which files of an input are read, which are named as skipped, and which inputs are refused."""

import json
import os
import shutil
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import pytest

from raymill.data import row_sources
from raymill.errors import UserError
from raymill.rag import documents

ROW = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}


def write(folder: Path, *names: str) -> Path:
    """Write files, each with one row."""
    for name in names:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist([ROW]), file)
        else:
            file.write_text(json.dumps(ROW) + "\n", encoding="utf-8")
    return folder


def names(source: row_sources.RowSource) -> list[str]:
    return [file.path.removeprefix(f"{source.files.root}/") for file in source.files.files]


# ---------------------------------------------------------------- tables with deleted rows

DELTA = ("table/_delta_log/00000000000000000000.json", "table/a.parquet", "table/year=2026/b.parquet")
ICEBERG = ("table/metadata/v2.metadata.json", "table/metadata/snap-1.avro", "table/data/day=1/a.parquet")
HUDI = ("table/.hoodie/hoodie.properties", "table/a.parquet")
LANCE = ("table/_versions/1.manifest", "table/_transactions/0-1.txn", "table/data/a.lance")
TABLES = {
    "Delta: a file": (DELTA, "table/a.parquet"),
    "Delta: a glob": (DELTA, "table/*.parquet"),
    "Delta: a partition": (DELTA, "table/year=2026"),
    "Delta: a glob above": (DELTA, "*/*.parquet"),
    "Delta: a glob over partitions": (DELTA, "t*/*/*.parquet"),
    "Delta: a checkpoint in the log": ((*DELTA, "table/_delta_log/1.checkpoint.parquet"), "table/_delta_log"),
    "Iceberg: the data": (ICEBERG, "table/data/day=1"),
    "Iceberg: a glob": (ICEBERG, "table/data/*/*.parquet"),
    "Lance: a file": (LANCE, "table/data/a.lance"),
    "Hudi: the folder": (HUDI, "table"),
}
BROKEN = {
    "Delta: the folder": (DELTA, "table"),
    "Delta: with a slash": (DELTA, "table/"),
    "Iceberg: the folder": (ICEBERG, "table"),
    "Lance: the folder": (LANCE, "table"),
}


@pytest.mark.parametrize("where", ["local", "s3"])
@pytest.mark.parametrize("case", TABLES)
def test_a_table_with_deleted_rows_is_refused(
    case: str, where: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    files, name = TABLES[case]
    write(tmp_path, *files)
    base = tmp_path if where == "local" else upload(tmp_path, request.getfixturevalue("s3"), case)
    with pytest.raises(
        UserError, match=r"belongs to the (Delta|Iceberg|Lance|Hudi) table .*/table, .* pass --input"
    ) as error:
        row_sources.find(f"{base}/{name}")
    assert f"the {case.split(':')[0]} table" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("where", ["local", "s3"])
@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_table_is_one_sentence(case: str, where: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    files, name = BROKEN[case]
    write(tmp_path, *files)
    base = tmp_path if where == "local" else upload(tmp_path, request.getfixturevalue("s3"), case)
    with pytest.raises(UserError, match=r"table/? cannot be read \(.*\); pass another --input") as error:
        row_sources.find(f"{base}/{name}")
    assert "\n" not in str(error.value)


def upload(folder: Path, bucket: str, case: str) -> str:
    filesystem, path = pyarrow.fs.FileSystem.from_uri(f"{bucket}/{''.join(filter(str.isalnum, case))}")
    pyarrow.fs.copy_files(str(folder), path, destination_filesystem=filesystem)
    return f"s3://{path}"


def test_documents_in_a_table_are_refused_at_any_level(tmp_path: Path) -> None:
    write(tmp_path, "notes.md", *DELTA)
    with pytest.raises(UserError, match="the Delta table"):
        documents.find(str(tmp_path))
    shutil.rmtree(tmp_path / "table")
    assert len(documents.find(str(tmp_path)).files) == 1


def test_files_beside_a_table_and_other_metadata_are_read(tmp_path: Path) -> None:
    write(tmp_path, "rows.jsonl", "metadata/notes.json", "_versions/1.txt", *DELTA)
    assert names(row_sources.find(str(tmp_path))) == ["rows.jsonl"]
    assert names(row_sources.find(f"{tmp_path}/*.jsonl")) == ["rows.jsonl"]


# ---------------------------------------------------------------- skipped files


def test_skipped_files_are_named_with_their_reasons(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "train.jsonl", "more.js", "c.txt", "x.jsonl.xz", "UPPER.JSONL", "sub/deep.jsonl", "state.json")
    (tmp_path / "none.jsonl").touch()
    row_sources.find(str(tmp_path))
    only = "only .parquet, .jsonl, .json, .csv, .tsv, .xlsx, .arrow and .feather files are read"
    assert capsys.readouterr().out == (
        f"note: {tmp_path}: not read: UPPER.JSONL, c.txt, more.js ({only}); none.jsonl (empty); state.json "
        "(describes a data set); sub (subfolders are not searched); x.jsonl.xz (compressed)\n"
    )
    row_sources.find(f"{tmp_path}/*.js*")
    assert capsys.readouterr().out == (
        f"note: {tmp_path}/*.js*: not read: more.js ({only}); none.jsonl (empty); state.json (describes a data set); "
        "x.jsonl.xz (compressed)\n"
    )
    row_sources.find(f"{tmp_path}/train.jsonl")
    assert not capsys.readouterr().out


def test_many_skipped_files_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "a.jsonl", *(f"{number}.txt" for number in range(2000, 2009)))
    row_sources.find(str(tmp_path))
    assert "2000.txt, 2001.txt, 2002.txt, 2003.txt, 2004.txt and 4 more (only" in capsys.readouterr().out


def test_skipped_documents_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "a.md", "sub/b.docx", "sub/c.md")
    documents.find(str(tmp_path))
    assert "not read: sub/b.docx (only" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("file", "reason"), [("x.jsonl.xz", "compressed"), ("sub/a.jsonl", "subfolders"), ("a.txt", "only")]
)
def test_an_input_with_only_skipped_files_is_refused_with_the_reason(tmp_path: Path, file: str, reason: str) -> None:
    write(tmp_path, file)
    with pytest.raises(
        UserError, match=rf"no \.parquet, .* or \.feather file at .*, only {file.split('/')[0]} \({reason}"
    ):
        row_sources.find(str(tmp_path))


# ---------------------------------------------------------------- test splits


@pytest.mark.parametrize(
    ("files", "name", "instead"),
    [
        (("train.jsonl", "test.jsonl"), "", "train.jsonl"),
        (("train.jsonl", "test.jsonl"), "/*.jsonl", "train.jsonl"),
        (("faq-train.jsonl", "faq_validation.jsonl", "other.jsonl"), "", "faq-train.jsonl"),
        (("train-0-of-2.parquet", "train-1-of-2.parquet", "test-0-of-1.parquet"), "", "train-*"),
        (("train/0.parquet", "train/1.parquet", "dev/0.parquet"), "/*/*.parquet", "train/*"),
        (("train.jsonl", "Eval.parquet"), "", "train.jsonl"),
    ],
)
def test_a_test_split_beside_the_train_split_is_refused(
    tmp_path: Path, files: tuple[str, ...], name: str, instead: str
) -> None:
    write(tmp_path, *files)
    said = r"has both a train split and what looks like a test split \(.*\); pass --input"
    with pytest.raises(UserError, match=said) as error:
        row_sources.find_all(f"{tmp_path}{name}", ())
    assert f"pass --input {tmp_path}/{instead}, and to train on both" in str(error.value)
    with pytest.raises(UserError, match="what looks like a test split"):
        row_sources.find_all(f"{tmp_path}/{files[0]}", [f"{tmp_path}{name}=2"])
    trained = row_sources.find_all(f"{tmp_path}/{instead}", ())
    assert not any(word in file for file in names(trained[0]) for word in ("test", "valid", "dev", "Eval"))


def test_a_test_split_without_a_train_split_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "faq.jsonl", "unit-test.jsonl", "latest.jsonl", "contest.jsonl")
    assert len(row_sources.find_all(str(tmp_path), ())[0].files.files) == 4
    assert f"note: {tmp_path}: trains on unit-test.jsonl, which looks like a test split" in capsys.readouterr().out


def test_a_test_split_that_the_input_names_is_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "test", "train.jsonl", "test.jsonl")
    row_sources.find_all(f"{tmp_path}/test/test.jsonl", [f"{tmp_path}/test/train.jsonl=1"])
    assert not capsys.readouterr().out


def test_the_command_without_the_test_split_can_be_typed_for_a_bucket(tmp_path: Path, s3: str) -> None:
    write(tmp_path, "train.jsonl", "test.jsonl")
    folder = upload(tmp_path, s3, "splits")
    with pytest.raises(UserError, match=f"pass --input {folder}/train.jsonl"):
        row_sources.find_all(folder, ())


# ---------------------------------------------------------------- names that are not UTF-8


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS has no such names")
@pytest.mark.parametrize("where", ["", "*.jsonl"])
def test_a_file_whose_name_is_not_utf8_is_named_and_skipped(
    tmp_path: Path, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "a.jsonl")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/b\xff.jsonl")).write_text("{}")
    assert names(row_sources.find(f"{tmp_path}/{where}")) == ["a.jsonl"]
    assert f"the name is not UTF-8: {tmp_path}/b\\xff.jsonl; rename" in capsys.readouterr().out
    assert [file.path for file in documents.find(f"{tmp_path}/{where}").files] == [f"{tmp_path}/a.jsonl"]
