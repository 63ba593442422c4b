"""Test when training configures PyTorch's allocator of GPU memory."""

import pytest

from pipeline.training.runtimes import cuda_allocator


@pytest.fixture(autouse=True)
def _nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)


def test_training_on_gpus_uses_expandable_segments() -> None:
    assert cuda_allocator.variables("cuda") == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert cuda_allocator.variables("cpu") == {}


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_the_users_settings_are_kept(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:512")
    assert cuda_allocator.variables("cuda") == {}
