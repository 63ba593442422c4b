"""Test reward models: their loss and gradient, each strategy, LoRA, the export, and that others refuse them."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import architectures
import packed_rows
import preprocess_job
import pytest
import torch
from peft import PeftModel
from preference_runs import EXACT, Row, alone, documents, options_of, pairs, plain_adamw, settings_of, spread
from preprocess_job import write_rows
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from torch import Tensor
from torch.nn import functional
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from jobs import evaluate, preprocess
from raymill import settings
from raymill.errors import UserError
from raymill.evaluation.options import EvaluateOptions
from raymill.evaluation.scoring import chosen_is_likelier
from raymill.serving import preflight as serving_preflight
from raymill.serving.options import ServeOptions
from raymill.training import composite, preflight, reward, reward_config, weights_check
from raymill.training.dataset import PackedRows, as_batch
from raymill.training.ddp import DDP
from raymill.training.options import DDPOptions

NO_CLASS = ("Gemma4Text", "Granite", "GraniteMoeHybrid")
"""Families without a class for scores in transformers."""


@pytest.fixture(scope="module")
def changes(assets: Path, tmp_path_factory: pytest.TempPathFactory, ray_session: None) -> dict[str, Any]:
    """Return changes to the settings of the local profile, with packed pairs of answers of different lengths."""
    folder, model = tmp_path_factory.mktemp("pairs"), tmp_path_factory.mktemp("model")
    packed_rows.write_model(model, assets, num_hidden_layers=2, attention_dropout=0.3)  # which pairs turn off
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.pad_token = tokenizer.eos_token  # as many tokenizers do
    tokenizer.save_pretrained(model)
    made = {"input": str(write_rows(folder / "rows.jsonl", pairs())), "model": str(model), "task": "preference"}
    preprocess.main(preprocess_job.options(assets, folder, **made, eval_share=0.1))
    output = tmp_path_factory.mktemp("runs")
    return settings_of(model, folder / "packed", output, objective="reward")


def plain_scores(model: PreTrainedModel, batch: dict[str, Tensor]) -> Tensor:
    """Return the score of each document as transformers computes it, one by one, without packing."""
    return torch.stack([model(ids[None]).logits[0, 0] for ids, _ in documents(batch)])


def exported(changes: dict[str, Any], name: str) -> PreTrainedModel:
    model, info = AutoModelForSequenceClassification.from_pretrained(
        f"{changes['output']}/{name}/model", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return model.eval()


def test_loss_and_gradient_are_those_of_the_formula(changes: dict[str, Any]) -> None:
    rows = alone(changes | {"name": "formula", "steps": 3, "max_grad_norm": 1e9})
    model = AutoModelForSequenceClassification.from_pretrained(changes["model"], num_labels=1, attention_dropout=0.0)
    model.config.pad_token_id = None
    with torch.no_grad():
        model.score.weight.zero_()
    optimizer = plain_adamw(model)
    seed = settings.load(DDPOptions, "train", profile="local").seed
    for step in (1, 2, 3):
        batch = PackedRows(changes["data"], "train", seed).read(8 * (step - 1), 8)
        chosen, rejected = plain_scores(model, batch).view(-1, 2).T
        loss = -functional.logsigmoid(chosen - rejected).mean()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        row = next(one for one in rows if one["step"] == step)
        assert row["loss"] == pytest.approx(loss.item(), abs=1e-5)
        assert row["grad_norm"] == pytest.approx(norm.item(), rel=1e-3)
        assert row["rewards/chosen"] == pytest.approx(chosen.mean().item(), abs=1e-5)
        assert row["rewards/accuracies"] == float((chosen > rejected).float().mean())
        for group in optimizer.param_groups:
            group["lr"] = row["lr"]
        optimizer.step()
    batch = PackedRows(changes["data"], "train", seed).read(0, 8)
    with torch.no_grad():
        torch.testing.assert_close(
            plain_scores(exported(changes, "formula"), batch), plain_scores(model, batch), atol=1e-4, rtol=0
        )


@pytest.fixture(scope="module")
def reward_alone(changes: dict[str, Any]) -> list[Row]:
    return alone(changes | {"name": "alone"})


@pytest.mark.parametrize(
    "way", ["fsdp", "zero3", *(pytest.param(way, marks=pytest.mark.nightly) for way in ("ddp", "zero1", "zero2"))]
)
def test_two_ranks_agree_with_one_process_and_resume(
    way: str, reward_alone: list[Row], changes: dict[str, Any]
) -> None:
    for stop in (4, None):
        rows = spread(changes | {"name": way, "stop_after": stop, "micro_batch_rows": 1}, way)
    for name in ("loss", "rewards/margins", "rewards/accuracies", "eval_loss", "eval_rewards/accuracies"):
        assert [row.get(name) for row in rows] == pytest.approx([row.get(name) for row in reward_alone], abs=EXACT)
    assert reward_alone[0]["eval_loss"] == pytest.approx(math.log(2), abs=1e-6), "the new head gives equal scores"
    assert reward_alone[-1]["eval_rewards/accuracies"] > 0.9
    check_equal_weights(changes, way, "alone")


def check_equal_weights(changes: dict[str, Any], name: str, other: str) -> None:
    models = [exported(changes, run) for run in (name, other)]
    for weights, others in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(weights, others, atol=1e-3, rtol=0)


LORA = {"lora_rank": 4, "learning_rate": 1e-2, "steps": 12}


@pytest.mark.parametrize("own", [{}, {"dora": True, "rslora": True}, {"quantize_base": True}])
def test_adapters_and_their_head_are_exported_with_equal_scores(own: dict[str, Any], changes: dict[str, Any]) -> None:
    name = f"lora-{'-'.join(own)}"
    for stop in (6, None):
        rows = alone(changes | LORA | own | {"name": name, "stop_after": stop})
    assert rows[-1]["eval_rewards/accuracies"] > 0.9
    whole = alone(changes | LORA | own | {"name": f"{name}-whole"})
    assert [row.get("loss") for row in rows] == [row.get("loss") for row in whole]
    if own.get("quantize_base"):
        return  # the exported model has the weights before they were quantized
    batch = PackedRows(changes["data"], "eval").read(0, 8)
    merged = exported(changes, name)
    base = AutoModelForSequenceClassification.from_pretrained(changes["model"], num_labels=1)
    adapted = PeftModel.from_pretrained(base, f"{changes['output']}/{name}/adapter").eval()
    with torch.no_grad():
        scores = plain_scores(merged, batch)
        torch.testing.assert_close(plain_scores(adapted, batch), scores, atol=1e-4, rtol=0)
    chosen, rejected = scores.view(-1, 2).T
    margin = rows[-1]["eval_rewards/margins"]
    rows_held_out = PackedRows(changes["data"], "eval")
    with torch.no_grad():
        chosen, rejected = plain_scores(merged, rows_held_out.read(0, len(rows_held_out))).view(-1, 2).T
    assert float((chosen - rejected).mean()) == pytest.approx(margin, abs=1e-4)


@pytest.mark.parametrize("way", ["fsdp", pytest.param("ddp", marks=pytest.mark.nightly)])
def test_bf16_is_close_to_fp32(way: str, reward_alone: list[Row], changes: dict[str, Any]) -> None:
    """The scores themselves are in fp32: bf16 would round each to eight bits."""
    rows = spread(changes | {"name": f"bf16-{way}", "precision": "bf16"}, way)
    assert [row.get("loss") for row in rows] == pytest.approx([row.get("loss") for row in reward_alone], abs=2e-2)
    assert any(row["rewards/chosen"] * 128 % 1 for row in rows if row["step"])
    assert exported(changes, f"bf16-{way}").dtype == torch.bfloat16


@pytest.mark.nightly
def test_quantized_shards_have_the_losses_of_one_process(assets: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    """With matrices of whole blocks of 64 numbers."""
    shape = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 128, "num_hidden_layers": 2}
    model = str(packed_rows.write_model(tmp_path / "model", assets, **shape))
    own = changes | LORA | {"model": model, "quantize_base": True}
    single, rows = alone(own | {"name": "qlora-alone"}), spread(own | {"name": "qlora-fsdp"}, "fsdp")
    assert [row.get("loss") for row in rows] == pytest.approx([row.get("loss") for row in single], abs=EXACT)
    assert rows[-1]["eval_rewards/accuracies"] > 0.9


@pytest.mark.nightly
@pytest.mark.parametrize("way", ["fsdp", "zero3"])
def test_adapters_on_shards_have_the_losses_of_one_process(way: str, changes: dict[str, Any]) -> None:
    own = changes | LORA
    single, rows = alone(own | {"name": f"lora-alone-{way}"}), spread(own | {"name": f"lora-{way}"}, way)
    assert [row.get("loss") for row in rows] == pytest.approx([row.get("loss") for row in single], abs=EXACT)
    check_equal_weights(changes, f"lora-{way}", f"lora-alone-{way}")


def test_transformers_scores_padded_texts_alike(changes: dict[str, Any], reward_alone: list[Row]) -> None:
    """The tokenizer of the base model pads with its end token, at which transformers would read no score."""
    folder = f"{changes['output']}/alone/model"
    model, tokenizer = exported(changes, "alone"), AutoTokenizer.from_pretrained(folder)
    held_out = PackedRows(changes["data"], "eval")
    texts = [ids.tolist() for ids, _ in documents(held_out.read(0, len(held_out)))]
    assert len({len(text) for text in texts}) > 3
    assert {text[-1] for text in texts} == {tokenizer.eos_token_id}
    assert model.config.pad_token_id == tokenizer.pad_token_id != tokenizer.eos_token_id
    inputs = tokenizer.pad({"input_ids": texts}, return_tensors="pt")
    with torch.no_grad():
        padded = model(**inputs).logits[:, 0]
        single = plain_scores(model, held_out.read(0, len(held_out)))
    torch.testing.assert_close(padded, single, atol=1e-4, rtol=0)
    chosen, rejected = padded.view(-1, 2).T
    last = reward_alone[-1]
    assert float((chosen > rejected).float().mean()) == last["eval_rewards/accuracies"]
    assert float(chosen.mean()) == pytest.approx(last["eval_rewards/chosen"], abs=1e-4)
    assert tokenizer.chat_template


@pytest.mark.parametrize(
    ("special", "template", "expected"),
    [
        (["<s>", "</s>", "<pad>"], "", "<pad>"),
        (["<s>", "</s>", "<|reserved_0|>", "<|right_pad_id|>"], "", "<|right_pad_id|>"),
        (["<s>", "</s>", "<turn>", "<|reserved_0|>"], "<turn>", "<|reserved_0|>"),
        (["<s>", "</s>"], "", None),
    ],
)
def test_the_padding_token_ends_no_document(special: list[str], template: str, expected: str | None) -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", bos_token="<s>", pad_token="</s>")
    tokenizer.add_special_tokens({"extra_special_tokens": special})
    tokenizer.chat_template = template
    found = reward_config.set_padding(tokenizer, [], len(tokenizer))
    assert (tokenizer.pad_token, found) == (expected, tokenizer.pad_token_id)
    if found:
        reward_config.set_padding(tokenizer, [], found)
        assert tokenizer.pad_token != expected, "a token without an embedding"


def test_a_reward_model_can_be_trained_further(changes: dict[str, Any], reward_alone: list[Row]) -> None:
    own = changes | {"model": f"{changes['output']}/alone/model", "name": "further", "steps": 1}
    preflight.check_packed(options_of(own), DDP.make_objective(options_of(own)))
    rows = alone(own)
    assert rows[0]["eval_loss"] == pytest.approx(reward_alone[-1]["eval_loss"], abs=1e-5)


def test_a_reward_model_without_its_head_is_refused(
    changes: dict[str, Any], reward_alone: list[Row], tmp_path: Path
) -> None:
    """It would get a new head, which gives each answer the score 0."""
    shutil.copytree(f"{changes['output']}/alone/model", tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    weights = load_file(file)
    del weights["score.weight"]
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(UserError, match=r"its files lack score\.weight"):
        weights_check.check(str(tmp_path / "model"), as_reward_model=True)


def test_other_jobs_refuse_a_reward_model(changes: dict[str, Any], reward_alone: list[Row]) -> None:
    run = f"{changes['output']}/alone"
    with pytest.raises(UserError, match=r"gives scores to texts and does not write any\. Pass a language model"):
        weights_check.check(f"{run}/model")
    serving = settings.load(ServeOptions, "serve", profile="local")
    for model in (f"{run}/model", f"file://{run}/model"):
        with pytest.raises(UserError, match=r"gives scores to texts and does not write any"):
            serving_preflight.check_model(serving.model_copy(update={"model": model}))
    options = options_of(changes | {"model": f"{run}/model", "objective": "dpo"})
    with pytest.raises(UserError, match=r"gives scores to texts and does not write any"):
        preflight.check_packed(options, DDP.make_objective(options))


def test_evaluate_compares_reward_models(
    changes: dict[str, Any],
    reward_alone: list[Row],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    ray_session: None,
) -> None:
    alone(changes | {"name": "short", "steps": 1})
    models = tuple(f"{changes['output']}/{name}/model" for name in ("alone", "short"))
    loaded = settings.load(EvaluateOptions, "evaluate", profile="local").model_dump()
    options = EvaluateOptions.model_validate(
        loaded | {"models": models, "data": changes["data"], "output": str(tmp_path), "batch_rows": 3, "num_workers": 2}
    )
    monkeypatch.setattr(evaluate, "METRICS", [chosen_is_likelier])
    evaluate.main(options)
    saved = json.loads((tmp_path / "evaluation.json").read_text())
    best = saved["models"][0]
    assert best["accuracy"] == reward_alone[-1]["eval_rewards/accuracies"]
    assert best["margin"] == pytest.approx(reward_alone[-1]["eval_rewards/margins"], abs=1e-4)
    assert best["loss"] == pytest.approx(reward_alone[-1]["eval_loss"], abs=1e-4)
    printed = capsys.readouterr().out
    assert f"held out: {saved['pairs']} pairs" in printed
    assert "note: chosen is likelier cannot be measured, because reward models have no logits" in printed
    with pytest.raises(UserError, match="is a reward model, and others in --models are not; evaluate them separately"):
        evaluate.main(options.model_copy(update={"models": (models[0], changes["model"])}))


def test_adapters_of_a_reward_model_are_refused_elsewhere(changes: dict[str, Any]) -> None:
    alone(changes | LORA | {"name": "lora-head", "steps": 1})
    with pytest.raises(UserError, match=r"it belongs to a reward model, which does not write text"):
        weights_check.check_adapter(changes["model"], f"{changes['output']}/lora-head/adapter")


@pytest.mark.parametrize(
    ("family", "problem"),
    [
        ("Granite", "transformers has no reward model of the type granite"),
        ("Gemma3", "transformers has no reward model of the type gemma3"),
    ],
)
def test_models_without_a_class_for_scores_are_refused(family: str, problem: str, tmp_path: Path) -> None:
    architectures.build(family).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=problem):
        weights_check.check(str(tmp_path), as_reward_model=True)


def test_a_classifier_of_several_labels_is_refused(tmp_path: Path) -> None:
    LlamaForSequenceClassification(LlamaConfig(**architectures.SIZES, num_labels=3)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"is a classifier with 3 labels, not a reward model"):
        weights_check.check(str(tmp_path), as_reward_model=True)


@pytest.mark.parametrize("family", [name for name in architectures.FAMILIES if name not in NO_CLASS])
def test_packed_scores_of_each_family_are_those_of_single_documents(family: str, tmp_path: Path) -> None:
    config = architectures.config_of(family)
    base = architectures.build(family)
    base.save_pretrained(tmp_path)
    weights_check.check(str(tmp_path), as_reward_model=True)
    model = composite.from_pretrained(str(tmp_path), as_reward_model=True).eval()
    torch.manual_seed(0)
    reward.use_scores(model, torch.randn(1, config.hidden_size))
    lengths = [13, 7, 20, 9]
    tokens = [torch.randint(3, config.vocab_size, (length,)) for length in lengths]
    row = torch.cat(tokens)
    positions = torch.cat([torch.arange(length) for length in lengths])
    arrays = {name: column[None].numpy() for name, column in (("input_ids", row), ("labels", row))}
    batch = as_batch(arrays | {"position_ids": positions[None].numpy()})
    with torch.no_grad():
        packed = reward.document_scores(model, model, batch)[0]
        for number, ids in enumerate(tokens):
            states = model.base_model(ids[None]).last_hidden_state[0, -1]
            assert float(packed[number]) == pytest.approx(float(states @ model.score.weight[0]), abs=1e-4)
