"""Test the child process that reads PDF files and HTML pages: it ends if one of them hangs, crashes or needs memory."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from pdf_files import pdf

from raymill import settings
from raymill.rag import reader
from raymill.rag.decoding import BadDocument
from raymill.rag.reader import Reader

DEEP = b"<div>" * 200_000  # the parser takes minutes, because each tag looks through all open elements

PAGE, PAGES = "a long line " * 200 + "end", 1000  # more than a pipe holds, so the child waits after some pages


@pytest.fixture
def child() -> Iterator[Reader]:
    """Return a reader with a short deadline. It counts CPU time, so the tests also pass on a busy machine."""
    made = Reader(cpu_s=1)
    yield made
    made.close()


def text(child: Reader, suffix: str, data: bytes) -> str:
    return "|".join(part.text for part in child.read(suffix, data))


def pid(child: Reader) -> int:
    assert child._child
    return child._child[0].pid


def test_one_process_reads_many_documents(child: Reader) -> None:
    pids = set()
    for number in range(20):
        assert text(child, ".html", f"<p>{number}".encode()) == str(number)
        pids.add(pid(child))
    assert text(child, ".pdf", pdf("one", "two")) == "one|two"
    with pytest.raises(BadDocument, match=r"is not a valid PDF file \(.*\)\. Replace or remove it\."):
        text(child, ".pdf", b"nothing")
    assert text(child, ".htm", b"<p>one") == "one"
    assert pids == {pid(child)}


def test_a_document_that_hangs_ends_and_the_next_one_is_read(child: Reader) -> None:
    with pytest.raises(BadDocument, match=r"takes more than 1 s to read\. Split, replace or remove it\."):
        text(child, ".html", DEEP)
    assert text(child, ".html", b"<p>one") == "one"


def test_the_deadline_is_for_each_page_of_a_pdf(child: Reader) -> None:
    pages = child.read(".pdf", pdf(*[PAGE] * PAGES))
    assert next(pages).text == PAGE
    os.kill(pid(child), signal.SIGPROF)  # as at the deadline
    with pytest.raises(BadDocument, match="takes more than 1 s"):
        list(pages)
    assert text(child, ".html", b"<p>one") == "one"


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS does not limit the memory of a process")
def test_a_document_that_needs_too_much_memory_is_bad() -> None:
    child = Reader(memory_bytes=400 * 2**20)
    # each paragraph repeats all open elements, as the HTML standard says
    page = "<p>" + "".join(f"<b a={number}>" for number in range(3000)) + "<p>x" * 3000
    with pytest.raises(BadDocument, match=r"takes more than 0 GiB of memory to read|ends the process|cannot be read"):
        text(child, ".html", page.encode())
    assert text(child, ".html", b"<p>one") == "one"
    child.close()


def test_a_document_that_crashes_its_process_is_bad(child: Reader) -> None:
    pages = child.read(".pdf", pdf(*[PAGE] * PAGES))
    next(pages)
    os.kill(pid(child), signal.SIGSEGV)
    with pytest.raises(BadDocument, match=r"ends the process that reads it \(SIGSEGV\)\. Replace or remove it\."):
        list(pages)
    assert text(child, ".html", b"<p>one") == "one"


def test_a_process_that_ends_between_two_documents_makes_none_bad(child: Reader) -> None:
    assert text(child, ".html", b"<p>one") == "one"
    ended = psutil.Process(pid(child))
    ended.kill()
    while ended.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert text(child, ".html", b"<p>two") == "two"


def test_pages_that_nobody_wants_do_not_appear_in_the_next_document(child: Reader) -> None:
    pages: Any = child.read(".pdf", pdf("one", "two"))
    assert next(pages).text == "one"
    pages.close()
    assert text(child, ".html", b"<p>three") == "three"


@pytest.mark.parametrize("data", [b"<p>one", DEEP])
def test_the_child_ends_with_its_parent(data: bytes) -> None:
    code = f"""
import sys
from raymill.rag import reader
child = reader.Reader(cpu_s=1)
list(child.read(".html", b"<p>one"))
print(child._child[0].pid, flush=True)
child._child[1].send(".html")
child._child[1].send_bytes({data[:5]!r} * {len(data) // 5})
sys.stdin.read()
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", code], cwd=settings.PROJECT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert parent.stdout
    started = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    started.wait(timeout=120)


def test_the_defaults_are_generous() -> None:
    assert (reader.CPU_S, reader.MEMORY_BYTES) == (60, 8 * 2**30)
    assert reader.shared() is reader.shared()
    started = time.process_time()
    assert len(text(reader.shared(), ".html", b"<p>A paragraph with some words." * 10_000)) > 290_000
    assert time.process_time() - started < 30  # of this process, which only waits
