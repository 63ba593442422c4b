"""Shared fixtures: the demo's assets, a tiny trained model, an S3 server and Ray, which only `ray_session` imports.

The tests run on the library's source, in a project that skeleton.py generates.
"""

import gc
import io
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from secrets import token_hex
from types import ModuleType

import boto3
import pytest
from botocore.exceptions import EndpointConnectionError
from moto.backends import get_backend
from moto.core import DEFAULT_ACCOUNT_ID
from moto.server import ThreadedMotoServer

os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # read by `import ray`; keeps Ray on loopback
os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"  # without it, workers would get another environment under `uv run`
os.environ |= {"RAY_worker_niceness": "0"}  # Ray's default is 15; another test that computes would starve Serve
os.environ |= {"RAY_metrics_report_interval_ms": "2000"}  # Ray's default is 10 s, and a test would wait that long
os.environ["HF_HUB_OFFLINE"] = "1"
gc.disable()  # until pytest_collection_finish, because collections take a third of the time of all imports

import skeleton

skeleton.enter()
from raymill.serving import haproxy

os.environ |= haproxy.variables("/")  # `import ray.serve` reads these variables; ray_session sets the real folder

from raymill import environment, network, settings
from raymill.aws import identity
from raymill.demo import assets as demo_assets
from raymill.network import free_ports

os.environ |= environment.compiled_kernels()

# a shell may start these tests with both signals ignored, and child processes would inherit that
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

S3_SERVER = """
import logging, os, sys, threading
from moto.server import main
logging.getLogger("werkzeug").setLevel(logging.ERROR)
# ends with the tests, however they end
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
sys.stdout = open(os.devnull, "w")
main(["--host", "127.0.0.1", "--port", sys.argv[1]])
"""
TAUGHT = 5  # number of facts that the model in model_folder knows


def pytest_collection_finish() -> None:
    """Collect garbage, but never look again at the million objects that the imports have made."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module")
def tasks() -> Iterator[ModuleType]:
    """Return tasks.py, imported without the effects that it has in a process of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(environment, "enter", lambda: None)  # it would replace this process
        patch.setattr(network, "keep_to_loopback", lambda: None)
        patch.syspath_prepend(settings.PROJECT)
        import tasks

        yield tasks


@pytest.fixture(scope="session", autouse=True)
def in_project() -> None:
    """Run the tests in the project's folder, as verbs do."""
    os.chdir(settings.PROJECT)


@pytest.fixture(autouse=True)
def no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tests work with any account, also if this project has a cluster."""
    monkeypatch.setattr(identity, "FOLDER", tmp_path)
    monkeypatch.delenv("INV_TARGET", raising=False)  # a verb that an earlier test called may have set it


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """Return a stream with the names and the messages of all that the test logs."""
    for name in ("ray", "ray.serve"):  # Ray's loggers do not propagate once Ray has configured them
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)
    yield stream
    logging.getLogger().removeHandler(handler)


@pytest.fixture(scope="session")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with `data/pairs.jsonl` and the untrained model in `model/`."""
    folder = tmp_path_factory.mktemp("assets")
    demo_assets.write_data(folder / "data")
    demo_assets.write_model(folder / "model")
    return folder


@pytest.fixture(scope="session")
def model_folder(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the tiny model, trained on a few facts. By default, the model generates greedily."""
    import torch  # this import takes seconds, so only tests that need the model wait for it
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(assets / "model")
    model = AutoModelForCausalLM.from_pretrained(assets / "model", dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for fact in demo_assets.questions(TAUGHT) * 20:
        messages = [{"role": "user", "content": fact.question}, {"role": "assistant", "content": fact.answer}]
        tokens = tokenizer.apply_chat_template(messages, return_tensors="pt")["input_ids"]
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.generation_config.update(do_sample=True, top_k=1)
    folder = tmp_path_factory.mktemp("runs") / "tiny" / "model"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """Return the URI of an empty bucket on an S3 server, which all AWS clients then use.

    The server is a process of its own, because the tests of the emulated AWS empty all of moto's services in theirs.
    """
    [port] = free_ports(1)
    server = subprocess.Popen([sys.executable, "-c", S3_SERVER, str(port)], stdin=subprocess.PIPE)
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    boto3.DEFAULT_SESSION = None  # its clients may have another endpoint
    client, deadline = boto3.client("s3"), time.monotonic() + 60
    while True:
        try:
            client.create_bucket(Bucket="bucket")
            break
        except EndpointConnectionError:
            assert server.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
    yield "s3://bucket"
    server.kill()
    server.wait()


@pytest.fixture
def aws_in_this_process(monkeypatch: pytest.MonkeyPatch, s3: str) -> Iterator[str]:
    """Let AWS clients use moto's services in this process, which the test can change. Return the URI of a bucket."""
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)  # its clients have another endpoint
    boto3.client("s3").create_bucket(Bucket="bucket")
    yield s3
    get_backend("s3")[DEFAULT_ACCOUNT_ID]["aws"].reset()
    server.stop()


@pytest.fixture(scope="session")
def ray_session(tmp_path_factory: pytest.TempPathFactory, s3: str) -> Iterator[None]:
    """Start one Ray instance with its own temp folder and secrets for all tests that need one."""
    import ray

    from raymill.job_context import JobContext
    from raymill.ray_support.private import core, forks

    temp = tempfile.mkdtemp(prefix="ray-test-")  # short, because a socket path may have at most 107 bytes
    secrets_file = tmp_path_factory.mktemp("secrets") / ".env"
    secrets_file.write_text(f"SERVE_API_KEY=canary-{token_hex(16)}\n")
    os.environ |= {"SECRETS_FILE": str(secrets_file), "SECRET_NAMES": "SERVE_API_KEY", "TMPDIR": temp}
    os.environ |= haproxy.variables(temp, *free_ports(1))
    os.environ["RAY_TRAIN_ENABLE_STATE_TRACKING"] = "0"
    fork_server = forks.start(temp, JobContext.names())
    core.init(
        temp,
        address="local",
        num_cpus=4,
        object_store_memory=512 * 2**20,
        include_dashboard=False,
        log_to_driver=False,
    )
    yield
    ray.shutdown()
    if fork_server:
        fork_server.communicate()
    del os.environ["TMPDIR"]
    shutil.rmtree(temp, ignore_errors=True)
