"""Test `preprocess` end to end: the same rows and seed give the same bytes, errors are short, and memory stays flat."""

import errno
import json
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import deltalake
import lancedb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs
import pyarrow.parquet as pq
import pytest
from preprocess_job import manifest, options, write_rows
from ray.data import DataContext, ExecutionResources
from ray.exceptions import RayTaskError

from jobs import preprocess
from raymill import settings
from raymill.data import preprocessing, row_sources, rows, shards
from raymill.data.packed_folder import PackedFolder
from raymill.data.tokenization import NOT_TRAINED
from raymill.data.tokenizer import load_tokenizer
from raymill.errors import UserError
from raymill.ray_support.capacity import refuse_private_paths
from raymill.ray_support.private.data import ShuffleDiskError
from raymill.ray_support.progress import time_left
from raymill.training import report
from raymill.training.history import History

GOOD = {"messages": [{"role": "user", "content": "Say hello."}, {"role": "assistant", "content": "Hello."}]}
SILENT = {"messages": [{"role": "user", "content": "Say hello."}]}


def documents(folder: Path, part: str, assets: Path) -> list[str]:
    """Return the texts of the packed documents of one part, in order, without padding."""
    tokenizer = load_tokenizer(str(assets / "model"))
    texts = []
    for file in sorted((folder / "packed" / part).glob("*.parquet")):
        for row in pq.read_table(file).to_pylist():
            starts = [index for index, position in enumerate(row["position_ids"]) if position == 0]
            pieces = [row["input_ids"][a:b] for a, b in zip(starts, [*starts[1:], None], strict=True)]
            texts += [text for text in tokenizer.batch_decode(pieces) if not text.startswith("<|pad|>")]
    return texts


def shard_bytes(folder: Path) -> dict[str, bytes]:
    packed = folder / "packed"
    return {str(file.relative_to(packed)): file.read_bytes() for file in sorted(packed.rglob("*.parquet"))}


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory, assets: Path) -> Path:
    """Return a file with six numbered copies of each row of the demo, which is enough for four partitions."""
    lines = (assets / "data" / "pairs.jsonl").read_text(encoding="utf-8").splitlines()
    numbered = []
    for copy in range(6):
        for line in lines:
            row = json.loads(line)
            row["messages"][0]["content"] += f" ({copy})"
            numbered.append(row)
    return write_rows(tmp_path_factory.mktemp("many") / "rows.jsonl", numbered)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, assets: Path, many: Path, ray_session: None) -> Path:
    """Return the folder of a finished run over `many`."""
    folder = tmp_path_factory.mktemp("made")
    preprocess.main(options(assets, folder, input=str(many), shard_mib=0.15))
    return folder


@pytest.fixture
def data_context() -> Iterator[DataContext]:
    """Yield a copy of Ray Data's settings that a test can change."""
    context = DataContext.get_current().copy()
    with DataContext.current(context):
        yield context


# ---------------------------------------------------------------- the result


def test_every_row_is_packed_once(made: Path, many: Path, assets: Path) -> None:
    expected = []
    for line in many.read_text(encoding="utf-8").splitlines():
        question, answer = (message["content"] for message in json.loads(line)["messages"])
        expected.append(f"<|bos|><|user|>{question}<|assistant|>{answer}<|eos|>")
    packed = documents(made, "train", assets) + documents(made, "eval", assets)
    assert Counter(packed) == Counter(expected)


def test_the_manifest_has_the_right_counts(made: Path) -> None:
    recorded = manifest(made)
    assert recorded["partitions"] == 4
    ids = [pq.read_table(file, columns=["input_ids"])["input_ids"] for file in (made / "packed").rglob("*.parquet")]
    assert recorded["largest_id"] == max(pc.max(pc.list_flatten(column)).as_py() for column in ids)
    assert recorded["rows_read"] == recorded["train"]["documents"] + recorded["eval"]["documents"]
    for part in ("train", "eval"):
        tables = [pq.read_table(made / "packed" / part / file["name"]) for file in recorded[part]["files"]]
        assert [len(table) for table in tables] == [file["rows"] for file in recorded[part]["files"]]
        labels = pa.concat_tables(tables)["labels"].combine_chunks().flatten().to_numpy()
        assert recorded[part]["trained_tokens"] == np.count_nonzero(labels != NOT_TRAINED)
        assert sum(recorded[part]["lengths"].values()) == recorded[part]["documents"]
        assert all(table.schema.field("labels").type == pa.list_(pa.int32(), 128) for table in tables)
    assert recorded["train"]["tokens"] / (recorded["train"]["rows"] * 128) > 0.94


def test_eval_share_of_the_rows_is_held_out(made: Path) -> None:
    recorded = manifest(made)
    assert recorded["eval"]["documents"] / recorded["rows_read"] == pytest.approx(0.02, abs=0.005)


def test_the_shuffle_is_global(made: Path, many: Path, assets: Path) -> None:
    """A row's position in the input does not predict its position in the output."""
    positions = {}
    for line in many.read_text(encoding="utf-8").splitlines():
        positions[json.loads(line)["messages"][0]["content"]] = len(positions)
    questions = [text.split("<|user|>")[1].split("<|assistant|>")[0] for text in documents(made, "train", assets)]
    origins = np.array([positions[question] for question in questions])
    assert abs(np.corrcoef(origins, np.arange(len(origins)))[0, 1]) < 0.05
    for quarter in np.array_split(origins, 4):
        assert np.histogram(quarter, bins=4, range=(0, len(positions)))[0].min() > len(quarter) / 5


# ---------------------------------------------------------------- the same bytes


@pytest.mark.parametrize("piece_bytes", [1, 7, 55, 64, 1000])
def test_each_row_is_in_exactly_one_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int) -> None:
    lines = [{"messages": [{"role": "assistant", "content": f"{number:02}"}]} for number in range(20)]
    write_rows(tmp_path / "rows.jsonl", lines)  # equal lengths, so some lines begin exactly where a piece begins
    pq.write_table(pa.Table.from_pylist(lines), tmp_path / "rows.parquet", row_group_size=3)
    monkeypatch.setattr(row_sources, "PIECE_BYTES", piece_bytes)
    expected = [json.dumps(line, separators=(",", ":")).encode() for line in lines]
    for name in ("rows.jsonl", "rows.parquet"):
        source = row_sources.find(f"{tmp_path}/{name}")
        assert [row["row"] for row in row_sources.head(source, 100).rows] == expected


def test_one_worker_and_differently_split_files_give_the_same_bytes(
    made: Path, many: Path, assets: Path, tmp_path: Path, data_context: DataContext
) -> None:
    found = [json.loads(line) for line in many.read_text(encoding="utf-8").splitlines()]
    random.Random(0).shuffle(found)
    for number in range(3):
        write_rows(tmp_path / "raw" / f"{number}.jsonl", found[number::3])
    data_context.execution_options.resource_limits = ExecutionResources(cpu=1)
    preprocess.main(options(assets, tmp_path, input=str(tmp_path / "raw" / "*.jsonl"), shard_mib=0.15))
    assert shard_bytes(tmp_path) == shard_bytes(made)
    assert manifest(tmp_path)["content_hash"] == manifest(made)["content_hash"]


def test_three_workers_and_other_blocks_give_the_same_bytes(
    made: Path, many: Path, assets: Path, tmp_path: Path, data_context: DataContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    data_context.execution_options.resource_limits = ExecutionResources(cpu=3)
    data_context.target_max_block_size = 2**16
    monkeypatch.setattr(row_sources, "PIECE_BYTES", 100_000)
    preprocess.main(options(assets, tmp_path, input=str(many), shard_mib=0.15))
    assert shard_bytes(tmp_path) == shard_bytes(made)


def test_parquet_and_jsonl_rows_are_the_same_rows(assets: Path, tmp_path: Path, ray_session: None) -> None:
    found = [json.loads(line) for line in (assets / "data" / "pairs.jsonl").read_text(encoding="utf-8").splitlines()]
    columns = {
        "instruction": [row["messages"][0]["content"] for row in found],
        "response": [row["messages"][1]["content"] for row in found],
        "source": ["python"] * len(found),
    }
    (tmp_path / "raw").mkdir()
    pq.write_table(pa.table(columns), tmp_path / "raw" / "pairs.parquet", row_group_size=100)
    preprocess.main(options(assets, tmp_path, input=str(tmp_path / "raw" / "pairs.parquet")))
    preprocess.main(options(assets, tmp_path / "jsonl"))
    assert shard_bytes(tmp_path) == shard_bytes(tmp_path / "jsonl")


def test_a_table_gives_the_same_bytes_as_its_live_rows_and_its_version_counts(
    assets: Path, tmp_path: Path, ray_session: None
) -> None:
    found = [json.loads(line) for line in (assets / "data" / "pairs.jsonl").read_text(encoding="utf-8").splitlines()]
    table = pa.Table.from_pylist([{"id": number, "messages": row["messages"]} for number, row in enumerate(found)])
    name = str(tmp_path / "table")
    deltalake.write_deltalake(name, table)
    deltalake.DeltaTable(name).delete("id % 2 = 1")
    preprocess.main(options(assets, tmp_path / "all", input=f"{name}@version=0"))
    preprocess.main(options(assets, tmp_path / "delta", input=name))
    database = lancedb.connect(tmp_path)
    database.create_table("rows", table).delete("id % 2 = 1")
    preprocess.main(options(assets, tmp_path / "lance", input=str(tmp_path / "rows.lance")))
    live = write_rows(tmp_path / "live.jsonl", found[::2])
    preprocess.main(options(assets, tmp_path / "live", input=str(live)))
    expected = shard_bytes(tmp_path / "live")
    assert shard_bytes(tmp_path / "delta") == shard_bytes(tmp_path / "lance") == expected
    assert shard_bytes(tmp_path / "all") != expected
    versions = {
        kind: manifest(tmp_path / kind)["input"][0].get("version") for kind in ("all", "delta", "lance", "live")
    }
    assert versions == {"all": 0, "delta": 1, "lance": 2, "live": None}
    deltalake.DeltaTable(name).alter.set_table_name("renamed")  # a version with the same files
    with pytest.raises(UserError, match="made from other input"):
        preprocess.main(options(assets, tmp_path / "delta", input=name))


def test_another_seed_gives_another_order_but_the_same_evaluation_rows(
    made: Path, many: Path, assets: Path, tmp_path: Path
) -> None:
    preprocess.main(options(assets, tmp_path, input=str(many), shard_mib=0.15, seed=1))
    for part in ("train", "eval"):
        one, other = documents(made, part, assets), documents(tmp_path, part, assets)
        assert one != other
        assert sorted(one) == sorted(other)


# ---------------------------------------------------------------- bad rows


def test_bad_rows_are_saved_with_their_reasons(assets: Path, tmp_path: Path, ray_session: None) -> None:
    file = write_rows(tmp_path / "rows.jsonl", [GOOD | {"id": number} for number in range(20)] + [SILENT, {"a": 1}])
    with file.open("ab") as lines:
        lines.write(b'{"messages": [\n\n[1, 2]\n"\xff\xfe"\n')
    preprocess.main(options(assets, tmp_path, input=str(file), max_bad_share=0.5, eval_share=0))
    reasons = {
        "no known columns": 1,
        "no assistant turn": 1,
        rows.ARRAY: 1,
        "not valid JSON": 2,
    }
    recorded = manifest(tmp_path)
    assert (recorded["rows_read"], recorded["rows_rejected"]) == (25, 5)
    assert recorded["rejected_by_reason"] == reasons
    (file,) = (tmp_path / "packed" / "rejected").iterdir()
    rejected = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert Counter(row["problem"] for row in rejected) == reasons
    assert {"problem": "not valid JSON", "row": '{"messages": ['} in rejected


@pytest.mark.parametrize("deduplicate", [False, True])
def test_deduplicate_uses_identical_rows_once(
    assets: Path, tmp_path: Path, ray_session: None, deduplicate: bool
) -> None:
    other = {"messages": [GOOD["messages"][0], {"role": "assistant", "content": "Another answer"}]}
    file = write_rows(tmp_path / "rows.jsonl", [GOOD, other, GOOD | {"id": 1}, GOOD, other | {"id": 2}])
    preprocess.main(options(assets, tmp_path, input=str(file), eval_share=0, deduplicate=deduplicate))
    recorded = manifest(tmp_path)
    assert (recorded["rows_read"], recorded["rows_duplicate"]) == (5, 3 if deduplicate else 0)
    assert recorded["train"]["documents"] == (2 if deduplicate else 5)


def test_each_row_is_used_as_often_as_the_weight_says(assets: Path, tmp_path: Path, ray_session: None) -> None:
    for name in ("once", "half", "more"):
        found = [{"instruction": f"{name} {number}", "output": f"answer {number}"} for number in range(400)]
        write_rows(tmp_path / f"{name}.jsonl", found)
    mix = (f"{tmp_path}/half.jsonl=0.5", f"{tmp_path}/more.jsonl=2.25")
    preprocess.main(options(assets, tmp_path, input=f"{tmp_path}/once.jsonl", mix=mix, eval_share=0.1))
    counts = Counter(
        text.split("<|user|>")[1].split("<|assistant|>")[0]
        for part in ("train", "eval")
        for text in documents(tmp_path, part, assets)
    )
    used = {name: [counts[f"{name} {number}"] for number in range(400)] for name in ("once", "half", "more")}
    assert set(used["once"]) == {1}
    assert set(used["half"]) == {0, 1}
    assert set(used["more"]) == {2, 3}
    assert sum(used["half"]) == pytest.approx(200, abs=50)
    assert sum(used["more"]) == pytest.approx(900, abs=50)
    recorded = manifest(tmp_path)["sources"]
    assert [recorded[f"{tmp_path}/{name}.jsonl"]["documents"] for name in used] == [sum(row) for row in used.values()]
    assert sum(one["tokens"] for one in recorded.values()) == sum(
        manifest(tmp_path)[part]["tokens"] for part in ("train", "eval")
    )
    [made] = report.data_reports([History("run", {}, [], [], manifest(tmp_path))])
    assert [cells["weight"] for cells in made.inputs] == ["1", "0.5", "2.25"]
    assert [cells["documents"] for cells in made.inputs] == [f"{sum(row):,}" for row in used.values()]
    held_out = [text.split("<|user|>")[1].split("<|assistant|>")[0] for text in documents(tmp_path, "eval", assets)]
    trained = [text.split("<|user|>")[1].split("<|assistant|>")[0] for text in documents(tmp_path, "train", assets)]
    assert not set(held_out) & set(trained), "all copies of a row must be in the same part"


@pytest.mark.parametrize("part", ["data/pairs.jsonl", "=2", "data/pairs.jsonl=0", "data/pairs.jsonl=much"])
def test_an_invalid_weight_is_refused(assets: Path, tmp_path: Path, part: str) -> None:
    with pytest.raises(UserError, match=r"mix has .*; write INPUT=WEIGHT"):
        preprocess.main(options(assets, tmp_path, mix=(part,)))


def test_too_many_bad_rows_are_refused(assets: Path, tmp_path: Path, ray_session: None) -> None:
    file = write_rows(tmp_path / "rows.jsonl", [GOOD] * 9 + [SILENT])
    with pytest.raises(UserError, match=r"1 of 10 rows are bad \(no assistant turn: 1\)"):
        preprocess.main(options(assets, tmp_path, input=str(file)))
    assert not (tmp_path / "packed" / "manifest.json").exists()
    assert (tmp_path / "packed" / "rejected").is_dir()


def test_a_broken_parquet_file_is_named(assets: Path, tmp_path: Path, ray_session: None) -> None:
    (tmp_path / "raw").mkdir()
    pq.write_table(pa.Table.from_pylist([GOOD] * 200), tmp_path / "raw" / "a.parquet")
    (tmp_path / "raw" / "b.parquet").write_bytes(b"PAR1 and nothing more PAR1")
    with pytest.raises(UserError, match=r"b\.parquet is not a valid parquet file \(.*\)\. Replace"):
        preprocess.main(options(assets, tmp_path, input=str(tmp_path / "raw")))


# ---------------------------------------------------------------- errors before anything starts


@pytest.mark.parametrize(
    ("content", "name", "sentence"),
    [
        (None, "missing.jsonl", r"no \.parquet, .* or \.feather file at .*missing\.jsonl"),
        (None, "none/*.parquet", r"no \.parquet, .* or \.feather file at"),
        ("a,b\n1,2\n", "table.xml", r"no \.parquet, .* or \.feather file at"),
        ("", "empty.jsonl", r"empty\.jsonl holds no rows"),
        (" \n\n", "blank.jsonl", r"blank\.jsonl holds no rows"),
        ('{"a": "a", "b": "b"}\n', "other.jsonl", "its columns are a, b; rename them to messages"),
    ],
)
def test_input_without_rows_is_refused(
    assets: Path, tmp_path: Path, content: str | None, name: str, sentence: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=sentence):
        preprocess.main(options(assets, tmp_path, input=str(tmp_path / name)))
    assert not (tmp_path / "packed").exists()


def test_an_empty_parquet_file_is_refused(assets: Path, tmp_path: Path) -> None:
    pq.write_table(pa.table({"instruction": pa.array([], pa.string())}), tmp_path / "empty.parquet")
    with pytest.raises(UserError, match="holds no rows"):
        preprocess.main(options(assets, tmp_path, input=str(tmp_path / "empty.parquet")))


def test_a_local_path_is_refused_on_several_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLUSTER_NODES", json.dumps([{"resources": {"CPU": 1}, "count": 2}]))
    refuse_private_paths({"input": "s3://bucket/data", "output": "/efs/packed"}, ("/efs",), "preprocess")
    with pytest.raises(UserError, match="output = /efs2/packed is on the disk of one node"):
        refuse_private_paths({"output": "/efs2/packed"}, ("/efs",), "preprocess")
    monkeypatch.setenv("CLUSTER_NODES", json.dumps([{"resources": {"CPU": 1}, "count": 1}]))
    refuse_private_paths({"output": "/efs2/packed"}, (), "preprocess")


def test_the_command_prints_a_one_sentence_error() -> None:
    command = [sys.executable, "-m", "jobs.preprocess", "--input", "missing.jsonl"]
    done = subprocess.run(command, cwd=settings.PROJECT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.startswith("error: no .parquet, .jsonl, .json, .csv, .tsv, .xlsx, .arrow or .feather file at")
    assert len(done.stderr.splitlines()) == 1


# ---------------------------------------------------------------- the output folder


def test_a_complete_data_set_is_not_written_again(
    made: Path, many: Path, assets: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (made / "packed" / "manifest.json").stat().st_mtime_ns
    preprocess.main(options(assets, made, input=str(many), shard_mib=0.15))
    assert "already made" in capsys.readouterr().out
    assert (made / "packed" / "manifest.json").stat().st_mtime_ns == before


def test_another_data_set_is_replaced_only_with_overwrite(assets: Path, tmp_path: Path, ray_session: None) -> None:
    preprocess.main(options(assets, tmp_path))
    before = shard_bytes(tmp_path)
    with pytest.raises(UserError, match="made from other input or with other settings; replace it with --over"):
        preprocess.main(options(assets, tmp_path, seed=1))
    assert shard_bytes(tmp_path) == before
    preprocess.main(options(assets, tmp_path, seed=1, overwrite=True))
    assert manifest(tmp_path)["seed"] == 1
    assert shard_bytes(tmp_path) != before


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    photo = tmp_path / "train" / "photo.jpg"
    photo.parent.mkdir()
    photo.touch()
    with pytest.raises(UserError, match="holds other files"):
        PackedFolder(str(tmp_path)).begin(overwrite=True)
    assert photo.exists()


def test_the_files_of_an_interrupted_run_are_deleted(tmp_path: Path) -> None:
    output = PackedFolder(str(tmp_path))
    output.begin(overwrite=False)
    output.save("train/part-00007.parquet", b"half")
    assert not output.is_complete({})
    output.begin(overwrite=False)
    assert not (tmp_path / "train").exists()
    output.finish({"seed": 0})
    assert output.is_complete({"seed": 0})
    assert [file.name for file in tmp_path.iterdir()] == ["manifest.json"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, which only Linux has")
def test_a_full_disk_gives_a_one_sentence_error() -> None:
    with pytest.raises(UserError, match="no space is left for /dev; free some space"):
        PackedFolder("/dev").save("full", b"content")


@pytest.mark.parametrize(
    ("cause", "sentence"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), r"no space is left in .* on a node: the shuffle"),
        (ShuffleDiskError("exhausted"), r"no space is left in .* on a node: the shuffle"),
        (UserError("x.parquet is broken.\nRay's own advice"), r"^x\.parquet is broken\.$"),
    ],
)
def test_a_failed_task_gives_a_one_sentence_error(cause: Exception, sentence: str) -> None:
    explained = preprocessing.explain(RayTaskError("task", "traceback", cause))
    assert isinstance(explained, UserError)
    assert re.search(sentence, str(explained))


def test_a_bug_in_a_task_keeps_its_traceback() -> None:
    error = RayTaskError("task", "traceback", ZeroDivisionError())
    assert preprocessing.explain(error) is error


def test_an_output_that_cannot_be_written_gives_a_one_sentence_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written"):
        PackedFolder(str(tmp_path / "file" / "packed")).begin(overwrite=False)


# ---------------------------------------------------------------- S3


def test_a_bucket_works_like_a_folder(made: Path, many: Path, assets: Path, tmp_path: Path, s3: str) -> None:
    filesystem, bucket = pyarrow.fs.FileSystem.from_uri(s3)
    pyarrow.fs.copy_files(str(many.parent), f"{bucket}/raw", destination_filesystem=filesystem)
    in_bucket = {"input": f"{s3}/raw/*.jsonl", "output": f"{s3}/packed"}
    preprocess.main(options(assets, tmp_path, shard_mib=0.15, **in_bucket))
    pyarrow.fs.copy_files(f"{bucket}/packed", str(tmp_path / "packed"), source_filesystem=filesystem)
    assert shard_bytes(tmp_path) == shard_bytes(made)
    assert manifest(tmp_path)["content_hash"] == manifest(made)["content_hash"]
    with pytest.raises(UserError, match=r"s3://bucket/packed holds a data set that was made from other input"):
        preprocess.main(options(assets, tmp_path, shard_mib=0.15, seed=1, **in_bucket))
    with pytest.raises(UserError, match=r"no .parquet, .* or .feather file at s3://bucket/nothing"):
        preprocess.main(options(assets, tmp_path, input=f"{s3}/nothing"))


# ---------------------------------------------------------------- console output


def test_examples_show_the_trained_tokens_in_color(
    made: Path, many: Path, assets: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    preprocess.main(options(assets, made, input=str(many), shard_mib=0.15, show=2))
    shown = capsys.readouterr().out
    assert shown.count("\x1b[32mContinue<|eos|>\x1b[0m") == 2
    assert "\x1b[2m<|bos|><|user|>What is the reason phrase of HTTP status 100? (0)<|assistant|>\x1b[0m" in shown


def test_the_progress_line_shows_progress_speed_and_time_left() -> None:
    line = preprocessing.PreprocessProgress(1000)
    assert line({}, 5) == "starting workers: 5 s"
    read = {"rows_read": 50, "bytes_read": 250}
    assert line(read, 10) == "reading: 50 rows, 25% of the input, 5 rows/s, 30 s left"
    read = {"rows_read": 200, "bytes_read": 1000}
    assert line(read, 40) == "shuffling: 200 rows, 40 s since the start"
    assert line(read | {"rows_packed": 50}, 50) == "packing: 50 of 200 rows, 5 rows/s, 30 s left"
    assert time_left(1, 11, 60) == "10 min left"


# ---------------------------------------------------------------- memory

STREAM = """
import json, sys, threading, time
import psutil, ray
from jobs import preprocess

def watch():
    this = psutil.Process()
    while True:
        for process in [this, *this.children(recursive=True)]:
            try:
                peaks[-1] = max(peaks[-1], process.memory_full_info().uss)
            except psutil.Error:  # the process has ended
                pass
        time.sleep(0.3)

ray.init(address="local", num_cpus=2, object_store_memory=80 * 2**20, include_dashboard=False, log_to_driver=False)
peaks = [0]
threading.Thread(target=watch, daemon=True).start()
for text in sys.argv[1:]:
    peaks.append(0)
    preprocess.main(preprocess.PreprocessOptions.model_validate_json(text))
print(json.dumps({"store": ray.cluster_resources()["object_store_memory"], "peaks": peaks[1:]}))
"""


def write_bulky_rows(folder: Path, megabytes: int) -> int:
    """Write JSONL rows of 20 kB each, of which the chat template uses little. Return the size of the file."""
    noise = random.Random(megabytes)
    found = []
    for number in range(megabytes * 50):
        user = {"role": "user", "content": f"What is {number}?", "source": noise.randbytes(10_000).hex()}
        found.append({"messages": [user, {"role": "assistant", "content": f"A number: {number}."}]})
    return write_rows(folder / "rows.jsonl", found).stat().st_size


@pytest.mark.nightly
def test_memory_stays_flat_if_the_input_is_ten_times_the_object_store(assets: Path, tmp_path: Path) -> None:
    sizes = [write_bulky_rows(tmp_path / name, megabytes) for name, megabytes in (("small", 20), ("large", 850))]
    runs = [
        options(assets, tmp_path / name, input=str(tmp_path / name), shard_mib=8).model_dump_json()
        for name in ("small", "large")
    ]
    command = [sys.executable, "-c", STREAM, *runs]
    done = subprocess.run(command, cwd=settings.PROJECT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout.splitlines()[-1])
    assert sizes[1] >= 10 * measured["store"]
    assert manifest(tmp_path / "large")["train"]["documents"] > 0.97 * 50 * 850
    small, large = measured["peaks"]  # memory of the largest process, in bytes
    assert large - small < 100 * 2**20


def test_rows_are_tokenized_in_slices_of_similar_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "SLICE_BYTES", 10)
    lengths = [3, 3, 3, 3, 50, 1, 9, 10, 2]
    table = pa.table({"row": pa.array([bytes(length) for length in lengths], pa.large_binary())})
    parts = list(shards.slices(table))
    assert pa.concat_tables(parts).equals(table)
    assert len(parts) > 4
    assert all(sum(map(len, part["row"].to_pylist()[1:])) < 10 for part in parts)  # not counting the slice's first row
