"""Test that a worker or a script in a fork is like one in its own process, and ends with Ray or with its client."""

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray._raylet import JobID, PlacementGroupID

from raymill import settings
from raymill.network import free_ports
from raymill.ray_support.private.forks import SOCKET, server

READS = """
import importlib, os, sys
names, mapping = set(), type(os.environ)
get = mapping.__getitem__
mapping.__getitem__ = lambda self, name: (names.add(name), get(self, name))[1]
import numpy, torch
from raymill.ray_support.private.forks import server
for name in server.MODULES:
    importlib.import_module(name)
print(*sorted(names & server.LATE))
"""
STARTS = """
import os, sys, time
import ray
from raymill.ray_support.private import core, forks
os.mkdir(sys.argv[1])
server = forks.start(sys.argv[1], [])
while not os.path.exists(os.environ[forks.SOCKET]):
    time.sleep(0.1)
core.init(sys.argv[1], address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
@ray.remote
class Worker:
    def pid(self): return os.getpid(), os.getppid()
workers = [Worker.remote() for _ in range(2)]
pids = ray.get([worker.pid.remote() for worker in workers])
assert {parent for _, parent in pids} == {server.pid}
print(server.pid, *(pid for pid, _ in pids), flush=True)
time.sleep(600)
"""
SCRIPT = """
import sys
from raymill.ray_support.private.forks.client import hand_over
hand_over(sys.modules["__main__"])
import json, os, signal, time
import ray, torch
class Mine: pass
def describe():
    return {
        "variables": dict(os.environ) | {"ANY": ""},
        "folder": os.getcwd(),
        "paths": sys.path,
        "arguments": sys.argv,
        "module": [__name__, __spec__.name, __file__, sys.modules["__main__"].Mine is Mine],
        "python": [repr(sys.flags), sys.stdout.encoding, sys.stdout.errors, sys.stdout.write_through],
        "signals": [str(signal.getsignal(number)).partition(" at ")[0] for number in signal.valid_signals()],
        "files": {number: os.readlink(f"/proc/self/fd/{number}").partition("[")[0] for number in (0, 1, 2)},
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        "umask": os.umask(0o022),
        "threads": torch.get_num_threads(),
    }
def wait():
    try:
        print(os.getpid(), flush=True)
        time.sleep(60)
    except KeyboardInterrupt:
        print("interrupted")
with open(f"/proc/{os.getppid()}/cmdline") as file:
    parent = file.read()
print("forks/server.py" in parent, flush=True)
print(eval(sys.argv[1]))
"""
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests


@ray.remote
class Worker:
    def describe(self) -> dict[str, Any]:
        """Return all that a worker gets from the process that starts it."""
        import torch

        return {
            "variables": dict(os.environ),
            "folder": str(Path.cwd()),
            "paths": sys.path,
            "arguments": [argument for argument in sys.argv if "worker-id" not in argument and "time" not in argument],
            "flags": repr(sys.flags),
            "signals": [str(signal.getsignal(number)).partition(" at ")[0] for number in signal.valid_signals()],
            "niceness": psutil.Process().nice(),
            "session": os.getsid(0),
            "leads": os.getpgid(0) == os.getpid(),
            "files": {number: os.readlink(f"/proc/self/fd/{number}").rpartition(".")[2] for number in (0, 1, 2)},
            "umask": os.umask(0o022),
            "threads": torch.get_num_threads(),
            "limits": Path("/proc/self/limits").read_text(),
            "main": sys.modules["__main__"].__spec__,
            "job": ray.get_runtime_context().get_job_id(),
            "title": psutil.Process().cmdline()[0][:11],
        }

    def parent(self) -> str:
        parent = psutil.Process().parent()
        return " ".join(parent.cmdline()) if parent else ""

    def random(self) -> dict[str, Any]:
        import random
        import uuid

        import numpy as np
        import torch

        found = {"random": random.random(), "numpy": np.random.rand(), "torch": torch.initial_seed()}
        with ThreadPoolExecutor() as pool:  # in a thread, Ray draws the id of the task
            found["task"] = pool.submit(lambda: ray.put(1).hex()).result()
        return found | {"uuid": uuid.uuid4(), "group": PlacementGroupID.of(JobID.from_int(1)).hex()}

    def threads(self, count: int) -> int:
        """Set the number of torch's threads unless it is 0, and return it."""
        import torch

        if count:
            torch.set_num_threads(count)
        return torch.get_num_threads()

    def product(self) -> float:
        """Use the threads of OpenMP and OpenBLAS, which a fork must start itself."""
        import numpy as np
        import torch

        torch.set_num_threads(2)
        return float((torch.ones(900, 900) @ torch.ones(900, 900)).sum()) + float((np.ones((900, 900)) ** 2).sum())


@pytest.fixture(scope="module")
def forked(ray_session: None) -> None:
    """Wait until the server has imported everything."""
    deadline = time.monotonic() + 60
    while not Path(os.environ[SOCKET]).exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def start(variables: dict[str, str], count: int = 1) -> list[Any]:
    """Start workers. With a value that no other test has, Ray cannot reuse one."""
    actor: Any = Worker
    return [actor.options(num_cpus=1, runtime_env={"env_vars": variables}).remote() for _ in range(count)]


def test_a_fork_is_like_a_worker_that_ray_starts(forked: None) -> None:
    [fork], [other] = start({"RAY_ADDRESS": "x"}), start({"RAY_ADDRESS": "x", "ANY": "x"})
    assert "forks/server.py" in ray.get(fork.parent.remote())
    assert "raylet" in ray.get(other.parent.remote())
    expected, found = ray.get([other.describe.remote(), fork.describe.remote()])
    assert expected["variables"].pop("ANY") == "x"
    assert found == expected


def test_forks_have_their_own_random_numbers(forked: None) -> None:
    workers = start({"RAY_ADDRESS": "y"}, 2)
    first, second = ray.get([worker.random.remote() for worker in workers])
    assert not [name for name in first if first[name] == second[name]]


def test_a_fork_computes_with_all_its_threads(forked: None) -> None:
    [worker] = start({"RAY_ADDRESS": "z"})
    assert "forks/server.py" in ray.get(worker.parent.remote())
    assert ray.get(worker.product.remote()) == 900**3 + 900**2


def test_a_module_of_ones_own_is_not_hidden_by_an_imported_one(forked: None, tmp_path: Path) -> None:
    (tmp_path / "pandas.py").write_text("")
    [worker] = start({"PYTHONPATH": str(tmp_path)})
    assert "raylet" in ray.get(worker.parent.remote())


@pytest.mark.parametrize("change", ["edit", "delete"])
def test_a_changed_package_is_noticed(change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file := tmp_path / "changing.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("changing")
    imported = server.Imported()
    assert not imported.has_changed()
    if change == "delete":
        file.unlink()
    else:
        os.utime(file, (1, 1))
    assert imported.has_changed()
    del sys.modules["changing"]


def test_an_actor_keeps_the_threads_that_it_has_chosen(forked: None) -> None:
    [worker] = start({"RAY_ADDRESS": "threads"})
    assert "forks/server.py" in ray.get(worker.parent.remote())
    assert [ray.get(worker.threads.remote(count)) for count in (0, 3, 0)] == [1, 3, 3]


@pytest.mark.parametrize("sent", [b"", b"\n", b"\n{", b"\n{}", b'\n{"module": "a"}'])
def test_rude_clients_do_not_stop_the_server(forked: None, sent: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as connection, Path(os.devnull).open() as file:
        connection.connect(os.environ[SOCKET])
        socket.send_fds(connection, [sent], [file.fileno()])
    [worker] = start({"RAY_ADDRESS": repr(sent)})
    assert "forks/server.py" in ray.get(worker.parent.remote())


@pytest.mark.parametrize("name", ["HF_HOME", "OMP_NUM_THREADS", "RAY_DATA_PUSH_BASED_SHUFFLE", "RAY_SERVE_LOG_LEVEL"])
def test_a_variable_that_imports_may_read_gets_a_new_process(forked: None, name: str) -> None:
    [worker] = start({name: "1"})
    assert "raylet" in ray.get(worker.parent.remote())


def test_imports_read_no_variable_that_a_fork_gets_later() -> None:
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("RAY", "SPT"))}
    done = subprocess.run(
        [sys.executable, "-c", READS], capture_output=True, text=True, cwd=settings.PROJECT, env=variables, check=True
    )
    assert done.stdout.split() == []  # but a copy of all variables, which reads those that are set


@pytest.mark.parametrize("victim", ["starter", "raylet"])
def test_forks_end_with_ray(victim: str) -> None:
    folder = f"/tmp/forks-{free_ports(1)[0]}"  # short, because a socket path may have at most 107 bytes
    starter = subprocess.Popen([sys.executable, "-c", STARTS, folder], stdout=subprocess.PIPE, text=True)
    try:
        assert starter.stdout
        pids = [int(pid) for pid in starter.stdout.readline().split()]
        assert len(pids) == 3
        family = psutil.Process(starter.pid).children(recursive=True)
        if victim == "raylet":
            [raylet] = [process for process in family if process.name() == "raylet"]
            raylet.kill()
            pids = pids[1:]  # the server ends with the process that started Ray
        else:
            starter.kill()
        deadline = time.monotonic() + 30
        while left := [pid for pid in pids if psutil.pid_exists(pid)]:
            assert time.monotonic() < deadline, left
            time.sleep(0.1)
    finally:
        starter.kill()
        starter.wait()
        psutil.wait_procs(family, 10)


class Script:
    """A script that prints whether it runs in a fork, and then the value of its first argument."""

    def __init__(self, folder: Path, variables: dict[str, str]) -> None:
        self._command = [sys.executable, "-m", "script"]
        self._folder, self._variables = folder, variables | {"PYTHONPATH": str(settings.PROJECT)}

    def start(self, *arguments: str, within: Sequence[str] = (), **variables: str) -> subprocess.Popen:
        """Start the script as Ray starts a job, with a worker's environment. `within` are words before the command."""
        return subprocess.Popen(
            [*within, *self._command, *arguments],
            env=self._variables | variables,
            cwd=self._folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


@pytest.fixture(scope="module")
def script(forked: None, tmp_path_factory: pytest.TempPathFactory) -> Script:
    folder = tmp_path_factory.mktemp("script")
    (folder / "script.py").write_text(SCRIPT)
    [worker] = start({"RAY_ADDRESS": "script"})
    return Script(folder, ray.get(worker.describe.remote())["variables"])


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_script_in_a_fork_is_like_one_in_its_own_process(script: Script, unbuffered: str) -> None:
    variables = {"PYTHONUNBUFFERED": unbuffered, "OMP_NUM_THREADS": "1"}
    found = []
    for is_forked, other in (("True", {}), ("False", {"ANY": "x"})):
        output, _ = script.start("json.dumps(describe())", "a b", **variables, **other).communicate()
        first, described = output.splitlines()
        assert first == is_forked
        found.append(json.loads(described))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("code", "status", "error"),
    [
        ("sys.exit(3)", 3, ""),
        ("sys.exit('error: wrong')", 1, "error: wrong\n"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, ""),
    ],
)
def test_a_script_ends_as_its_fork_does(script: Script, code: str, status: int, error: str) -> None:
    client = script.start(code)
    output, errors = client.communicate()
    assert (output, client.returncode) == ("True\n", status)
    assert errors.endswith(error)


@pytest.mark.parametrize("rights", ["umask 077", "ulimit -n 999", "taskset -p -c 0 $$"])
def test_a_script_with_other_rights_gets_a_new_process(script: Script, rights: str) -> None:
    client = script.start("1", within=["sh", "-c", f'{rights} > /dev/null; exec "$@"', "sh"])
    output, _ = client.communicate()
    assert output == "False\n1\n"


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_fork_gets_the_signals_of_its_script(script: Script, sent: signal.Signals) -> None:
    client = script.start("wait()")
    assert client.stdout
    assert client.stdout.readline() == "True\n"
    fork = psutil.Process(int(client.stdout.readline()))
    assert fork.cmdline()[0] == "python -m script 'wait()'"
    client.send_signal(sent)
    output, _ = client.communicate(timeout=30)
    assert output == ("interrupted\nNone\n" if sent == signal.SIGINT else "")
    assert client.returncode == (0 if sent == signal.SIGINT else -sent)
    psutil.wait_procs([fork], 30)
    assert not fork.is_running()
