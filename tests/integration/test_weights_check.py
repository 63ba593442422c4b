"""Test that a model whose files are incomplete or do not match its configuration is refused before workers start."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from pyarrow.fs import FileSystem, copy_files
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    BitsAndBytesConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)

from raymill.errors import UserError
from raymill.rag import cross_encoder
from raymill.training import weights_check

Weights = dict[str, torch.Tensor]
SIZES = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
ADAPTED = "base_model.model.model.layers.1.self_attn.q_proj"
EXPERT = "model.layers.1.block_sparse_moe.experts.2.w1.weight"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _write(LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS)), tmp_path_factory.mktemp("llama") / "model")


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a mixture of experts, whose published names differ from those in memory."""
    model = MixtralForCausalLM(MixtralConfig(**SIZES, **HEADS, num_local_experts=4))
    return _write(model, tmp_path_factory.mktemp("mixtral") / "model")


def _write(model: PreTrainedModel, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def _changed(model: Path, folder: Path, change: Callable[[Weights], Weights]) -> Path:
    """Copy a model, with other weights in its file."""
    shutil.copytree(model, folder)
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors", {"format": "pt"})
    return folder


def _problem(model: object) -> str:
    with pytest.raises(UserError) as refused:
        weights_check.check(str(model))
    message = str(refused.value)
    assert message.startswith(f"{model} cannot be used: ")
    assert "\n" not in message
    return message


CHANGES: dict[str, tuple[Callable[[Weights], Weights], str]] = {
    "missing tensor": (
        lambda weights: {name: value for name, value in weights.items() if "1.self_attn.q" not in name},
        "its files lack model.layers.1.self_attn.q_proj.weight.",
    ),
    "foreign prefix": (
        lambda weights: {f"base_model.model.{name}": value for name, value in weights.items()},
        "its files lack lm_head.weight and 20 other weights; its files have base_model.model.lm_head.weight instead.",
    ),
    "larger vocabulary": (
        lambda weights: weights | {"model.embed_tokens.weight": torch.zeros(30, 16)},
        "model.embed_tokens.weight has the shape (30, 16) in its files, but (40, 16) in config.json.",
    ),
    "more layers": (
        lambda weights: weights | {"model.layers.2.mlp.up_proj.weight": torch.zeros(16, 16)},
        "config.json describes a model without model.layers.2.mlp.up_proj.weight, which its files hold.",
    ),
    "biases": (
        lambda weights: weights | {"model.layers.0.self_attn.q_proj.bias": torch.ones(16)},
        "config.json describes a model without model.layers.0.self_attn.q_proj.bias, which its files hold.",
    ),
    "no output layer": (
        lambda weights: {name: value for name, value in weights.items() if name != "lm_head.weight"},
        "its files lack lm_head.weight.",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_weights_that_do_not_match_the_configuration_are_refused(llama: Path, tmp_path: Path, name: str) -> None:
    change, expected = CHANGES[name]
    assert expected in _problem(_changed(llama, tmp_path / "model", change))


@pytest.mark.parametrize("shape", [None, (12, 16)], ids=["missing", "another shape"])
def test_an_incomplete_expert_is_refused(mixtral: Path, tmp_path: Path, shape: tuple[int, ...] | None) -> None:
    def change(weights: Weights) -> Weights:
        del weights[EXPERT]
        return weights | ({EXPERT: torch.zeros(shape)} if shape else {})

    problem = _problem(_changed(mixtral, tmp_path / "model", change))
    assert "do not hold all parts of model.layers.1.mlp.experts.gate_up_proj, or parts of different shapes" in problem


def test_a_layer_without_one_of_its_experts_is_refused(mixtral: Path, tmp_path: Path) -> None:
    lost = "layers.1.block_sparse_moe.experts.3."
    folder = _changed(
        mixtral, tmp_path / "model", lambda all_: {name: one for name, one in all_.items() if lost not in name}
    )
    assert "has the shape (3, " in _problem(folder)


@pytest.fixture
def sharded(llama: Path, tmp_path: Path) -> Path:
    model = AutoModelForCausalLM.from_pretrained(llama)
    return _write(model, tmp_path / "sharded", max_shard_size="4KB")


def test_shards_must_be_complete(sharded: Path) -> None:
    weights_check.check(str(sharded))
    last = sorted(sharded.glob("*.safetensors"))[-1]
    content = last.read_bytes()
    last.write_bytes(content[: len(content) // 2])
    assert re.search(rf"{last.name} has [\d,]+ bytes instead of [\d,]+\.", _problem(sharded))
    last.write_bytes(content + b"0")
    assert re.search(rf"{last.name} has [\d,]+ bytes instead of [\d,]+\.", _problem(sharded))
    last.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 20\n")
    assert f"{last.name} is a pointer of Git LFS, not the weights; run git lfs pull" in _problem(sharded)
    for no_header in (b"", b"{}", bytes(100), content[:20]):
        last.write_bytes(no_header)
        assert f"{last.name} is not a safetensors file" in _problem(sharded)
    last.unlink()
    assert f"{last.name}, which its index lists, is missing" in _problem(sharded)


def test_the_index_must_list_all_weights_and_only_files_that_count(sharded: Path, llama: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    last = max(content["weight_map"].values())
    kept = {name: file for name, file in content["weight_map"].items() if file != last}
    index.write_text(json.dumps(content | {"weight_map": kept}))
    assert "its files lack" in _problem(sharded)
    index.write_text('{"weight_map": ')
    assert "model.safetensors.index.json is not a valid index" in _problem(sharded)
    index.write_text(json.dumps(content))
    shutil.copy(llama / "model.safetensors", sharded)
    assert "it has both model.safetensors and model.safetensors.index.json" in _problem(sharded)


def test_a_model_without_weights_is_refused(llama: Path, tmp_path: Path) -> None:
    shutil.copytree(llama, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    assert "it has neither safetensors files nor pytorch_model.bin" in _problem(tmp_path / "model")
    (tmp_path / "model" / "pytorch_model.bin").write_bytes(b"PK")
    assert "pytorch_model.bin cannot be read (" in _problem(tmp_path / "model")


def test_a_configuration_that_transformers_cannot_build_is_refused(llama: Path, tmp_path: Path) -> None:
    shutil.copytree(llama, tmp_path / "model")
    config = json.loads((llama / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"hidden_act": "unknown"}))
    assert "transformers cannot load it" in _problem(tmp_path / "model")


def test_a_published_classifier_must_have_its_head(llama: Path) -> None:
    with pytest.raises(UserError, match=r"its files lack score\.weight"):
        weights_check.check(str(llama), AutoModelForSequenceClassification)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = BertConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    return _write(BertForMaskedLM(config), tmp_path_factory.mktemp("encoder") / "model")


def test_an_encoder_may_have_other_heads_but_not_missing_layers(encoder: Path, tmp_path: Path) -> None:
    weights_check.check(str(encoder), AutoModel, is_encoder=True)
    lost = "bert.encoder.layer.0.output.dense.bias"
    folder = _changed(
        encoder, tmp_path / "lost", lambda all_: {name: one for name, one in all_.items() if name != lost}
    )
    with pytest.raises(UserError, match=r"its files lack encoder\.layer\.0\.output\.dense\.bias\."):
        weights_check.check(str(folder), AutoModel, is_encoder=True)


def test_an_encoder_without_a_classifier_is_no_cross_encoder(encoder: Path) -> None:
    with pytest.raises(UserError, match=r"its files lack bert\.pooler\.dense\.bias and 3 other weights"):
        cross_encoder.check(str(encoder))


ADAPTER_CHANGES: dict[str, tuple[Callable[[Weights], Weights], str]] = {
    "missing": (
        lambda weights: {name: value for name, value in weights.items() if "layers.1" not in name},
        "its files lack base_model.model.model.layers.1.self_attn.q_proj.lora_",
    ),
    "another base": (
        lambda weights: weights | {f"{ADAPTED.replace('.1.', '.7.')}.lora_A.weight": torch.zeros(2, 16)},
        "has no place for base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight",
    ),
    "another shape": (
        lambda weights: weights | {f"{ADAPTED}.lora_A.weight": torch.zeros(2, 20)},
        "peft cannot load it (",
    ),
}


@pytest.mark.parametrize("name", ADAPTER_CHANGES)
def test_adapters_must_match_their_base_model(llama: Path, tmp_path: Path, name: str) -> None:
    change, expected = ADAPTER_CHANGES[name]
    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    get_peft_model(AutoModelForCausalLM.from_pretrained(llama), lora).save_pretrained(str(tmp_path))
    weights_check.check_adapter(str(llama), str(tmp_path))
    file = tmp_path / "adapter_model.safetensors"
    save_file(change(load_file(file)), file)
    with pytest.raises(UserError) as refused:
        weights_check.check_adapter(str(llama), str(tmp_path))
    assert expected in str(refused.value)


def test_good_models_pass(llama: Path, mixtral: Path, tmp_path: Path) -> None:
    tied = _write(LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, tie_word_embeddings=True)), tmp_path / "tied")
    gpt2 = _write(GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2)), tmp_path / "gpt2")
    bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    nf4 = _write(AutoModelForCausalLM.from_pretrained(llama, quantization_config=bits), tmp_path / "nf4")
    pickled = tmp_path / "pickled"
    shutil.copytree(llama, pickled)
    torch.save(load_file(llama / "model.safetensors"), pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    for folder in (llama, mixtral, tied, gpt2, nf4, pickled):
        weights_check.check(str(folder))


def test_a_model_in_a_bucket_is_checked_without_a_copy(
    s3: str, sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    bucket, path = FileSystem.from_uri(f"{s3}/models/sharded")
    bucket.create_dir(path)
    copy_files(str(sharded), path, destination_filesystem=bucket)
    weights_check.check(f"{s3}/models/sharded")
    assert weights_check.fingerprint(f"{s3}/models/sharded") == weights_check.fingerprint(str(sharded))
    assert not list((tmp_path / "cache").rglob("*.safetensors"))

    last = max(sharded.glob("*.safetensors"))
    with bucket.open_output_stream(f"{path}/{last.name}") as stream:
        stream.write(last.read_bytes()[:-100])
    assert f"{last.name} has " in _problem(f"{s3}/models/sharded")


def test_the_fingerprint_tells_trained_models_apart(llama: Path, tmp_path: Path) -> None:
    def train(weights: Weights) -> Weights:
        name = "model.layers.0.self_attn.v_proj.weight"
        return weights | {name: weights[name] + 1e-4}

    before = weights_check.fingerprint(str(llama))
    assert weights_check.fingerprint(str(shutil.copytree(llama, tmp_path / "copy"))) == before
    assert weights_check.fingerprint(str(_changed(llama, tmp_path / "trained", train))) != before
