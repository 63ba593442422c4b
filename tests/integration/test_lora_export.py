"""Test that `adapter/` and `model/` have the logits of the trained model, for each kind of layer and each strategy."""

import errno
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import packed_rows
import pytest
import ranks
import torch
import torch.distributed as dist
import transformers
from architectures import FAMILIES, SIZES
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from raymill import settings
from raymill.errors import UserError
from raymill.training import weight_files
from raymill.training.ddp import DDP
from raymill.training.deepspeed_zero import ZeRO
from raymill.training.fsdp import FSDP
from raymill.training.options import DDPOptions, DeepSpeedOptions, FSDPOptions, TrainOptions
from raymill.training.runtimes.torchrun import TorchrunRuntime
from raymill.training.strategy import MakeStrategy
from raymill.training.trainer import Trainer
from raymill.training.weight_files import Weight

RANKS, STEPS, SEQUENCE_LENGTH = 2, 6, 64
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("Llama", {}),  # its output layer has weights of its own
    "dora": ("Llama", {}),
    "rslora": ("Llama", {}),
    "tied": ("Llama", {"tie_word_embeddings": True}),
    "conv1d": ("GPT2", {}),
    "experts": ("Qwen3Moe", {}),  # the experts of a layer are one parameter, and the router is no Linear
    "renamed-experts": ("Mixtral", {}),  # files have other names
    "buffers": ("DeepseekV3", {}),  # the router's biases are a buffer
}
ADAPTERS: dict[str, dict[str, Any]] = {
    "dora": {"dora": True},
    "rslora": {"rslora": True, "lora_targets": ("q_proj", "v_proj", "up_proj", "down_proj")},
}
WAYS: dict[str, Any] = {
    "ddp": (DDP, DDPOptions, [], {}),
    "fsdp": (FSDP, FSDPOptions, ["fsdp"], {}),
    "zero3": (ZeRO, DeepSpeedOptions, ["deepspeed"], {"zero_stage": 3, "offload_optimizer": False}),
}
PROMPT = torch.arange(40)[None]


@pytest.fixture(scope="module")
def inputs(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a base model of each kind, and with rows."""
    folder = tmp_path_factory.mktemp("inputs")
    packed_rows.write_model(folder / "tokenizer", assets)
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    for name, (family, changes) in MODELS.items():
        shape = SIZES | FAMILIES.get(family, {}) | changes | {"vocab_size": len(tokenizer)}
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(getattr(transformers, f"{family}Config")(**shape))
        for name_in_file, value in model.state_dict().items():
            if name_in_file.endswith("correction_bias"):
                value.normal_(std=0.1)  # new models have zeros
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    documents = packed_rows.tokenize(assets, folder / "linear", SEQUENCE_LENGTH)
    (folder / "rows").mkdir()
    packed_rows.write(folder / "rows", documents, folder / "linear", SEQUENCE_LENGTH, train=[24], evaluated=2)
    return folder


@pytest.fixture(scope="module", params=["ddp", "fsdp", pytest.param("zero3", marks=pytest.mark.nightly)])
def runs(request: pytest.FixtureRequest, inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a trained run of each model, and with the logits of the model in training."""
    folder = tmp_path_factory.mktemp(request.param)
    ranks.run(_rank, (request.param, inputs, folder), RANKS)
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_adapter_and_merged_model_have_the_logits_of_the_trained_model(runs: Path, inputs: Path, name: str) -> None:
    trained = torch.load(runs / f"{name}.pt")
    base = AutoModelForCausalLM.from_pretrained(inputs / name)
    with torch.no_grad():
        before = base(PROMPT).logits
        adapted = PeftModel.from_pretrained(base, str(runs / name / "adapter")).eval()(PROMPT).logits
        merged = AutoModelForCausalLM.from_pretrained(runs / name / "model").eval()(PROMPT).logits
    assert (trained - before).abs().max() > 0.1
    torch.testing.assert_close(adapted, trained, atol=1e-5, rtol=0)
    torch.testing.assert_close(merged, trained, atol=1e-5, rtol=0)


def test_an_adapter_is_as_the_settings_say(runs: Path) -> None:
    files = (runs / name / "adapter/adapter_config.json" for name in ("rslora", "dora"))
    rslora, dora = (json.loads(file.read_text()) for file in files)
    assert set(rslora["target_modules"]) == {"q_proj", "v_proj", "up_proj", "down_proj"}
    assert [(one["use_rslora"], one["use_dora"]) for one in (rslora, dora)] == [(True, False), (False, True)]


def test_a_failed_export_is_repeated_without_training(runs: Path) -> None:
    """A fully trained model is exported too, buffers included."""
    trained = torch.load(runs / "again.pt")
    with torch.no_grad():
        exported = AutoModelForCausalLM.from_pretrained(runs / "again" / "model").eval()(PROMPT).logits
    torch.testing.assert_close(exported, trained, atol=1e-5, rtol=0)
    assert len((runs / "again" / "metrics.jsonl").read_text().splitlines()) == 1 + STEPS


def _rank(rank: int, way: str, inputs: Path, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(RANKS)}
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS)
    strategy_type, options_type, sections, own = WAYS[way]
    changes = {"data": str(inputs / "rows"), "output": str(folder), "lora_rank": 4, "lora_alpha": 8, "steps": STEPS}
    changes |= {"learning_rate": 1e-2, "warmup_steps": 1, "global_batch_rows": 4, "micro_batch_rows": 2} | own
    options = settings.load(options_type, "train", *sections, profile="local").model_copy(update=changes)
    for name in MODELS:
        own = {"name": name, "model": str(inputs / name)} | ADAPTERS.get(name, {})
        _train(options.model_copy(update=own), strategy_type)
    options = options.model_copy(update={"name": "again", "model": str(inputs / "buffers"), "lora_rank": 0})
    patch = pytest.MonkeyPatch()
    patch.setattr(weight_files, "write", _fill_the_disk)
    with pytest.raises(UserError, match=r"export failed \((OSError|it failed on)"):
        _train(options, strategy_type)
    patch.undo()
    _train(options, strategy_type)
    dist.destroy_process_group()


def _train(options: TrainOptions, strategy_type: MakeStrategy) -> None:
    """Train and export a model, and write the logits of the model in training to a file."""
    folder = Path(options.output, options.name)
    folder.mkdir(exist_ok=True)
    dist.barrier()
    trainer = Trainer(options, TorchrunRuntime(folder, torch.device("cpu"), 1), strategy_type, None)
    trainer.fit()
    trainer.strategy.module.eval()
    with torch.no_grad():
        logits = trainer.strategy.module(input_ids=PROMPT).logits
    if dist.get_rank() == 0:
        torch.save(logits, folder.with_suffix(".pt"))


def _fill_the_disk(model: PreTrainedModel, weights: Iterable[Weight], folder: Path) -> None:
    next(iter(weights))
    raise OSError(errno.ENOSPC, "No space left on device")
