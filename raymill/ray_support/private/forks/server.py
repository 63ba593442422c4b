"""Forks Ray workers and jobs from one process that has imported what most of them need.

A fork gets its environment after these imports. So the server refuses a request if a variable that they may have read
differs from its own, if one of their files has changed, if the fork would find one of these modules in another folder
first, or if the client has other rights or limits. The server must have no CUDA context, and no threads, which a fork
would not have. OpenBLAS and jemalloc start theirs again in a fork.
"""

import argparse
import contextlib
import gc
import importlib
import io
import json
import os
import runpy
import select
import shlex
import signal
import socket
import struct
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any


def _python_path(variables: Mapping[str, str]) -> list[str]:
    folders = variables.get("PYTHONPATH", "")
    return folders.split(os.pathsep) if folders else []


ENVIRONMENT = dict(os.environ)  # without what the imports set: in a new process, they would do it again
SERVER = socket.socket(socket.AF_UNIX)
if __name__ == "__main__":
    del sys.path[: 1 + len(_python_path(os.environ))]  # the folders of this program, and of PYTHONPATH
    SERVER.bind(sys.argv[1])
    SERVER.listen(256)  # clients wait during the imports: their own would take as long, and slow these down
PATHS = len(sys.path)

import numpy as np
import ray.actor
import torch
from ray._private import ray_constants, utils
from ray._private.runtime_env.context import RuntimeEnvContext
from ray._raylet import ActorClassID, JobID, PlacementGroupID, setproctitle

MODULES = (
    "lance_namespace_urllib3_client",  # lancedb itself starts threads
    "openai",
    "ray.data",
    "ray.serve._private.controller",
    "ray.serve._private.replica",
    "ray.train.torch",
    "ray.train.v2._internal.execution.controller",
    "ray.train.v2._internal.execution.worker_group",
    "ray.tune",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "tyro",
)
HANDLED = {  # variables that these modules or Python read, but that a fork gets later
    "OLDPWD",
    "PWD",
    "PYTHONBREAKPOINT",  # Python reads it when it stops
    "PYTHONPATH",
    "PYTHONUNBUFFERED",  # Ray's program opens stdout and stderr again
    "RAY_LOGGER_LEVEL",
    "_",
}
LATE = {  # variables that no import reads
    "RAY_ADDRESS",
    "RAY_DATA_SHUFFLE_MAP_WORKER",
    "RAY_DATA_SHUFFLE_REDUCE_WORKER",
    "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES",
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES",
    "RAY_JOB_CONFIG_JSON_ENV_VAR",
    "RAY_JOB_ID",  # Ray's C++ code reads it and the pid: see `start`
    "RAY_LD_PRELOAD_ON_WORKERS",
    "RAY_RAYLET_PID",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER",
    "RAY_TRAIN_ENABLE_PRINT_PATCH",
    "RAY_USAGE_STATS_ENABLED",
    "RAY_WARN_BLOCKING_GET_INSIDE_ASYNC",
    "RAY_worker_niceness",  # only the raylet needs it
    "SPT_NOENV",
    ray_constants.WORKER_PROCESS_SETUP_HOOK_ENV_VAR,
}
RIGHTS = ("Umask", "Uid", "Gid", "Groups", "CapEff", "NoNewPrivs", "Seccomp", "Cpus_allowed", "Mems_allowed")
THREADS = "OMP_NUM_THREADS"  # OpenMP has read it on import, so forks set the number through torch

TIMEOUT_S = 5  # for a client to send its request


class Imported:
    """What this process has imported."""

    def __init__(self) -> None:
        self._names = {name.partition(".")[0] for name in sys.modules}
        files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
        self._changed = {file: os.stat(file).st_mtime_ns for file in files if file and os.path.isfile(file)}

    def has_changed(self) -> bool:
        """Return whether a file is newer or gone, for example after an upgrade of a package."""
        try:
            return any(os.stat(file).st_mtime_ns != changed for file, changed in self._changed.items())
        except FileNotFoundError:
            return True

    def is_shadowed(self, folders: list[str]) -> bool:
        """Return whether a folder has a module with the name of an imported one."""
        found = (name for folder in folders if os.path.isdir(folder) for name in os.listdir(folder))
        return any(name.partition(".")[0] in self._names for name in found)


@dataclass
class Request:
    """What a client asked for, and the open files that the fork gets as its first ones."""

    message: dict[str, Any]
    files: list[int]
    client: int
    """Pid of the client."""

    @property
    def folder(self) -> str:
        """The folder in which the fork starts."""
        return self.message["folder"]

    @property
    def variables(self) -> dict[str, str]:
        """The environment of the program."""
        return self.message["variables"]

    def fits(self, late: set[str], imported: Imported) -> bool:
        """Return whether a fork of this process can do this."""
        wanted, own = self.variables, ENVIRONMENT
        if imported.has_changed() or imported.is_shadowed([self.folder, *_python_path(wanted)]):
            return False
        if _rights(self.client) != _rights(os.getpid()):
            return False
        return all(wanted.get(name) == own.get(name) for name in (wanted.keys() | own.keys()) - late)

    def fork(self, connection: socket.socket) -> bool:
        """Fork this process, and tell the client. Return whether this is the fork."""
        if not os.fork():
            return True
        connection.sendall(b"1")
        return False

    def become(self) -> None:
        """Give this fork all that a new process would have got, and run its program."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for descriptor, file in enumerate(self.files):
            os.dup2(file, descriptor)
            os.close(file)
        os.nice(self.message["niceness"] - os.getpriority(os.PRIO_PROCESS, 0))
        os.environ.clear()
        os.environ |= self.message["variables"]
        os.chdir(self.folder)
        ray_constants.LOGGER_LEVEL = os.environ.get("RAY_LOGGER_LEVEL", "info")
        np.random.seed()  # `random` does that itself
        torch.seed()


class Worker(Request):
    """A worker of Ray."""

    @cached_property
    def context(self) -> RuntimeEnvContext:
        return RuntimeEnvContext.deserialize(self._arguments[0].serialized_runtime_env_context or "{}")

    @property
    def folder(self) -> str:
        return shlex.split(prefix[1])[0] if (prefix := self.context.command_prefix) else self.message["folder"]

    @cached_property
    def variables(self) -> dict[str, str]:
        return self.message["variables"] | self.context.env_vars

    @property
    def _arguments(self) -> tuple[argparse.Namespace, list[str]]:
        parser = argparse.ArgumentParser()
        parser.add_argument("--serialized-runtime-env-context")
        parser.add_argument("--language")
        return parser.parse_known_args(self.message["arguments"])

    def fits(self, late: set[str], imported: Imported) -> bool:
        context = self.context
        if context.py_executable != sys.executable or context.override_worker_entrypoint:
            return False
        if context.command_prefix and [context.command_prefix[0], *context.command_prefix[2:]] != ["cd", "&&"]:
            return False
        return super().fits(late, imported)

    def become(self) -> None:
        """Run Ray's program for workers.

        Relies on `ray._private.utils.set_omp_num_threads_if_unset`, which a worker calls before each task (Ray 2.60).
        """
        super().become()
        if self.message["leads_group"]:
            os.setpgid(0, 0)
        os.environ["PWD"] = self.folder  # as the shell does in which Ray starts workers
        utils.update_envs(self.context.env_vars)
        _end_with(int(os.environ["RAY_RAYLET_PID"]))
        set_variable = utils.set_omp_num_threads_if_unset

        def set_threads() -> bool:
            if is_set := set_variable():
                torch.set_num_threads(int(os.environ[THREADS]))
            return is_set

        utils.set_omp_num_threads_if_unset = set_threads
        program, *_ = sys.argv = self._arguments[1]
        _insert_paths(os.path.dirname(os.path.realpath(program)))
        runpy.run_path(program, run_name="__main__")


class Script(Request):
    """A module that the client would run as its own program."""

    def fits(self, late: set[str], imported: Imported) -> bool:
        own = [sys.executable, repr(sys.flags), repr(sys._xoptions), repr(sys.warnoptions)]
        if own != self.message["python"] or not self.variables.get(THREADS, "1").isdigit():
            return False
        return super().fits(late | {THREADS}, imported)

    def fork(self, connection: socket.socket) -> bool:
        """Fork twice: the first fork tells the client how the second one, the script, ends."""
        if os.fork():
            return False
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if not (script := os.fork()):
            return True
        for file in self.files:
            os.close(file)
        with contextlib.suppress(OSError):  # the client has ended, and the script ends with it
            connection.sendall(f"1{script}\n".encode())
            _, status = os.waitpid(script, 0)
            connection.sendall(f"{status}\n".encode())
        os._exit(0)

    def become(self) -> None:
        super().become()
        _end_with(self.client)
        setproctitle(shlex.join(["python", "-m", self.message["module"], *self.message["arguments"][1:]]))
        if THREADS in os.environ:
            torch.set_num_threads(int(os.environ[THREADS]))
        sys.argv = self.message["arguments"]
        _insert_paths(self.folder)
        is_unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))  # Python reads it when it starts
        raw = io.FileIO(1, "w", closefd=False)
        stdout = raw if is_unbuffered else io.BufferedWriter(raw)
        sys.stdout = io.TextIOWrapper(stdout, sys.stdout.encoding, sys.stdout.errors, write_through=is_unbuffered)
        runpy.run_module(self.message["module"], run_name="__main__", alter_sys=True)


def serve(late: set[str]) -> Request:
    """Fork a process for each request, until the process that started this one ends. Return the request in its fork."""
    imported = Imported()
    with SERVER:
        while True:
            ready, _, _ = select.select([SERVER, sys.stdin], [], [])
            if sys.stdin in ready:
                sys.exit()
            connection, _ = SERVER.accept()
            files: list[int] = []
            with connection, contextlib.suppress(OSError, ValueError, LookupError):  # a client may end at any time
                connection.settimeout(TIMEOUT_S)
                _, files, _, _ = socket.recv_fds(connection, 1, 3)
                with connection.makefile("rb") as stream:
                    message = json.load(stream)
                client, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
                request = (Script if "module" in message else Worker)(message, files, client)
                if not request.fits(late, imported):
                    connection.sendall(b"0")
                elif request.fork(connection):
                    return request
            for file in files:
                os.close(file)


def _rights(pid: int) -> list[str]:
    """Return the user, umask, capabilities and CPUs of a process, its limits, and its control groups."""
    status, *others = (Path(f"/proc/{pid}/{name}").read_text() for name in ("status", "limits", "cgroup"))
    return [line for line in status.splitlines() if line.partition(":")[0] in RIGHTS] + others


def _insert_paths(first: str) -> None:
    """Put a program's first path and those of PYTHONPATH where Python puts them: Ray has put others before them."""
    place = len(sys.path) - PATHS
    sys.path[place:place] = [first, *_python_path(os.environ)]


def _end_with(pid: int) -> None:
    """Exit when another process has ended. A worker would wait for the raylet whose pid its variable had on import."""
    process = os.pidfd_open(pid)

    def wait() -> None:
        select.select([process], [], [])
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _import_modules() -> None:
    """Import `MODULES`.

    The decorator of an actor class draws from the random numbers of Ray's C++ code, which seeds itself then. All forks
    would draw the same ids of tasks. So while the modules define their actors, the ids come from the kernel.

    Relies on `ray.actor.ActorClassID`, which the decorator calls (Ray 2.60).
    """
    ray.actor.ActorClassID = RandomClassID
    for name in MODULES:
        importlib.import_module(name)
    ray.actor.ActorClassID = ActorClassID


class RandomClassID:
    """Stands in for `ActorClassID`."""

    @staticmethod
    def from_random() -> ActorClassID:
        """Return a random id."""
        return ActorClassID(os.urandom(ActorClassID.size()))


def _id_in_a_fork() -> bytes:
    """Return a random id that a fork draws from Ray's C++ code."""
    reader, writer = os.pipe()
    if not os.fork():
        os.write(writer, PlacementGroupID.of(JobID.from_int(1)).binary())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        return pipe.read()


if __name__ == "__main__":
    _import_modules()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel forgets forks that have ended
    gc.collect()
    gc.freeze()  # a collection in a fork would copy the pages of all objects
    os.close(os.pidfd_open(os.getpid()))  # an old container engine may refuse that
    assert threading.active_count() == 1, f"a fork would lack {threading.enumerate()}"
    assert _id_in_a_fork() != _id_in_a_fork(), "all forks would draw the same ids"
    serve(HANDLED | LATE | set(sys.argv[2:])).become()
