"""Test that adapters of every kind are merged as peft merges them, and that nothing that was trained can be lost."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import build
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from raymill.errors import UserError
from raymill.training import lora_merge

PROMPT = torch.arange(40)[None]
WEIGHTS = "adapter_model.safetensors"


def write(folder: Path, family: str, changes: dict[str, Any] | None = None, **lora: Any) -> dict[str, torch.Tensor]:
    """Write a base model and an adapter with random weights. Return the adapter's parameters."""
    build(family, **changes or {}).save_pretrained(folder / "base")
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    config: dict[str, Any] = {"task_type": "CAUSAL_LM", "target_modules": "all-linear"} | lora
    model = get_peft_model(base, LoraConfig(**config))
    trained = {name: value for name, value in base.named_parameters() if value.requires_grad}
    with torch.no_grad():
        for value in trained.values():
            value.add_(torch.randn_like(value) * 0.1)
    model.save_pretrained(str(folder / "adapter"))
    return trained


def merge(folder: Path, trained: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype="auto")
    return {name: value.clone() for name, value in lora_merge.merge(base, folder / "adapter", trained)}


def adapted(folder: Path) -> PreTrainedModel:
    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    return PeftModel.from_pretrained(base, str(folder / "adapter"))


@pytest.mark.parametrize(
    ("family", "lora"),
    [
        ("Llama", {}),
        ("Llama", {"target_modules": ["lm_head"]}),
        ("Llama", {"target_modules": ["embed_tokens", "q_proj"]}),
        ("Llama", {"use_dora": True}),
        ("Llama", {"use_rslora": True, "r": 3, "rank_pattern": {"q_proj": 5}}),
        ("Qwen2", {"lora_bias": True, "target_modules": ["q_proj"]}),  # a layer with a bias
        ("Qwen3Moe", {"target_modules": [], "target_parameters": ["mlp.experts.down_proj"]}),
        ("GptOss", {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.router.weight"]}),
    ],
    ids=lambda value: value if isinstance(value, str) else json.dumps(value).replace(" ", ""),
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_weights_have_the_logits_of_the_adapter(
    tmp_path: Path, family: str, lora: dict[str, Any], dtype: torch.dtype
) -> None:
    trained = write(tmp_path, family, {"dtype": dtype}, **lora)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    with torch.no_grad():
        before, expected = model(PROMPT).logits, adapted(tmp_path)(PROMPT).logits
        model.load_state_dict(merge(tmp_path, trained), strict=False)
        logits = model(PROMPT).logits
    assert (expected - before).abs().max() > 1e-3
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)


def test_each_weight_is_yielded_once_and_the_base_keeps_none(tmp_path: Path) -> None:
    trained = write(tmp_path, "Mixtral")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    names = [name for name, _ in base.named_parameters()]
    assert [name for name, _ in lora_merge.merge(base, tmp_path / "adapter", trained)] == names
    assert sum(value.numel() for name, value in base.named_parameters() if "experts" in name) == 0


@pytest.mark.parametrize("family", ["Llama", "Mixtral"])
@pytest.mark.parametrize("wrong", ["missing", "changed", "more", "not an adapter"])
def test_a_parameter_that_would_be_lost_is_refused(tmp_path: Path, family: str, wrong: str) -> None:
    trained = write(tmp_path, family)
    weights = load_file(tmp_path / "adapter" / WEIGHTS)
    name = max(weights)
    if wrong == "missing":
        del weights[name]
    elif wrong == "changed":
        weights[name][0, 0] += 1
    elif wrong == "more":
        trained.pop(max(trained))
    else:
        trained["lm_head.modules_to_save.default.weight"] = torch.zeros(1)
    save_file(weights, tmp_path / "adapter" / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"the trained parameter \S+ is not in the merged model \(one of 1\)"):
        merge(tmp_path, trained)


def test_modules_that_were_trained_as_a_whole_are_refused(tmp_path: Path) -> None:
    trained = write(tmp_path, "Llama", target_modules=["q_proj"], modules_to_save=["lm_head"])
    with pytest.raises(UserError, match="the trained parameter lm_head"):
        merge(tmp_path, trained)


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_an_adapter_of_a_tied_weight_is_refused(tmp_path: Path, target: str) -> None:
    trained = write(tmp_path, "Llama", {"tie_word_embeddings": True}, target_modules=[target])
    with pytest.raises(UserError, match=f"{target} cannot be merged, because another module shares its weight"):
        merge(tmp_path, trained)
