"""Test that composite models, which have a vision tower, are trained on text and keep everything else."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import architectures
import packed_rows
import pytest
import ranks
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, PreTrainedModel

from jobs import quantize
from raymill import settings
from raymill.data.tokenizer import eos_ids
from raymill.errors import UserError
from raymill.evaluation import candidates, scoring
from raymill.evaluation.candidates import Candidate
from raymill.model_config import context_length
from raymill.planner import serving
from raymill.planner.shape import shape_of
from raymill.quantization.options import QuantizeOptions
from raymill.serving import preflight as serving_preflight
from raymill.serving.options import ServeOptions
from raymill.training import composite, flops, model_io, preflight, weight_files
from raymill.training.dataset import PackedRows, read_manifest
from raymill.training.ddp import DDP
from raymill.training.deepspeed_zero import ZeRO
from raymill.training.fsdp import FSDP
from raymill.training.options import DDPOptions, DeepSpeedOptions, FSDPOptions
from raymill.training.packed_attention import model_inputs
from raymill.training.runtimes.runtime import SingleProcess
from raymill.training.schedule import BatchPlan
from raymill.training.trainer import Trainer

SEQUENCE_LENGTH, RANKS = 64, 2
PROCESSOR = {"image_processor_type": "SomeImageProcessor", "size": {"height": 28, "width": 28}}
STRATEGIES: dict[str, tuple[Any, Any, tuple[str, ...]]] = {
    "DDP": (DDP, DDPOptions, ("train",)),
    "FSDP": (FSDP, FSDPOptions, ("train", "fsdp")),
    "ZeRO-3": (ZeRO, DeepSpeedOptions, ("train", "deepspeed")),
}


@pytest.fixture(scope="module", params=architectures.COMPOSITES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(family: str, assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small composite model with the demo's tokenizer."""
    return _write_model(tmp_path_factory.mktemp("models") / family, family, assets)


@pytest.fixture(scope="module")
def packed(model: Path, assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    packed_rows.write(
        folder, packed_rows.tokenize(assets, model, SEQUENCE_LENGTH), model, SEQUENCE_LENGTH, train=[8], evaluated=2
    )
    return folder


def _write_model(folder: Path, family: str, assets: Path) -> Path:
    tokenizer = AutoTokenizer.from_pretrained(assets / "model")
    size = len(tokenizer) + 1  # the last token stands for an image
    model = architectures.build(
        family, vocab_size=size, vocab_size_per_layer_input=size, max_position_embeddings=SEQUENCE_LENGTH
    )
    with torch.no_grad():
        for _, value in weight_files.saved_buffers(model):
            value += torch.rand_like(value)  # all ones in a new model, but not in published ones
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return folder


def _options(model: Path, packed: Path, output: Path, **changes: Any) -> DDPOptions:
    changes |= {"name": "run", "model": str(model), "data": str(packed), "output": str(output), "num_workers": 1}
    changes |= {"steps": 3, "checkpoint_every": 2, "eval_every": 3, "warmup_steps": 1, "learning_rate": 1e-2}
    changes |= {"global_batch_rows": 4, "micro_batch_rows": 2}
    return settings.load(DDPOptions, "train", profile="local").model_copy(update=changes)


@pytest.mark.parametrize("any_family", [*architectures.FAMILIES, *architectures.COMPOSITES])
def test_what_is_frozen_is_what_text_does_not_reach(any_family: str) -> None:
    model = architectures.build(any_family)
    _logits(model, torch.arange(1, 33)[None]).sum().backward()
    unreached = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    assert composite.without_text(model) == unreached
    assert bool(unreached) == (any_family in architectures.COMPOSITES)


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_a_trained_model_keeps_its_vision_tower(
    model: Path, packed: Path, lora_rank: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = _options(model, packed, tmp_path, lora_rank=lora_rank)
    preflight.check_packed(options)
    trainer = Trainer(options, SingleProcess(tmp_path / "run", torch.device("cpu"), 1), DDP, None)
    trainer.fit()
    trained, folder = trainer.strategy.model, tmp_path / "run" / "model"
    frozen = composite.without_text(composite.from_pretrained(str(model)))
    assert f"{sum(trained.get_parameter(name).numel() for name in frozen):,} parameters for vision stay" in (
        capsys.readouterr().out
    )
    if lora_rank:
        assert not [name for name, _ in trained.named_parameters() if "lora" in name and "vis" in name]
    # the whole model is in the folder, under the names of the base model
    base, exported = load_file(model / "model.safetensors"), load_file(folder / "model.safetensors")
    assert exported.keys() == base.keys()
    text_names = {name for name in base if not torch.equal(base[name], exported[name])}
    assert text_names
    assert not [name for name in text_names if "vis" in name or "scalar" in name]
    assert json.loads((folder / "preprocessor_config.json").read_text()) == PROCESSOR
    assert json.loads((folder / "config.json").read_text())["architectures"] == [type(trained).__name__]
    # and computes what the trained model computed
    reloaded, info = composite.auto_class(trained.config).from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    ids = torch.arange(1, 33)[None]
    torch.testing.assert_close(_logits(reloaded.eval(), ids), _logits(trained.eval(), ids), atol=1e-4, rtol=0)
    for name in frozen:
        assert torch.equal(reloaded.get_parameter(name), composite.from_pretrained(str(model)).get_parameter(name))


def _logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    batch = {"input_ids": ids, "labels": ids, "position_ids": torch.arange(ids.shape[1])[None]}
    return model(**model_inputs(model, batch), use_cache=False).logits


def test_facts_about_text_are_found(model: Path, packed: Path, family: str, capsys: pytest.CaptureFixture[str]) -> None:
    """All of these raised errors, because composite configurations have no facts about text themselves."""
    manifest, config = read_manifest(str(packed)), preflight.load_config(str(model))
    assert context_length(config) == SEQUENCE_LENGTH
    with pytest.raises(UserError, match=f"context of m is {SEQUENCE_LENGTH} tokens"):
        preflight.check_context("m", config, SEQUENCE_LENGTH + 1)
    candidate = Candidate(str(model), str(model), None)
    candidates.check(candidate, str(packed), manifest)
    loaded = scoring.load(candidate, torch.float32).eval()
    batch = PackedRows(str(packed), "eval").read(0, 2)
    counts, _ = scoring.score(loaded, batch)
    assert counts.loss > 0
    questions, stopped = scoring.count_stops(loaded, batch, range(1000))
    assert stopped == questions > 0
    shape = shape_of(config)
    assert shape.parameters + shape.untrained == loaded.num_parameters()
    assert shape.untrained == sum(loaded.get_parameter(name).numel() for name in composite.without_text(loaded))
    assert shape.compute == flops.compute_of(loaded)
    served = serving.serve(shape, 4, 1, 8.0)
    assert served
    assert served.weights == 4 * loaded.num_parameters()


@pytest.mark.parametrize("installed", [True, False])
def test_a_vision_tower_is_served_only_where_vllm_has_torchvision(
    model: Path, monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    options = settings.load(ServeOptions, "serve", profile="local")
    options = options.model_copy(update={"model": str(model), "max_model_len": SEQUENCE_LENGTH + 1})
    modules = {"vllm": True, "torchvision": installed or None}
    monkeypatch.setattr(importlib.util, "find_spec", modules.get)
    reason = f"more than the {SEQUENCE_LENGTH} tokens" if installed else "has a vision tower, .* needs torchvision"
    with pytest.raises(UserError, match=reason):
        serving_preflight.check_model(options)


def test_a_vision_tower_is_not_quantized(model: Path, packed: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(quantize, "connect", lambda: None)
    monkeypatch.setattr(quantize.capacity, "refuse_too_many_workers", lambda *_: None)
    options = settings.load(QuantizeOptions, "quantize", profile="local")
    paths = {"model": str(model), "data": str(packed), "output": str(tmp_path / "quantized")}
    with pytest.raises(UserError, match=f"quantize would lose or damage the parts of {model} for vision"):
        quantize.main(options.model_copy(update=paths))


def test_stop_tokens_of_the_whole_configuration_count(model: Path, tmp_path: Path) -> None:
    """Gemma 3's configuration names two stop tokens beside the text model's, which names one."""
    config = json.loads((model / "config.json").read_text())
    config |= {"eos_token_id": [3, 4], "text_config": config["text_config"] | {"eos_token_id": 4}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert eos_ids(str(tmp_path), tokenizer) == {3, 4, tokenizer.eos_token_id}


@pytest.fixture(scope="module")
def spread(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Return, for each strategy, the gradient norms and the evaluation loss of two ranks, and of one without LoRA."""
    folder = tmp_path_factory.mktemp("spread")
    _write_model(folder / "model", "Gemma4", assets)
    ranks.run(_observe, (folder,), RANKS)
    return json.loads((folder / "seen.json").read_text())


@pytest.mark.parametrize("lora_rank", [0, 4])
@pytest.mark.parametrize("name", STRATEGIES)
def test_several_ranks_train_and_export_a_composite(spread: dict[str, Any], name: str, lora_rank: int) -> None:
    norms = spread[f"{name}, LoRA {lora_rank}"]
    assert norms["norms"] == pytest.approx(spread[f"DDP, LoRA {lora_rank}"]["norms"], rel=1e-4)
    assert norms["kept"] > 10
    assert norms["apart"] < 1e-4


def _observe(rank: int, folder: Path) -> None:
    ranks.join(rank, RANKS, folder)
    seen = {f"{name}, LoRA {rank_}": _run(rank, folder, name, rank_) for rank_ in (0, 4) for name in STRATEGIES}
    if rank == 0:
        (folder / "seen.json").write_text(json.dumps(seen))
    ranks.leave()


def _run(rank: int, folder: Path, name: str, lora_rank: int) -> dict[str, Any]:
    """Train for two steps, which is when DDP notices parameters without gradients, and export."""
    kind, options_type, sections = STRATEGIES[name]
    changes = {"model": str(folder / "model"), "zero_stage": 3, "lora_rank": lora_rank, "gradient_checkpointing": True}
    options = settings.load(options_type, *sections, profile="local").model_copy(update=changes)
    runtime, plan = ranks.Rank(rank, RANKS), BatchPlan(1, 1)
    torch.manual_seed(0)
    with kind.loading(options, runtime, plan):
        model = model_io.load_model(options)
    strategy = kind(model, options, runtime, plan)
    ids = torch.arange(1, 33)[None] + rank
    batch = {"input_ids": ids, "labels": ids, "position_ids": torch.arange(32)[None]}
    norms = []
    for _ in range(2):
        strategy.accumulate(batch, torch.tensor(0.1), last=True)
        norms.append(float(strategy.step(1e-3)))
    run = folder / f"{name}-{lora_rank}"
    model_io.export(strategy, AutoTokenizer.from_pretrained(options.model), [], run, options)
    with torch.no_grad():
        expected = strategy.module(**model_inputs(model, batch), use_cache=False).logits
    if rank:
        return {}
    base, exported = (load_file(path / "model.safetensors") for path in (folder / "model", run / "model"))
    assert exported.keys() == base.keys()
    kept = [key for key in base if torch.equal(base[key], exported[key])]
    reloaded = composite.from_pretrained(str(run / "model")).eval()
    return {"norms": norms, "kept": len(kept), "apart": float((_logits(reloaded, ids) - expected).abs().max())}
