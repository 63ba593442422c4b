"""Test reading data sets with the real hub client, from a fake hub that answers like huggingface.co."""

import bz2
import gzip
import io
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import openpyxl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raymill import settings

ROWS = [{"instruction": f"question {number}", "output": f"answer {number}", "id": number} for number in range(5)]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
READ = """
import json, pickle, sys
from raymill.data import row_sources
from raymill.errors import UserError
for name in sys.argv[1:]:
    try:
        source = pickle.loads(pickle.dumps(row_sources.find(name)))  # as Ray does to send the source to its workers
    except UserError as error:
        sys.exit(str(error))
    print(json.dumps([json.loads(row["row"]) for row in row_sources.head(source, 10).rows]))
"""


class Hub(BaseHTTPRequestHandler):
    """Answers the requests of HfFileSystem for a repository, its folders and files, and their content."""

    protocol_version = "HTTP/1.1"
    files: dict[str, bytes]

    def do_GET(self) -> None:
        path = unquote(self.path.partition("?")[0])
        if match := re.fullmatch(r"/api/datasets/acme/([^/]+)(?:/revision/.+)?", path):
            known = any(file.startswith(f"{match[1]}/") for file in self.files)
            self._json({"id": f"acme/{match[1]}", "sha": COMMIT, "siblings": []} if known else None)
        elif match := re.fullmatch(r"/api/datasets/acme/([^/]+)/tree/(?:~parquet|main)/?(.*)", path):
            self._json(self._tree(match[1], match[2]))
        elif match := re.fullmatch(r"/datasets/acme/([^/]+)/resolve/(?:~parquet|main)/(.+)", path):
            self._bytes(self.files.get(f"{match[1]}/{match[2]}"))
        else:
            self._json(None)

    do_HEAD = do_GET

    def _tree(self, name: str, folder: str) -> list[dict]:
        below = [file.removeprefix(f"{name}/") for file in self.files if file.startswith(f"{name}/")]
        prefix = f"{folder}/" if folder else ""
        children = sorted(
            {prefix + path.removeprefix(prefix).split("/")[0] for path in below if path.startswith(prefix)}
        )
        return [one for child in children for one in self._entries(name, child)]

    def _entries(self, name: str, path: str) -> list[dict]:
        if content := self.files.get(f"{name}/{path}"):
            return [{"type": "file", "path": path, "size": len(content), "oid": COMMIT}]
        is_folder = any(file.startswith(f"{name}/{path}/") for file in self.files)
        return [{"type": "directory", "path": path, "oid": COMMIT}] if is_folder else []

    def _bytes(self, content: bytes | None) -> None:
        if content is None:
            self._json(None)
            return
        start, stop = 0, len(content)
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start, stop = int(match[1]), min(len(content), int(match[2] or len(content)) + 1)
        self._answer(206 if "Range" in self.headers else 200, content[start:stop], "application/octet-stream")

    def _json(self, value: object | None) -> None:
        if value is None:
            self._answer(404, b'{"error": "not found"}', "application/json")
        else:
            self._answer(200, json.dumps(value).encode(), "application/json")

    def _answer(self, status: int, content: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{COMMIT}"')
        self.send_header("X-Repo-Commit", COMMIT)
        if status == 404:
            is_known = any(f"/acme/{file.partition('/')[0]}/" in self.path for file in self.files)
            self.send_header("X-Error-Code", "EntryNotFound" if is_known else "RepoNotFound")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests."""


def as_arrow() -> bytes:
    sink = pa.BufferOutputStream()
    table = pa.Table.from_pylist(ROWS)
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def as_workbook() -> bytes:
    book, sink = openpyxl.Workbook(), io.BytesIO()
    for values in (ROWS[0].keys(), *(row.values() for row in ROWS)):
        book.worksheets[0].append(list(values))
    book.save(sink)
    return sink.getvalue()


LINES = "".join(f"{json.dumps(row)}\n" for row in ROWS).encode()
CSV = "instruction,output\n" + "".join(f"{row['instruction']},{row['output']}\n" for row in ROWS)
FORMATS = {
    "a.jsonl": LINES,
    "a.jsonl.gz": gzip.compress(LINES),
    "a.json": json.dumps(ROWS).encode(),
    "a.csv": CSV.encode(),
    "a.tsv.bz2": bz2.compress(CSV.replace(",", "\t").encode()),
    "a.arrow": as_arrow(),
    "a.xlsx": as_workbook(),
}


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(ROWS), sink)
    content = sink.getvalue().to_pybytes()
    files = {f"formats/{name}/{name}": made for name, made in FORMATS.items()} | {
        "simple/default/train/0000.parquet": content,
        "simple/default/test/0000.parquet": content,
        "languages/de/train/0000.parquet": content,
        "languages/en/train/0000.parquet": content,
    }
    handler = type("Handler", (Hub,), {"files": files})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def read(hub: str, uris: list[str], tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """Read sources in a new process, because huggingface_hub reads the hub's address when it is imported."""
    environment = os.environ | {"HF_ENDPOINT": hub, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-c", READ, *uris]
    return subprocess.run(command, env=environment, cwd=settings.PROJECT, capture_output=True, text=True)


@pytest.mark.parametrize("name", ["simple", "languages@~parquet/de/train"])
def test_a_data_set_on_the_hub_is_read(hub: str, tmp_path: Path, name: str) -> None:
    done = read(hub, [f"hf://datasets/acme/{name}"], tmp_path)
    assert done.returncode == 0, done.stderr
    answers = [row["messages"][1]["content"] for row in json.loads(done.stdout.splitlines()[-1])]
    assert answers == [row["output"] for row in ROWS]


def test_files_of_each_format_are_read_from_the_hub(hub: str, tmp_path: Path) -> None:
    uris = [f"hf://datasets/acme/formats/{name}/{part}" for name in FORMATS for part in (name, "*")]
    done = read(hub, uris, tmp_path)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(found) == len(uris)
    for rows in found:
        assert [row["messages"][1]["content"] for row in rows] == [row["output"] for row in ROWS]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "languages",
            "hf://datasets/acme/languages@~parquet has de, en; name one: --input hf://datasets/acme/languages@",
        ),
        ("missing", "the Hugging Face hub has no dataset acme/missing, or it is private. Correct the name"),
    ],
)
def test_an_ambiguous_or_missing_data_set_gives_a_one_sentence_error(
    hub: str, tmp_path: Path, name: str, sentence: str
) -> None:
    done = read(hub, [f"hf://datasets/acme/{name}"], tmp_path)
    assert done.returncode == 1
    assert sentence in done.stderr.splitlines()[-1]
