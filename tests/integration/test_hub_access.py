"""Test what jobs say if the Hugging Face hub refuses or does not answer, with the real client and a fake hub."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import unquote

import pytest

from raymill import settings
from raymill.ray_support import hub_access

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_of_the_test"
SLOW_S = 3.0
"""Longer than TIMEOUT_S, for which the client waits."""


class Answer(NamedTuple):
    """An answer that refuses a request."""

    status: int
    headers: Mapping[str, str] = MappingProxyType({})


GATED = {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access to this resource is restricted."}
REFUSALS = {
    "gated": Answer(401, GATED),
    "gated-for-this-account": Answer(403, GATED),
    "forbidden": Answer(403, {"X-Error-Message": "insufficient permissions"}),
    "private": Answer(401, {"X-Error-Message": "Invalid username or password."}),
    "missing": Answer(404, {"X-Error-Code": "RepoNotFound"}),
    "wrong-token": Answer(401, {"X-Error-Message": "Invalid credentials in Authorization header"}),
    "busy": Answer(429, {"Retry-After": "300"}),
    "busy-account": Answer(429, {"RateLimit": '"api";r=0;t=120'}),
    "broken": Answer(500),
    "down": Answer(503, {"Retry-After": "600"}),
}
UNREACHABLE = ("slow", "reset")

ADD_TOKEN = r"put a token that may read, from \S+, into \.env as HF_TOKEN"
UNREACHABLE_SENTENCE = r"http://\S+ does not answer \(.+\)\. Check the network, then try again\.$"
SENTENCES = {
    "gated": rf"acme/gated is gated\. Accept the license at http://\S+/acme/gated, and {ADD_TOKEN}\.$",
    "gated-for-this-account": rf"/acme/gated-for-this-account, and {ADD_TOKEN}\.$",
    "forbidden": rf"acme/forbidden is gated\. Accept the license at http://\S+/acme/forbidden, and {ADD_TOKEN}\.$",
    "private": rf"has no \w+ acme/private, or it is private\. Correct the name, or {ADD_TOKEN}\.$",
    "missing": rf"has no \w+ acme/missing, or it is private\. Correct the name, or {ADD_TOKEN}\.$",
    "busy": rf"no more requests for now \(status 429\)\. Try again in 300 s, or {ADD_TOKEN}, which allows more",
    "busy-account": r"no more requests for now \(status 429\)\. Try again in 120 s",
    "broken": r"hub cannot send acme/broken \(status 500\)\. Try again later",
    "down": r"hub cannot send acme/down \(status 503\)\. Try again later",
    "slow": UNREACHABLE_SENTENCE,
    "reset": UNREACHABLE_SENTENCE,
}
WITH_TOKEN = {
    "gated-for-this-account": r"HF_TOKEN has no access to acme/gated-for-this-account\. Accept the license at "
    r"http://\S+/acme/gated-for-this-account with the account of this token\.$",
    "forbidden": r"HF_TOKEN has no access to acme/forbidden",
    "missing": r"has no model acme/missing that HF_TOKEN may read\. Correct the name\.$",
    "wrong-token": rf"does not accept HF_TOKEN\. In its place, {ADD_TOKEN}",
    "busy": r"Try again in 300 s\.$",
}

READ = """
import json, os, sys, tempfile, time, urllib.request
from concurrent.futures import ThreadPoolExecutor
from huggingface_hub.utils import _http
from raymill import settings
from raymill.errors import UserError
from raymill.data import row_sources
from raymill.data.tokenizer import load_tokenizer
from raymill.evaluation import candidates
from raymill.generation.prompts import PromptTokenizer
from raymill.rag.embedder import EmbeddingModelInfo
from raymill.ray_support import hub_access, model_cache
from raymill.serving import preflight as serving
from raymill.serving.options import ServeOptions
from raymill.training import preflight
from raymill.training.options import DDPOptions

train = settings.load(DDPOptions, "train", profile="local")
serve = settings.load(ServeOptions, "serve", profile="local")
READERS = {
    "train": lambda name: preflight.with_absolute_paths(train.model_copy(update={"model": name})),
    "preprocess": lambda name: load_tokenizer(name),
    "preprocess hf://": lambda name: row_sources.find(f"hf://datasets/{name}"),
    "evaluate": lambda name: candidates.find(name),
    "generate": lambda name: PromptTokenizer(name, "id", 100),
    "embed": lambda name: EmbeddingModelInfo(model_cache.find(name)),
    "serve": lambda name: serving.check_model(serve.model_copy(update={"model": name})),
    "mirror": lambda name: model_cache._mirror(name, f"file://{tempfile.mkdtemp()}"),
    # as if the hub began to refuse after `check`
    "configuration": lambda name: preflight.load_config(name),
}

def ask(reader, name):
    started = time.monotonic()
    try:
        READERS[reader](f"acme/{name}")
        message = "read"
    except UserError as error:
        message = str(error)
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    return [reader, name, message, time.monotonic() - started]

def ask_all(readers, names):
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda pair: ask(*pair), [(reader, name) for reader in readers for name in names]))

names, with_token, timeout_s = json.loads(sys.argv[1])
hub_access.TIMEOUT_S = timeout_s
found = {"timed": ask_all(["train"], names)}
_http.time = type("Time", (), {"sleep": lambda seconds: None, "time": time.time})  # retries without pauses
found["cached"] = [ask("preprocess", "tiny")]
urllib.request.urlopen(f"{os.environ['HF_ENDPOINT']}/refuse/tiny")
hub_access.check.cache_clear()
found["cached"] += [ask("preprocess", "tiny")]
found["without token"] = ask_all(READERS, names)
os.environ["HF_TOKEN"] = "hf_of_the_test"
found["with token"] = ask_all(["train"], with_token)
print(json.dumps(found))
"""
READERS = re.findall(r'^    "(.*?)": lambda', READ, re.MULTILINE)
TIMEOUT_S = 1.0


class Hub(BaseHTTPRequestHandler):
    """Refuses requests for repositories in REFUSALS, does not answer those in UNREACHABLE, and serves `files`."""

    protocol_version = "HTTP/1.1"
    address: str
    files: dict[str, bytes]
    refused: set[str]

    def do_GET(self) -> None:
        path = unquote(self.path.partition("?")[0])
        if path.startswith("/refuse/"):
            self.refused.add(path.rpartition("/")[2])
            return self._answer(Answer(200), b"")
        found = re.search(r"/acme/([\w.-]+)(?:/resolve/\w+/(.+)|/tree/.*)?", path)
        name, file = (found[1], found[2]) if found else ("missing", "")
        if name == "slow":
            time.sleep(SLOW_S)
        if name in UNREACHABLE:
            self.close_connection = True
        elif name in REFUSALS or name in self.refused:
            self._answer(REFUSALS.get(name, REFUSALS["down"]), b"{}")
        elif "/tree/" in path:
            entries = [
                {"type": "file", "path": one, "size": len(content), "oid": COMMIT} for one, content in self._of(name)
            ]
            self._answer(Answer(200), json.dumps(entries).encode())
        elif file is None:
            self._answer(Answer(200), json.dumps({"id": f"acme/{name}", "sha": COMMIT, "siblings": []}).encode())
        elif content := dict(self._of(name)).get(file):
            self._answer(Answer(200, {"ETag": f'"{name}-{file}"'}), content)
        else:
            self._answer(Answer(404, {"X-Error-Code": "EntryNotFound"}), b"{}")

    do_HEAD = do_GET

    def _of(self, name: str) -> list[tuple[str, bytes]]:
        prefix = f"{name}/"
        return [(one.removeprefix(prefix), content) for one, content in self.files.items() if one.startswith(prefix)]

    def _answer(self, answer: Answer, content: bytes) -> None:
        self.send_response(answer.status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("X-Repo-Commit", COMMIT)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests."""


@pytest.fixture(scope="module")
def hub() -> Iterator[type[Hub]]:
    class Handler(Hub):
        files, refused, address = {}, set(), ""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        Handler.address = f"http://127.0.0.1:{server.server_port}"
        yield Handler
        server.shutdown()


def run(hub: type[Hub], home: Path, code: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new process, because huggingface_hub reads the hub's address when it is imported."""
    unset = ("HF_TOKEN", "PROJECT_DIR", "SECRET_NAMES")  # the fixture `ray_session` of other modules sets the last
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment |= {"HF_ENDPOINT": hub.address, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(home)}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=environment | variables,
        cwd=settings.PROJECT,
        capture_output=True,
        text=True,
    )


class Result(NamedTuple):
    """What a reader said about a repository."""

    reader: str
    name: str
    message: str
    seconds: float


@pytest.fixture(scope="module")
def results(hub: type[Hub], tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> dict[str, list[Result]]:
    """Return the results of all readers. One process reads everything, because its imports take seconds."""
    files = [file for file in model_folder.iterdir() if file.suffix in (".json", ".jinja")]
    hub.files = {f"tiny/{file.name}": file.read_bytes() for file in files}
    arguments = json.dumps([list(SENTENCES), list(WITH_TOKEN), TIMEOUT_S])
    done = run(hub, tmp_path_factory.mktemp("home"), READ, arguments)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    return {part: [Result(*line) for line in lines] for part, lines in found.items()}


@pytest.mark.parametrize("reader", READERS)
def test_each_reader_says_in_one_sentence_what_the_hub_refuses(results: dict[str, list[Result]], reader: str) -> None:
    messages = {result.name: result.message for result in results["without token"] if result.reader == reader}
    assert messages.keys() == SENTENCES.keys()
    assert {name: text for name, text in messages.items() if not re.search(SENTENCES[name], text)} == {}
    assert not any("\n" in message for message in messages.values())


def test_with_a_token_the_sentence_is_about_the_token(results: dict[str, list[Result]]) -> None:
    messages = {result.name: result.message for result in results["with token"]}
    assert {name: text for name, text in messages.items() if not re.search(WITH_TOKEN[name], text)} == {}


def test_the_sentence_comes_after_three_short_attempts(results: dict[str, list[Result]]) -> None:
    seconds = {result.name: result.seconds for result in results["timed"]}
    assert max(seconds.values()) < 3 * TIMEOUT_S + 1 + 2 + 10  # 10 s for a busy machine
    assert hub_access.TIMEOUT_S * (hub_access.RETRIES + 1) < 20


def test_a_model_in_the_cache_is_read_while_the_hub_is_down(results: dict[str, list[Result]]) -> None:
    assert [result.message for result in results["cached"]] == ["read", "read"]


MIRROR = "import sys; from raymill.ray_support import model_cache; model_cache._mirror(sys.argv[1], sys.argv[2])"


@pytest.mark.parametrize(
    ("weights", "copied"),
    [
        (["pytorch_model.bin", "training_args.bin"], {"pytorch_model.bin"}),
        (
            ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin", "pytorch_model.bin.index.json"],
            {"pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin", "pytorch_model.bin.index.json"},
        ),
        (["model.safetensors", "pytorch_model.bin"], {"model.safetensors"}),
        (["pytorch_model.bin", "1_Dense/model.safetensors"], {"pytorch_model.bin", "1_Dense/model.safetensors"}),
    ],
    ids=["bin only", "bin in parts", "both", "safetensors in a subfolder"],
)
def test_the_bucket_gets_weights_in_one_format(
    hub: type[Hub], tmp_path: Path, weights: list[str], copied: set[str]
) -> None:
    files = ["config.json", "tokenizer.model", *weights, "flax_model.msgpack"]
    hub.files = {f"weights/{file}": file.encode() for file in files}
    bucket = tmp_path / "bucket"
    (bucket / "1_Dense").mkdir(parents=True)
    done = run(hub, tmp_path / "home", MIRROR, "acme/weights", f"file://{bucket}")
    assert done.returncode == 0, done.stderr
    found = {str(file.relative_to(bucket)): file.read_bytes().decode() for file in bucket.rglob("*") if file.is_file()}
    assert found == {".mirrored": ""} | {name: name for name in {"config.json", "tokenizer.model", *copied}}


JOB = """
import sys
from raymill.job import run
from raymill.ray_support import model_cache
sys.argv = ["job.py"]
run(lambda options: print(model_cache.find("acme/gated-for-this-account")), None)
"""


def test_a_job_uses_the_token_in_env_before_it_connects(hub: type[Hub], tmp_path: Path) -> None:
    (tmp_path / ".env").write_text(f"HF_TOKEN={TOKEN}\n")
    done = run(hub, tmp_path, JOB, SECRETS_FILE=str(tmp_path / ".env"))
    assert done.stderr.splitlines()[-1].startswith("error: HF_TOKEN has no access to acme/gated-for-this-account")
