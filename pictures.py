"""Make the pictures of the READMEs from real runs, so that the pictures match the code. Run: ./inv pictures"""

import itertools
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Sequence
from fcntl import ioctl
from pathlib import Path

import pyte
from pyte.screens import Char
from rich.console import Console
from rich.style import Style
from rich.text import Text

import bake

FOLDER = bake.PROJECT / "docs" / "pictures"
COLUMNS, LINES = 110, 2_000
COLORS = {"default": None, "brown": "yellow"}  # rich lacks some of pyte's names for colors
PAGES = """
import os, shutil, sys
from pathlib import Path
from playwright.sync_api import expect, sync_playwright
expect.set_options(timeout=60_000)  # the model runs on a CPU
folder, url = Path(sys.argv[1]), sys.argv[2]
with sync_playwright() as playwright:
    browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
    page = browser.new_page(viewport={"width": 1000, "height": 480})
    page.goto(url)
    page.get_by_label("API key").fill(os.environ["SERVE_API_KEY"])
    page.get_by_label("API key").press("Enter")
    expect(page.get_by_label("Model")).to_be_enabled()
    page.get_by_label("Your question").fill("What is the reason phrase of HTTP status 404?")
    page.get_by_label("Your question").press("Enter")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    page.screenshot(path=folder / "chat.png")
    page.set_viewport_size({"width": 1400, "height": 820})
    page.goto(f"file://{Path('results/report.html').resolve()}")
    page.wait_for_timeout(500)
    path = str(Path.cwd())
    page.get_by_text(path).evaluate("(p, path) => { p.textContent = p.textContent.replace(path, '~/my-llm') }", path)
    page.screenshot(path=folder / "report.png")
    browser.close()
"""


def main() -> None:
    """Run the demo, `status`, `report` and the rehearsal, and save pictures of them and of the chat page."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        project = bake.bake(Path(scratch) / "my-llm")
        try:
            demo = _run(project, "demo")
            _draw(_from(demo, "Loss of the first steps"), "./inv demo", "demo")
            _draw(_run(project, "status"), "./inv status", "status")
            _run(project, "report")
            _take_screenshots(project, demo)
        finally:
            _run(project, "down")
        if os.geteuid() == 0:
            _draw(_from(_run(project, "rehearse"), "Timeline"), "./inv rehearse", "rehearsal")
    print(f"pictures: {FOLDER.relative_to(bake.TEMPLATE)}/")


def _run(project: Path, verb: str) -> list[Text]:
    """Run a verb in a terminal, and return what the terminal then shows. Raises `SystemExit` if the verb fails."""
    screen = pyte.Screen(COLUMNS, LINES)
    stream = pyte.ByteStream(screen)
    master, slave = pty.openpty()
    ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
    variables = os.environ | {"TERM": "xterm-256color", "COLUMNS": str(COLUMNS)}
    with subprocess.Popen(["./inv", verb], cwd=project, stdin=slave, stdout=slave, stderr=slave, env=variables) as run:
        os.close(slave)
        while output := _read(master):
            sys.stdout.buffer.write(output)
            sys.stdout.flush()
            stream.feed(output)
    os.close(master)
    if run.returncode:
        sys.exit(f"error: `./inv {verb}` failed as printed above.")
    last = max(number for number, line in enumerate(screen.display) if line.strip())
    return [_line(screen, number, str(project)) for number in range(last + 1)]


def _read(master: int) -> bytes:
    try:
        return os.read(master, 65_536)
    except OSError:  # on Linux, this means that the program has closed the terminal
        return b""


def _line(screen: pyte.Screen, number: int, project: str) -> Text:
    """Return a line of the screen, with ~/my-llm for the path of the temporary project folder."""
    line = Text()
    chars = [screen.buffer[number][column] for column in range(COLUMNS)]
    for style, run in itertools.groupby(chars, _style):
        line.append("".join(char.data for char in run), style)
    line.rstrip()
    while (start := line.plain.find(project)) >= 0:
        line = line[:start] + Text("~/my-llm") + line[start + len(project) :]
    return line


def _style(char: Char) -> Style:
    color = COLORS.get(char.fg, char.fg.replace("bright", "bright_"))
    if re.fullmatch("[0-9a-f]{6}", char.fg):
        color = f"#{char.fg}"
    return Style(color=color, bold=char.bold, italic=char.italics)


def _from(lines: Sequence[Text], words: str) -> Sequence[Text]:
    """Return `lines` from the first one that contains `words` to the end."""
    first = next(number for number, line in enumerate(lines) if words in line.plain)
    return lines[first:]


def _draw(lines: Sequence[Text], title: str, name: str) -> None:
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=max(line.cell_len for line in lines), file=nowhere)
        for line in lines:
            console.print(line, no_wrap=True, overflow="ignore", crop=False)
        console.save_svg(str(FOLDER / f"{name}.svg"), title=title, unique_id=name)


def _take_screenshots(project: Path, demo: Sequence[Text]) -> None:
    """Take a screenshot of the chat page with two answers, and one of the report."""
    said = "\n".join(line.plain for line in demo)
    address = re.findall(r"is served at (http://127\.0\.0\.1:\d+)/v1", said)[0]
    key = re.findall(r"^SERVE_API_KEY=(.*)$", (project / ".env").read_text(), re.MULTILINE)[0]
    python = (project / ".venv").resolve() / "bin" / "python"
    subprocess.run(
        [python, "-c", PAGES, FOLDER, address], cwd=project, check=True, env=os.environ | {"SERVE_API_KEY": key}
    )


if __name__ == "__main__":
    main()
