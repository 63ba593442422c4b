"""Where packages come from: uv is told what pip was told, and torch is never the CUDA build."""

import sys
from pathlib import Path

import pytest

from cluster import environment


@pytest.fixture(autouse=True)
def no_settings_of_uv(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("UV_INDEX", "UV_DEFAULT_INDEX", "UV_FIND_LINKS", "UV_TORCH_BACKEND", "UV_INDEX_STRATEGY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def wheels(tmp_path: Path) -> str:
    (tmp_path / "torch-2.0.0+cpu-cp311-cp311-linux_x86_64.whl").touch()
    return str(tmp_path)


def test_find_links_serve_torch(wheels: str) -> None:
    source, variables = environment.package_sources({"find-links": f"{wheels} https://wheels.example/page"})
    assert variables == {"UV_FIND_LINKS": f"{wheels},https://wheels.example/page"}
    assert wheels in source


def test_a_folder_without_torch_leaves_it_to_the_cpu_index(tmp_path: Path) -> None:
    source, variables = environment.package_sources({"find-links": str(tmp_path)})
    assert variables["UV_FIND_LINKS"] == str(tmp_path)
    assert source == "PyTorch's CPU index"


@pytest.mark.skipif(sys.platform != "linux", reason="PyPI's torch for macOS is the CPU build already")
def test_elsewhere_the_cpu_index_serves_torch_and_a_mirror_the_rest() -> None:
    source, variables = environment.package_sources({"index-url": "https://mirror.example/simple"})
    assert variables == {"UV_DEFAULT_INDEX": "https://mirror.example/simple", "UV_TORCH_BACKEND": "cpu"}
    assert source == "PyTorch's CPU index"


def test_what_the_user_set_for_uv_wins(monkeypatch: pytest.MonkeyPatch, wheels: str) -> None:
    monkeypatch.setenv("UV_FIND_LINKS", wheels)
    source, variables = environment.package_sources({"find-links": "/somewhere/else"})
    assert variables == {}
    assert wheels in source


def test_pips_own_settings_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "pip.conf").write_text("[global]\nindex-url = https://mirror.example/simple\nfind-links = /files\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.setenv("PIP_FIND_LINKS", "/environment")
    settings = environment.pip_settings()
    if not settings:
        pytest.skip("there is no pip on this machine's PATH, so there are no settings of pip's to honour")
    assert settings["index-url"] == "https://mirror.example/simple"
    assert settings["find-links"] == "/environment", "pip's environment variables win over its files"
