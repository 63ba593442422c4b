"""Test what verbs print if the cluster does not start, dies or misbehaves, and that clients bypass HTTP proxies."""

import asyncio
import dataclasses
import gc
import io
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
import ray
import requests
from project_copy import Project, copy_project, processes, read_until
from ray.dashboard.modules.version import CURRENT_VERSION
from ray.job_submission import JobDetails

from raymill import job_client, network, status, submission
from raymill.errors import UserError
from raymill.job_client import Unreachable
from raymill.local import crash_reason, head, state
from raymill.local import target as local_target
from raymill.submission import LocalRaySection
from raymill.target import Connection

PROBE = '''
"""A job for the tests: prints a line, then keeps running."""
import time

if __name__ == "__main__":
    print("running", flush=True)
    time.sleep(600)
'''
HEAD = '''
"""Answers like a head that has just started, and dies when it gets its first job."""
import http.server, json, os, sys

import ray

class FailingHead(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"ray_version": ray.__version__, "result": "ALIVE"}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        print("MemoryError: no room for the object store", flush=True)
        os._exit(1)

http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), FailingHead).serve_forever()
'''


VERSION = json.dumps(
    {"version": CURRENT_VERSION, "ray_version": ray.__version__, "ray_commit": ray.__commit__, "session_name": "s"}
).encode()


class Misbehaving(BaseHTTPRequestHandler):
    """Misbehaves on every request in the way that the server's `manner` names, and records the paths."""

    def do_GET(self) -> None:
        self.server.asked.append(self.path)  # type: ignore[attr-defined]
        manner = self.server.manner  # type: ignore[attr-defined]
        if manner == "resets":
            self.connection.close()
        elif manner == "hangs":
            self.server.let_go.wait()  # type: ignore[attr-defined]
        elif manner == "fails":
            self._send(500, b"Traceback (most recent call last):\n  ...\n", 0)
        elif manner == "is no Ray":
            self._send(200, b"[]", 0)
        elif manner == "truncates":
            self._send(200, b'{"ray_version": "2.6', 100)
        elif manner == "stops halfway":
            self._send(200, b'{"ray_version": "2.6', 0)
        elif manner == "has another token":
            self._send(401, b"Unauthorized: invalid token", 0)
        elif manner == "was restarted":
            is_version = self.path.startswith("/api/version")
            self._send(200 if is_version else 404, VERSION if is_version else b"Job does not exist", 0)
        elif manner == "knows nothing":
            self._send(200, VERSION if self.path.startswith("/api/version") else b"null", 0)

    do_POST = do_CONNECT = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _send(self, code: int, body: bytes, missing: int) -> None:
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body) + missing))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture(scope="module")
def server() -> Iterator[ThreadingHTTPServer]:
    stub = ThreadingHTTPServer(("127.0.0.1", 0), Misbehaving)
    stub.daemon_threads = True
    stub.manner, stub.asked, stub.let_go = "resets", [], threading.Event()  # type: ignore[attr-defined]
    threading.Thread(target=stub.serve_forever, daemon=True).start()
    yield stub
    stub.let_go.set()  # type: ignore[attr-defined]
    stub.shutdown()


@pytest.fixture
def connection(server: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch) -> Connection:
    monkeypatch.setattr(job_client, "TIMEOUTS_S", (2, 2))
    return Connection(
        dashboard=f"http://127.0.0.1:{server.server_port}", headers={}, job_variables={"PROFILE": "local"}
    )


MANNERS = ("resets", "hangs", "fails", "is no Ray", "truncates", "stops halfway", "has another token")


@pytest.mark.parametrize("manner", MANNERS)
@pytest.mark.parametrize(
    "verb",
    [
        pytest.param(status.snapshot, id="status, chat, bench"),
        pytest.param(lambda connection: submission.submit(connection, "preprocess", []), id="submit"),
        pytest.param(lambda connection: submission.find(connection, ""), id="logs"),
        pytest.param(lambda connection: submission.stop(connection, "probe-1"), id="stop"),
        pytest.param(lambda connection: submission.follow(connection, "probe-1"), id="follow"),
    ],
)
def test_a_misbehaving_server_gives_a_one_sentence_error(
    verb: Callable[[Connection], object], manner: str, connection: Connection, server: ThreadingHTTPServer
) -> None:
    server.manner = manner  # type: ignore[attr-defined]
    with pytest.raises(Unreachable) as raised:
        verb(connection)
    assert "\n" not in str(raised.value)
    assert "inv down" in str(raised.value)


@pytest.mark.parametrize("manner", ["was restarted", "knows nothing"])
def test_a_job_that_a_new_cluster_does_not_know_may_be_lost(
    manner: str, connection: Connection, server: ThreadingHTTPServer
) -> None:
    server.manner = manner  # type: ignore[attr-defined]
    with pytest.raises(Unreachable, match="probe-1 may be lost with it"):
        submission.follow(dataclasses.replace(connection, target="aws", forwarded_ports={1: 2}), "probe-1")
    with pytest.raises(Unreachable, match=r"inv logs --target aws probe-1; .* inv down --target aws, then inv up"):
        submission.follow(dataclasses.replace(connection, target="aws", forwarded_ports={1: 2}), "probe-1")
    for answer in (lambda client: client.get_job_info("probe-1"), lambda client: client.node_is_alive("ab")):
        with pytest.raises(Unreachable):
            answer(connection.client())


def test_an_upload_may_take_longer_than_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """If an upload were sent in one piece, the connect timeout would apply to all of it, for example to 100 MiB."""
    monkeypatch.setattr(job_client, "TIMEOUTS_S", (1, 1))
    monkeypatch.setattr(job_client, "UPLOAD_TIMEOUTS_S", (1, 10))
    size, received = 30 * 2**20, 0

    def read_slowly(listener: socket.socket) -> None:
        nonlocal received
        while True:
            sock, _ = listener.accept()
            with sock:
                is_upload = sock.recv(2**12).startswith(b"PUT")
                while is_upload and received < size - 2**12:
                    received += len(sock.recv(2**20))
                    time.sleep(0.1)  # the pauses add up to at least 3 s, three times the connect timeout
                head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(VERSION)}\r\nContent-Type: application/json\r\n"
                sock.sendall(f"{head}Connection: close\r\n\r\n".encode() + VERSION)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=read_slowly, args=(listener,), daemon=True).start()
        client = job_client.JobClient(f"http://127.0.0.1:{listener.getsockname()[1]}", {})
        assert client.send("PUT", "/api/packages/gcs/a.zip", data=bytes(size)).ok
    assert received >= size - 2**12


def test_a_log_and_a_status_that_fail_at_once_give_one_error(
    connection: Connection, monkeypatch: pytest.MonkeyPatch, log: io.StringIO
) -> None:
    class Client:
        async def tail_job_logs(self, job_id: str) -> AsyncIterator[str]:
            await asyncio.sleep(0)
            time.sleep(0.5)  # keeps the loop busy until the status request has failed too
            yield ""
            raise Unreachable("the log's connection failed")

        def get_job_info(self, job_id: str) -> JobDetails:
            raise Unreachable("the connection for the status failed")

    monkeypatch.setattr(Connection, "client", lambda _: Client())
    with pytest.raises(Unreachable, match="probe-1 may be lost"):
        submission.follow(connection, "probe-1")
    gc.collect()
    assert not log.getvalue()


@pytest.fixture
def proxied(server: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Make the server the proxy of all clients that use proxy variables. Return the paths that they request."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv(name.upper(), f"http://127.0.0.1:{server.server_port}")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    server.manner = "resets"  # type: ignore[attr-defined]
    server.asked.clear()  # type: ignore[attr-defined]
    return server.asked  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("theirs", "expected"),
    [("", network.LOOPBACK), ("intranet.example", f"intranet.example,{network.LOOPBACK}"), ("*", "*")],
)
def test_proxies_are_bypassed_and_what_the_user_bypasses_stays(
    theirs: str, expected: str, proxied: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", theirs)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setattr(os, "environ", os.environ.copy())
    network.keep_to_loopback()
    assert os.environ["no_proxy"] == os.environ["NO_PROXY"] == expected
    assert "RAY_ADDRESS" not in os.environ


def test_proxies_of_the_system_survive_the_bypass(monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS stores proxies outside the environment, and clients use those only while no proxy variable is set."""
    monkeypatch.setattr(
        os, "environ", {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    )
    monkeypatch.setattr(urllib.request, "getproxies", lambda: {"https": "http://proxy.example:3128", "no": "intranet"})
    network.keep_to_loopback()
    assert os.environ["https_proxy"] == "http://proxy.example:3128"
    assert os.environ["no_proxy"] == network.LOOPBACK


@pytest.mark.parametrize("get", [requests.get, httpx.get])
def test_http_clients_reach_loopback_without_the_proxy(
    get: Callable[..., object], proxied: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    api = ThreadingHTTPServer(("127.0.0.1", 0), Misbehaving)
    api.manner, api.asked = "is no Ray", []  # type: ignore[attr-defined]
    threading.Thread(target=api.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{api.server_port}/v1/models"
    with pytest.raises((requests.RequestException, httpx.HTTPError)):
        get(url, timeout=15)
    assert proxied == [url], "without the bypass, the proxy must get the request"
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, network.LOOPBACK)
    get(url, timeout=15)
    assert proxied == [url]
    assert api.asked == ["/v1/models"]  # type: ignore[attr-defined]
    api.shutdown()


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    copy = copy_project(tmp_path_factory.mktemp("copy") / "a b é", PROBE)
    yield copy
    copy.inv("down")


def test_a_head_that_does_not_start_gives_its_reason_and_leaves_nothing(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_object_spilling_config", "{broken")
    printed = project.inv("up", ok=False)
    assert "stopped while it was starting: json.decoder.JSONDecodeError: Expecting property name" in printed
    assert "Everything was cleaned up" in printed
    assert not (project.folder / ".cluster" / "local.json").exists()


@pytest.mark.nightly
@pytest.mark.parametrize("victim", ["raylet", "gcs_server", "dashboard", "agent"])
def test_a_cluster_that_dies_during_a_job_gives_a_one_sentence_error(
    project: Project, victim: str, proxied: list[str]
) -> None:
    project.inv("up")
    client = subprocess.Popen(
        [*project.command, "submit", "probe"],
        cwd=project.folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    job_id = read_until(client, "running")
    words = {"agent": "DashboardAgent", "dashboard": "dashboard/dashboard.py"}.get(victim, f"/{victim} ")
    [process] = [one for one in processes(project) if words in " ".join(one.cmdline()) + " "]
    process.kill()
    _, stderr = client.communicate(timeout=120)
    assert client.returncode == Unreachable.exit_code, stderr
    assert stderr.startswith(f"error: the cluster no longer answers, and {job_id} may be lost with it"), stderr
    assert len(stderr.splitlines()) == 1
    log = Path(project.state["temp"], "ray", "session_latest", "logs", f"job-driver-{job_id}.log")
    assert f"{log.name} in {log.parent}" in stderr
    assert "running" in log.read_text()
    assert not [url for url in proxied if "127.0.0.1" in url or "localhost" in url]


def test_up_fails_if_the_head_dies_during_its_first_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, file in (("FOLDER", ""), ("STATE_FILE", "local.json"), ("TOKEN_FILE", "token"), ("LOG_FILE", "ray.log")):
        monkeypatch.setattr(state, name, tmp_path / file)
    (tmp_path / "head.py").write_text(HEAD)

    def start(cluster: dict, section: LocalRaySection) -> subprocess.Popen:
        command = [sys.executable, str(tmp_path / "head.py"), cluster["dashboard"].rpartition(":")[2]]
        with state.LOG_FILE.open("w") as log:
            return subprocess.Popen(command, stdout=log, stderr=subprocess.DEVNULL, start_new_session=True)

    monkeypatch.setattr(head, "start", start)
    monkeypatch.setattr(local_target.env_file, "create", lambda: None)
    with pytest.raises(UserError, match="stopped while it was starting: MemoryError: no room for the object store"):
        local_target.Local().up(yes=True)
    assert not state.STATE_FILE.exists()


@pytest.mark.parametrize(("error", "starts"), [("The current node timed out during startup.", 2), ("no memory", 1)])
def test_a_start_that_a_busy_machine_slows_down_is_tried_again(
    error: str, starts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, file in (("FOLDER", ""), ("STATE_FILE", "local.json"), ("TOKEN_FILE", "token"), ("LOG_FILE", "ray.log")):
        monkeypatch.setattr(state, name, tmp_path / file)
    started = []

    def start(cluster: dict, section: LocalRaySection) -> subprocess.Popen:
        started.append(cluster)
        with state.LOG_FILE.open("w") as log:
            return subprocess.Popen(["echo", f"Exception: {error}"], stdout=log, start_new_session=True)

    monkeypatch.setattr(head, "start", start)
    monkeypatch.setattr(local_target.env_file, "create", lambda: None)
    with pytest.raises(UserError, match=error):
        local_target.Local().up(yes=True)
    assert len(started) == starts
    assert capsys.readouterr().out.count("trying again") == starts - 1
    assert not state.STATE_FILE.exists()


@pytest.mark.parametrize(
    ("printed", "raylet", "expected"),
    [
        ("Traceback\n  File\nValueError: no\n", "", "ValueError: no"),
        ("fine\n", "[2026-11-23 22:00:46,566 C 981 18] (raylet) a.cc:43:  Check failed: disk\n", "Check failed: disk"),
        ("\x1b[31m----- END gcs_server.out tail (exit code(s)=-9 (signal 9)) -----\x1b[39m\n", "",
         "gcs_server ended with -9 (signal 9)"),
        ("starting\n\nfree some memory\n", "", "free some memory"),
        ("", "", "no output"),
    ],
)  # fmt: skip
def test_the_reason_of_a_crash_is_found(printed: str, raylet: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "ray.log").write_text(printed)
    (tmp_path / "raylet.out").write_text(raylet)
    assert crash_reason.find(tmp_path / "ray.log", tmp_path) == expected
