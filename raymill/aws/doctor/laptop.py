"""Check this machine: its versions of Ray and Python, and its programs."""

import importlib.metadata
import platform
import re
import shutil
from collections.abc import Iterator

from raymill.common.cluster_file import PINS, ClusterFile, target
from raymill.doctor import Finding, judge


def check_versions(file: ClusterFile) -> Iterator[Finding]:
    """Compare the versions of Ray and Python on this machine with those that the nodes install."""
    ray = re.search(r"^ray(?:\[.*\])?==(\S+)", PINS.read_text(encoding="utf-8"), re.MULTILINE)
    python = re.search(r"uv venv .*?--python (\S+)", "\n".join(file.content["setup_commands"]))
    minor = ".".join(platform.python_version_tuple()[:2])
    for name, here, pin in (("Ray", importlib.metadata.version("ray"), ray), ("Python", minor, python)):
        there = pin[1] if pin else "not pinned"
        remedy = f"Jobs need the same version. Run: rm -r .venv && ./inv doctor --target {target()}"
        yield judge(here == there, f"{name}: {here} here, {there} on the cluster", remedy)


def check_programs(file: ClusterFile) -> Iterator[Finding]:
    """Check for the programs that Ray's launcher and the verbs run."""
    for program, package in (("ssh", "openssh-client"), ("ssh-keygen", "openssh-client"), ("rsync", "rsync")):
        path = shutil.which(program)
        remedy = f"Run: apt-get install {package} (or use your system's package manager)"
        yield judge(path is not None, f"{program}: {path or 'not installed'}", remedy)
