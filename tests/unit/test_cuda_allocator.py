"""Test when training configures PyTorch's allocator of GPU memory. tests/gpu_path tests what the settings do."""

import pytest
import torch

from raymill.training import cuda_allocator

GPU = torch.device("cuda", 0)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list of the settings that torch gets."""
    seen: list[str] = []
    for name in cuda_allocator.USERS_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", seen.append)
    monkeypatch.setattr(torch, "empty", lambda size, device: None)
    return seen


def test_training_on_gpus_uses_expandable_segments(seen: list[str]) -> None:
    cuda_allocator.use_expandable_segments(torch.device("cpu"))
    assert seen == []
    cuda_allocator.use_expandable_segments(GPU)
    assert seen == ["expandable_segments:True"]


@pytest.mark.parametrize("name", cuda_allocator.USERS_SETTINGS)
def test_the_users_settings_are_kept(name: str, seen: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:512")
    cuda_allocator.use_expandable_segments(GPU)
    assert seen == []


def test_a_gpu_that_refuses_them_gets_ordinary_segments(
    seen: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(size: int, device: torch.device) -> None:
        raise RuntimeError("the driver says no\nstack of C++ calls")

    monkeypatch.setattr(torch, "empty", refuse)
    cuda_allocator.use_expandable_segments(GPU)
    assert seen == ["expandable_segments:True", "expandable_segments:False"]
    assert "this GPU refuses them (the driver says no)" in capsys.readouterr().out
