"""Runs this machine's Chromium for tests, with its background requests disabled."""

import contextlib
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, sync_playwright

QUIET = ["no-sandbox", "disable-gpu", "disable-quic", "no-first-run"]
QUIET += ["disable-background-networking", "disable-component-update", "disable-sync"]


@contextlib.contextmanager
def running() -> Iterator[Browser]:
    """Run Chromium. While it runs, nothing else in this thread can run an event loop."""
    program = shutil.which("chromium")
    if not program:
        pytest.skip("Chromium is not installed. Run: apt-get install chromium")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=program, args=[f"--{flag}" for flag in QUIET])
        yield started
        started.close()
