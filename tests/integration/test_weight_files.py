"""Test that exported weights equal those of `save_pretrained`, and that only a few are in memory at a time."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma4TextConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)

from raymill.training import weight_files
from raymill.training.weight_files import Weight

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "gemma2": Gemma2Config(**SIZES),  # its embeddings are tied
    "mixture": Qwen3MoeConfig(**SIZES, **EXPERTS),  # experts are separate in files, but one tensor in memory
    "gemma4": Gemma4TextConfig(**SIZES, vocab_size_per_layer_input=64),  # a scalar of each layer is a buffer
}
FULL_BYTES = 300_000  # two or three layers


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> PreTrainedModel:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(FAMILIES[request.param]).save_pretrained(tmp_path / "saved")
    return AutoModelForCausalLM.from_pretrained(tmp_path / "saved")


@pytest.mark.parametrize("limit", [FULL_BYTES, 2**30])
def test_the_files_are_those_of_save_pretrained(
    model: PreTrainedModel, limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_files, "FULL_BYTES", limit)
    (tmp_path / "written").mkdir()
    weight_files.write(model, _fresh(model, []), tmp_path / "written")
    files = sorted((tmp_path / "written").glob("*.safetensors"))
    written = {name: value for file in files for name, value in load_file(file).items()}
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert written.keys() == saved.keys()
    assert all(torch.equal(written[name], saved[name]) for name in saved)
    assert (len(files) > 2) == (limit == FULL_BYTES)
    if len(files) > 1:
        index = json.loads((tmp_path / "written" / weight_files.INDEX).read_text())
        assert index["metadata"]["total_size"] == sum(value.nbytes for value in saved.values())
        model.config.save_pretrained(tmp_path / "written")
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "written")
        assert all(map(torch.equal, loaded.parameters(), model.parameters()))


def test_a_lost_weight_is_an_error(model: PreTrainedModel, tmp_path: Path) -> None:
    *most, (name, _) = _fresh(model, [])
    with pytest.raises(ValueError, match=f"lack or add {name}"):
        weight_files.write(model, most, tmp_path)


def test_only_the_weights_of_one_file_are_in_memory(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_files, "FULL_BYTES", FULL_BYTES)
    held: list[int] = []
    weight_files.write(model, _fresh(model, held), tmp_path)
    layer = max(sum(value.nbytes for value in layer.parameters()) for layer in model.model.layers)
    assert max(held) <= FULL_BYTES + layer
    assert sum(value.nbytes for value in model.parameters()) > 2 * (FULL_BYTES + layer)


def _fresh(model: PreTrainedModel, held: list[int]) -> Iterator[Weight]:
    """Yield copies of the parameters. After each, append to `held` how many bytes of copies are still in memory."""
    copies: list[tuple[StorageWeakRef, int]] = []
    for name, parameter in model.named_parameters():
        copy = parameter.detach().clone()
        copies.append((StorageWeakRef(copy.untyped_storage()), copy.nbytes))
        yield name, copy
        del copy
        held.append(sum(size for storage, size in copies if not storage.expired()))
