"""Reads PDF files and HTML pages in a child process, which ends if one of them takes too much time or memory.

A thread cannot stop a parser that is written in C, and a crash of such a parser ends its process.
"""

import contextlib
import functools
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from raymill.rag import extraction
from raymill.rag.decoding import BadDocument
from raymill.rag.extraction import Part

CPU_S = 60.0  # for an HTML page, or a page of a PDF; wall-clock time would make documents bad on a busy machine
MEMORY_BYTES = 8 * 2**30
OUT_OF_MEMORY = 3  # exit code
PROJECT = Path(__file__).absolute().parents[2]


class Reader:
    """A child process that reads files, one after another. It starts when it is first needed, and again after a crash.

    It ends with this process.
    """

    def __init__(self, cpu_s: float = CPU_S, memory_bytes: int = MEMORY_BYTES) -> None:
        self._cpu_s = cpu_s
        self._memory_bytes = memory_bytes
        self._child: tuple[subprocess.Popen[bytes], Connection] | None = None

    def read(self, suffix: str, data: bytes) -> Iterator[Part]:
        """Yield the pages of a file with this suffix.

        Raises:
            BadDocument: the file, or the rest of it, cannot be read.
        """
        if self._child and self._child[0].poll() is not None:
            self.close()  # another program ended it between two documents
        process, connection = self._child or self._start()
        answer: Part | str | None = None
        try:
            connection.send(suffix)
            connection.send_bytes(data)
            while isinstance(answer := connection.recv(), Part):
                yield answer
        except (EOFError, OSError):
            self._child = None
            connection.close()
            raise BadDocument(self._explain(process.wait())) from None
        except BaseException:  # the caller does not want the other pages
            self.close()
            raise
        if answer:
            raise BadDocument(answer)

    def close(self) -> None:
        """End the child process."""
        if self._child:
            process, connection = self._child
            self._child = None
            connection.close()
            process.kill()
            process.wait()

    def _start(self) -> tuple[subprocess.Popen[bytes], Connection]:
        ours, theirs = Pipe()
        arguments = [str(theirs.fileno()), str(self._cpu_s), str(self._memory_bytes)]
        command = [sys.executable, "-m", "raymill.rag.reader", *arguments]
        process = subprocess.Popen(
            command, cwd=PROJECT, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        theirs.close()
        self._child = process, ours
        return self._child

    def _explain(self, exit_code: int) -> str:
        if exit_code == -signal.SIGPROF:
            return f"takes more than {self._cpu_s:.0f} s to read. Split, replace or remove it."
        if exit_code == OUT_OF_MEMORY:
            gib = self._memory_bytes / 2**30
            return f"takes more than {gib:.0f} GiB of memory to read. Split, replace or remove it."
        cause = signal.Signals(-exit_code).name if exit_code < 0 else f"exit code {exit_code}"
        return f"ends the process that reads it ({cause}). Replace or remove it."


@functools.cache
def shared() -> Reader:
    """Return the reader of this process."""
    return Reader()


def _serve(connection: Connection, cpu_s: float) -> None:
    """Read files until the parent closes the connection or ends.

    For each file, receive its suffix and its bytes, and send its pages, and then None or what is wrong with it.
    """
    while True:
        try:
            suffix, data = connection.recv(), connection.recv_bytes()
        except EOFError:
            return
        pages = extraction.parts(suffix, data)
        answer: Part | str | None = Part("", 0)
        while isinstance(answer, Part):
            signal.setitimer(signal.ITIMER_PROF, cpu_s)
            answer = _next(pages)
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.send(answer)


def _next(pages: Iterator[Part]) -> Part | str | None:
    """Return the next page, or what is wrong with the file, or None at its end."""
    try:
        return next(pages, None)
    except BadDocument as problem:
        return str(problem)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)  # little of the memory would be released
    except Exception as error:
        return f"cannot be read ({error}). Replace or remove it."


def _main(descriptor: str, cpu_s: str, memory_bytes: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the default ends the process, also while it runs C code
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    with contextlib.suppress(ValueError, OSError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (int(memory_bytes), resource.getrlimit(resource.RLIMIT_AS)[1]))
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        _serve(Connection(int(descriptor)), float(cpu_s))


if __name__ == "__main__":
    _main(*sys.argv[1:])
