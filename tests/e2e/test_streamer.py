"""Test that vLLM streams a model's weights from a bucket, with a package that is not part of the project."""

import json
import os
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import boto3
import openai
import pytest

from raymill.demo import assets as demo_assets
from raymill.network import free_ports

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="vLLM's CPU build exists for Linux only")

STREAMER = ["runai-model-streamer==0.17.1", "runai-model-streamer-s3==0.17.1", "humanize"]
KEY = "key-for-the-streamed-model"


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """Return the Python of an environment with the streamer and, by a link, with the packages of this environment."""
    environment, uv = tmp_path / "environment", os.environ.get("UV", "uv")
    subprocess.run([uv, "venv", "-q", "--python", sys.executable, environment], check=True)
    python = environment / "bin" / "python"
    subprocess.run([uv, "pip", "install", "-q", "--no-deps", "--python", python, *STREAMER], check=True)
    (packages,) = environment.glob("lib/*/site-packages")
    (packages / "project.pth").write_text(sysconfig.get_path("purelib"))
    return python


@pytest.mark.nightly
def test_weights_stream_from_the_bucket(python: Path, s3: str, model_folder: Path, tmp_path: Path) -> None:
    for file in model_folder.iterdir():
        boto3.client("s3").upload_file(str(file), "bucket", f"streamed/model/{file.name}")
    secrets, (port,) = tmp_path / ".env", free_ports(1)
    secrets.write_text(f"SERVE_API_KEY={KEY}\n")
    options = ["--model", f"{s3}/streamed/model", "--port", str(port)]
    options += ["--engine", json.dumps({"load_format": "runai_streamer"})]
    kept = "RAY_worker_niceness"  # with the default, tests that compute would starve Serve
    variables = {name: value for name, value in os.environ.items() if not name.startswith("RAY_") or name == kept}
    variables |= {
        "HOME": str(tmp_path),
        "HF_HOME": str(tmp_path / "huggingface"),
        "SECRETS_FILE": str(secrets),
        "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",  # moto has no names for its buckets
    }
    with subprocess.Popen(
        [python, "-m", "jobs.serve_llm", *options], env=variables, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout
        printed = ""
        while "is served at" not in printed:
            line = server.stdout.readline()
            assert line, printed
            printed += line
        try:
            client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY)
            fact = demo_assets.questions(1)[0]
            answer = client.chat.completions.create(
                model="streamed", messages=[{"role": "user", "content": fact.question}], max_tokens=8, temperature=0
            )
        finally:
            server.send_signal(signal.SIGINT)
    text = answer.choices[0].message.content
    assert text
    assert fact.answer.startswith(text)  # which the untrained model would not answer
    assert not list(tmp_path.rglob("*.safetensors"))  # nothing was copied to the disk
