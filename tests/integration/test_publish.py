"""Test publishing a run with the real hub client, on a fake hub that answers like huggingface.co."""

import base64
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

import pytest
import yaml

from raymill import settings
from raymill.training import history, model_card

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_of_the_test"
PUBLISH = """
import sys
from raymill import publish
from raymill.errors import UserError
try:
    print(publish.publish("run", *sys.argv[1:], public=False))
except UserError as error:
    sys.exit(str(error))
"""
IDENTITY = {"model": "Qwen3-8B (c0dd556e19c8)", "strategy": "ddp", "learning_rate": 0.003, "steps": 2}
SPLIT = {"documents": 9, "cut_documents": 0, "rows": 2, "tokens": 100, "trained_tokens": 50}
DATA: dict[str, Any] = {
    "content_hash": "c89496c6403f",
    "sequence_length": 64,
    "tokenizer": {"model": "s3://bucket/models/Qwen/Qwen3-8B"},
    "input": [{"name": "/home/ada/secret project/data/chats/*.jsonl", "weight": 1.0}],
    "sources": {"/home/ada/secret project/data/chats/*.jsonl": SPLIT},
    "train": SPLIT,
    "eval": SPLIT,
}


class Hub(BaseHTTPRequestHandler):
    """Answers the requests of `create_repo` and `create_commit`, with LFS for weights."""

    protocol_version = "HTTP/1.1"
    address: str
    created: list[dict[str, Any]]
    uploads: dict[str, bytes]
    files: dict[str, bytes]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        base = f"http://{self.headers['Host']}"
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            self._answer({"error": "Invalid credentials"}, 401)
        elif self.path == "/api/repos/create":
            self.created.append(json.loads(body))
            self._answer({"url": f"{base}/acme/model", "name": "acme/model"})
        elif self.path == "/api/validate-yaml":
            errors = [] if "license: apache-2.0" in body.decode() else [{"message": '"license" must be one of'}]
            self._answer({"errors": errors, "warnings": []}, 400 if errors else 200)
        elif self.path == "/api/models/acme/model/preupload/main":
            names = [file["path"] for file in json.loads(body)["files"]]
            modes = {name: "lfs" if name.endswith(".safetensors") else "regular" for name in names}
            answers = [{"path": name, "uploadMode": mode, "shouldIgnore": False} for name, mode in modes.items()]
            self._answer({"files": answers})
        elif self.path == "/acme/model.git/info/lfs/objects/batch":
            objects = json.loads(body)["objects"]
            actions = [{"upload": {"href": f"{base}/upload/{one['oid']}", "header": {}}} for one in objects]
            self._answer(
                {
                    "transfer": "basic",
                    "objects": [one | {"actions": act} for one, act in zip(objects, actions, strict=True)],
                }
            )
        elif self.path == "/api/models/acme/model/commit/main":
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                elif line["key"] == "lfsFile":
                    self.files[line["value"]["path"]] = self.uploads[line["value"]["oid"]]
            self._answer({"commitUrl": f"{base}/acme/model/commit/{COMMIT}", "commitOid": COMMIT, "success": True})
        else:
            self._answer({"error": "not found"}, 404)

    def do_PUT(self) -> None:
        self.uploads[self.path.removeprefix("/upload/")] = self.rfile.read(int(self.headers["Content-Length"]))
        self._answer({})

    def do_GET(self) -> None:
        self._answer({"error": "not found"}, 404)

    def _answer(self, value: object, status: int = 200) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests."""


@pytest.fixture
def hub() -> Iterator[type[Hub]]:
    class Handler(Hub):
        created, uploads, files = [], {}, {}

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        Handler.address = f"http://127.0.0.1:{server.server_port}"
        yield Handler
        server.shutdown()


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """Return a folder with a run that has a model."""
    model = tmp_path / "runs" / "run" / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text('{"model_type": "llama"}')
    (model / "model.safetensors").write_bytes(b"weights" * 1000)
    lines = {
        "run.json": [IDENTITY],
        "data.json": [DATA],
        "events.jsonl": [{"event": "start", "step": 0, "time": 0}],
        "metrics.jsonl": [
            {"step": 1, "loss": 2.0, "time": 1},
            {"step": 2, "loss": 1.5, "time": 2, "eval_loss": 1.25, "eval_perplexity": 3.49},
        ],
    }
    for name, objects in lines.items():
        (model.parent / name).write_text("".join(json.dumps(one) + "\n" for one in objects))
    return tmp_path


def publish(
    hub: type[Hub], output: Path, repository: str = "acme/model", token: str = TOKEN, license_id: str = "apache-2.0"
) -> subprocess.CompletedProcess[str]:
    """Publish in a new process, because huggingface_hub reads the hub's address when it is imported."""
    variables = {"HF_ENDPOINT": hub.address, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": token}
    environment = os.environ | variables | {"PROFILE": "local", "PROJECT_DIR": str(output), "HF_HOME": str(output)}
    environment |= {"SECRETS_FILE": str(output / "none")}
    command = [sys.executable, "-c", PUBLISH, repository, license_id]
    return subprocess.run(command, env=environment, cwd=settings.PROJECT, capture_output=True, text=True)


def test_the_model_and_its_card_arrive_in_a_private_repository(hub: type[Hub], output: Path) -> None:
    done = publish(hub, output)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"{hub.address}/acme/model"
    [created] = hub.created
    assert (created["name"], created["organization"]) == ("model", "acme")
    assert created.get("private") is True or created.get("visibility") == "private"
    model = output / "runs" / "run" / "model"
    assert hub.files.pop("README.md").decode() == model_card.card(_run(output), "model", "apache-2.0", is_adapter=False)
    assert hub.files == {path.name: path.read_bytes() for path in model.iterdir()}


def _run(output: Path) -> history.History:
    [run] = history.read_all(str(output / "runs"), ["run"])
    return run


def test_the_card_says_what_was_not_trained(output: Path) -> None:
    card = model_card.card(_run(output), "model", "apache-2.0", is_adapter=False, other_parts=["audio", "vision"])
    assert "pipeline_tag: image-text-to-text" in card
    assert "Only text was trained: the parts for audio and vision are those of the base model." in card


def test_the_card_has_data_settings_results_and_no_path(output: Path) -> None:
    card = model_card.card(_run(output), "model", "apache-2.0", is_adapter=True)
    _, metadata, text = card.split("---\n", 2)
    assert yaml.safe_load(metadata) == {
        "license": "apache-2.0",
        "base_model": "Qwen/Qwen3-8B",
        "library_name": "peft",
        "pipeline_tag": "text-generation",
    }
    for line in (
        "| learning_rate | 0.003 |",
        "| training loss at the end | 1.5000 |",
        "| chats/*.jsonl | 1 | 9 | 100 |",
    ):
        assert line in text
    assert "evaluation perplexity at the end | 3.490" in text
    assert "secret project" not in card
    assert "bucket" not in card


@pytest.mark.parametrize(
    ("repository", "token", "license_id", "problem"),
    [
        ("model", TOKEN, "apache-2.0", "Pass --to OWNER/NAME"),
        ("acme/model", "", "apache-2.0", "HF_TOKEN is not set"),
        ("acme/model", "hf_wrong", "apache-2.0", "the hub did not take acme/model"),
        ("acme/model", TOKEN, "mine", "the hub did not take acme/model (Invalid metadata in README.md"),
    ],
)
def test_a_refusal_is_one_sentence(
    hub: type[Hub], output: Path, repository: str, token: str, license_id: str, problem: str
) -> None:
    done = publish(hub, output, repository, token, license_id)
    assert done.returncode == 1
    assert problem in done.stderr.splitlines()[-1]
    assert not re.search("Traceback", done.stderr)
    assert not hub.files


def test_a_hub_that_cannot_be_reached_is_one_sentence(hub: type[Hub], output: Path) -> None:
    class Gone(Hub):
        address = "http://127.0.0.1:9"  # nothing listens on this port

    done = publish(Gone, output)
    assert done.returncode == 1
    assert re.match(r"the hub did not take acme/model \(.*refused.*\)", done.stderr.splitlines()[-1])
    assert not re.search("Traceback", done.stderr)
