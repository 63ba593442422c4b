"""Test which lines of a job's log users see, with a log from Ray 2.60."""

import os
import pty
import re
import subprocess
import sys

import pytest

from raymill import job_output, settings

TRAINING = """\
2026-11-23 22:10:08,818	INFO job_manager.py:581 -- Runtime env is setting up.
Running entrypoint for job finetune_ddp-20261123-221008-e1c9: python -m jobs.finetune_ddp --steps 20
\x1b[36m(RayTrainWorker pid=1037)\x1b[0m finetune_ddp: 1,000,576 parameters, ddp on 2 x cpu in fp32; from the start
(autoscaler +5s) Tip: use `ray status` to view detailed cluster status.
(autoscaler +5s) Adding 2 node(s) of type worker.
\x1b[36m(RayTrainWorker pid=1037, ip=10.0.0.7)\x1b[0m step  1/20  loss 6.9532  lr 7.50e-05  5,715 tokens/s  0:00:07 left
\x1b[36m(RayTrainWorker pid=1038, ip=10.0.0.8)\x1b[0m CUDA error: uncorrectable ECC error encountered
\x1b[33m(raylet)\x1b[0m WARNING: 8 PYTHON worker processes have been started on node: 87d9 with address: 127.0.0.1.
[2026-11-23 22:11:10,847 E 1355 1355] core_worker.cc:2465: Actor with class name: 'MapWorker(Map(Scorer))' and so on.
[2026-11-23 22:11:10,848 C 1355 1355] core_worker.cc:99:  Check failed: memory
\x1b[33m(raylet)\x1b[0m A worker died or was killed while executing a task by an unexpected system error.

\x1b[36m(RayTrainWorker pid=1037)\x1b[0m step 20/20  loss 5.6816  lr 1.50e-03  7,568 tokens/s  0:00:00 left
a job may say core_worker.cc:1: or job_manager.py, and even Running entrypoint for job x
the trained model is in runs/finetune_ddp/model"""

SHOWN = """\
finetune_ddp: 1,000,576 parameters, ddp on 2 x cpu in fp32; from the start
(autoscaler +5s) Adding 2 node(s) of type worker.
step  1/20  loss 6.9532  lr 7.50e-05  5,715 tokens/s  0:00:07 left
\x1b[36m(RayTrainWorker pid=1038, ip=10.0.0.8)\x1b[0m CUDA error: uncorrectable ECC error encountered
[2026-11-23 22:11:10,848 C 1355 1355] core_worker.cc:99:  Check failed: memory
\x1b[33m(raylet)\x1b[0m A worker died or was killed while executing a task by an unexpected system error.

step 20/20  loss 5.6816  lr 1.50e-03  7,568 tokens/s  0:00:00 left
a job may say core_worker.cc:1: or job_manager.py, and even Running entrypoint for job x
the trained model is in runs/finetune_ddp/model"""


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 1000, 10**6])
def test_rays_own_lines_are_dropped_wherever_a_chunk_ends(size: int, capsys: pytest.CaptureFixture[str]) -> None:
    for verbose, expected in ((False, SHOWN), (True, TRAINING)):
        with job_output.Printer(verbose) as printer:
            for first in range(0, len(TRAINING), size):
                printer.write(TRAINING[first : first + size])
        assert capsys.readouterr().out == expected


def test_a_progress_bar_of_the_job_is_printed_as_it_moves(capsys: pytest.CaptureFixture[str]) -> None:
    with job_output.Printer() as printer:
        printer.write("10%\r20%\r30")
        assert capsys.readouterr().out == "10%\r20%\r"
        printer.write("%\r\n")
    assert capsys.readouterr().out == "30%\r\n"


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("step  3/150  loss 6.9532  5,715 tokens/s  1 day, 0:12:07 left", ("step", "3", "150", "0:12:07 left")),
        ("epoch 1/6  loss 1.8999  accuracy 54.9%  8,218 images/s  9 s left", ("epoch", "1", "6", "9 s left")),
        ("packing: 1,200 of 64,700 rows, 400 rows/s, 3 min left", ("packing", "1,200", "64,700", "3 min left")),
        ("runs/a/model: 0 of 17 rows, 0.0 rows/s, time left unknown", ("runs/a/model", "0", "17", "time left unknown")),
        ("trial-02: learning_rate 0.000361: all steps; 1 of 2 have ended", None),
        ("train: 630 conversations (0 cut) in 101 rows of 128 tokens: 96.2% filled", None),
    ],
)  # fmt: skip
def test_lines_with_progress_are_recognized(line: str, found: tuple[str, ...] | None) -> None:
    match = job_output.PROGRESS.match(line)
    assert (match and match.groups()) == found


SCRIPT = """
import sys
from raymill import job_output
with job_output.Printer() as printer:
    printer.write(sys.stdin.read())
    printer.write("\\nmodel:  10%\\rmodel:  20%\\rmodel: 100%\\n")
"""


def test_a_terminal_shows_a_bar_below_the_log_and_loses_no_line() -> None:
    terminal, theirs = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        cwd=settings.PROJECT,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "150"},
        stdin=subprocess.PIPE,
        stdout=theirs,
        text=True,
    )
    os.close(theirs)
    assert child.stdin is not None
    child.stdin.write(TRAINING)
    child.stdin.close()
    output = b""
    while piece := _read(terminal):
        output += piece
    assert child.wait() == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.decode())
    lines = [line.strip() for line in re.split(r"[\r\n]+", text)]
    for line in filter(None, re.sub(r"\x1b\[[0-9;]*m", "", SHOWN).splitlines()):
        assert lines.count(line.strip()) == 1
    assert "model: 100%" in lines
    assert not [line for line in lines if line.endswith(("10%", "20%"))], "the job's own bar would fill the screen"
    assert any(re.match(r"step .*━.* 20/20 .*0:00:00 left", line) for line in lines)


def _read(terminal: int) -> bytes:
    """Return new output, or b"" if the terminal is closed, which Linux reports as an error."""
    try:
        return os.read(terminal, 4096)
    except OSError:
        return b""
