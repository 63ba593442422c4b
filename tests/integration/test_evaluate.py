"""Test that `evaluate` gives the same numbers as the training loop, and as the loss and generation of transformers."""

import json
import math
import re
import shutil
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import boto3
import packed_rows
import pyarrow as pa
import pytest
import ray
import torch
from ray.exceptions import RayTaskError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from jobs import evaluate
from raymill import settings
from raymill.data.tokenization import DOCUMENTS, NOT_TRAINED
from raymill.errors import UserError
from raymill.evaluation import candidates, evaluation, scoring
from raymill.evaluation.options import EvaluateOptions
from raymill.evaluation.scoring import Score, Scorer
from raymill.training.dataset import Batch, PackedRows, read_manifest
from raymill.training.ddp import DDP
from raymill.training.options import DDPOptions
from raymill.training.runtimes.runtime import SingleProcess
from raymill.training.trainer import train

SEQUENCE_LENGTH = 64
DOCUMENT_COUNT, WRONG_COUNT = 12, 3
ANSWER_COUNT = DOCUMENT_COUNT * 3 // 2  # every other document has a second turn

Document = tuple[list[int], list[int]]
"""Token ids and labels of one document."""

torch.set_num_threads(1)  # with tensors this small, several threads would only wait for one another


@pytest.fixture(scope="module")
def speaker(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the model whose answers are held out. Large initial weights make its most likely tokens clear."""
    return packed_rows.write_model(tmp_path_factory.mktemp("speaker"), assets, initializer_range=0.2)


@pytest.fixture(scope="module")
def stranger(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model of the same size that gives none of the speaker's answers."""
    return packed_rows.write_model(tmp_path_factory.mktemp("stranger"), assets, seed=1, initializer_range=0.2)


@pytest.fixture(scope="module")
def documents(speaker: Path) -> list[Document]:
    """Return random questions with the speaker's greedy answers. The last token of WRONG_COUNT documents is wrong."""
    model = AutoModelForCausalLM.from_pretrained(speaker)
    random = torch.Generator().manual_seed(0)
    made = []
    for number in range(DOCUMENT_COUNT):
        tokens: list[int] = []
        labels: list[int] = []
        for turn in range(1 + number % 2):
            question = torch.randint(5, model.config.vocab_size, (4 + number,), generator=random).tolist()
            answer = _generate(model, tokens + question, 1 + (number + turn) % 5)
            tokens += question + answer
            labels += [NOT_TRAINED] * len(question) + answer
        if number >= DOCUMENT_COUNT - WRONG_COUNT:
            tokens[-1] = labels[-1] = (tokens[-1] + 1) % model.config.vocab_size
        made.append((tokens, labels))
    return made


@pytest.fixture(scope="module")
def packed(documents: list[Document], speaker: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with these documents held out, and one training document that fills a row."""
    folder = tmp_path_factory.mktemp("packed")
    trained = list(range(5, 5 + SEQUENCE_LENGTH))
    made = [(trained, [NOT_TRAINED, *trained[1:]]), *documents]
    table = pa.Table.from_pylist([{"input_ids": tokens, "labels": labels} for tokens, labels in made], DOCUMENTS)
    packed_rows.write(folder, table, speaker, SEQUENCE_LENGTH, train=[1], evaluated=DOCUMENT_COUNT)
    return folder


@pytest.fixture(scope="module")
def in_bucket(s3: str, speaker: Path) -> str:
    """Copy the speaker to a bucket, and return the copy's URI."""
    for file in speaker.iterdir():
        boto3.client("s3").upload_file(str(file), "bucket", f"speaker/{file.name}")
    return f"{s3}/speaker"


@pytest.fixture(scope="module")
def run(in_bucket: str, packed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that trained LoRA adapters for the speaker, with a separate model cache."""
    folder = tmp_path_factory.mktemp("runs") / "lora"
    changes: dict[str, Any] = {"name": "lora", "model": in_bucket, "data": str(packed), "output": str(folder.parent)}
    changes |= {"lora_rank": 4, "steps": 2, "warmup_steps": 0, "global_batch_rows": 2, "micro_batch_rows": 2}
    options = settings.load(DDPOptions, "train", profile="local").model_copy(update=changes)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("HF_HOME", str(tmp_path_factory.mktemp("node")))
        train(options, SingleProcess(folder, torch.device("cpu"), 1), DDP)
    (folder / "run.json").write_text("{}")  # preflight writes it when Ray or torchrun starts a run
    return folder


@pytest.fixture
def options(packed: Path, tmp_path: Path) -> EvaluateOptions:
    defaults = settings.load(EvaluateOptions, "evaluate", profile="local")
    changes = {"data": str(packed), "output": str(tmp_path), "batch_rows": 2, "num_workers": 1}
    return defaults.model_copy(update=changes)


# ------------------------------------------------------------------------------------------ the numbers


def test_exact_answers_are_the_same_as_generated_ones(
    speaker: Path, stranger: Path, documents: list[Document], packed: Path
) -> None:
    for folder, expected in ((speaker, ANSWER_COUNT - WRONG_COUNT), (stranger, 0)):
        scored = _score(str(folder), packed)
        model = AutoModelForCausalLM.from_pretrained(folder)
        generated = [
            _generate(model, tokens[:begin], end - begin) == tokens[begin:end]
            for tokens, labels in documents
            for begin, end in _answers(labels)
        ]
        assert len(generated) == scored.answers == ANSWER_COUNT
        assert sum(generated) == scored.exact == expected


def test_answers_that_end_are_counted(speaker: Path, documents: list[Document], packed: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(speaker)
    rows = PackedRows(str(packed), "eval")
    questions = [tokens[: _answers(labels)[0][0]] for tokens, labels in _first_documents(rows)]
    longest = model.config.max_position_embeddings
    continued = [_generate(model, tokens, min(scoring.MAX_TOKENS, longest - len(tokens))) for tokens in questions]
    [frequent] = Counter(token for answer in continued for token in set(answer)).most_common(1)
    seldom = next(token for token in range(model.config.vocab_size) if sum(token in a for a in continued) == 1)
    for token in (frequent[0], seldom):
        expected = sum(token in answer for answer in continued)
        assert scoring.count_stops(model, rows.read(0, len(rows)), [token]) == (scoring.QUESTIONS, expected)


def _first_documents(rows: PackedRows) -> list[Document]:
    batch = rows.read(0, len(rows))
    found = []
    for row in range(len(rows)):
        columns = [batch[name][row].tolist() for name in ("input_ids", "labels", "position_ids")]
        starts = [*(at for at, position in enumerate(columns[2]) if position == 0), SEQUENCE_LENGTH]
        found += [(columns[0][start:stop], columns[1][start:stop]) for start, stop in pairwise(starts)]
    return [document for document in found if _answers(document[1])][: scoring.QUESTIONS]


def test_the_loss_is_the_same_as_for_single_documents(stranger: Path, documents: list[Document], packed: Path) -> None:
    """Compare with transformers' loss on unpacked documents, for different batch sizes."""
    model = AutoModelForCausalLM.from_pretrained(stranger)
    loss, tokens = 0.0, 0
    for input_ids, labels in documents:
        count = sum(label != NOT_TRAINED for label in labels)
        with torch.no_grad():
            loss += model(torch.tensor([input_ids]), labels=torch.tensor([labels])).loss.item() * count
        tokens += count
    for batch_rows in (1, 3):
        scored = _score(str(stranger), packed, batch_rows)
        assert (scored.documents, scored.trained_tokens) == (DOCUMENT_COUNT, tokens)
        assert scored.loss / tokens == pytest.approx(loss / tokens, abs=1e-5)


def test_adapters_and_the_merged_model_have_the_loss_that_the_run_reported(
    run: Path, in_bucket: str, speaker: Path, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))  # an empty model cache, as on another node
    reported = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert candidates.find(f"{run}/adapter").model == in_bucket
    before, *after = (_score(str(folder), packed) for folder in (in_bucket, run / "adapter", run / "model"))
    assert before == _score(str(speaker), packed)
    for scored in after:
        loss = scored.loss / scored.trained_tokens
        assert loss == pytest.approx(reported["eval_loss"], abs=1e-5)
        assert math.exp(loss) == pytest.approx(reported["eval_perplexity"], rel=1e-5)
        assert abs(scored.loss - before.loss) > 1e-3


def exact_tokens(model: PreTrainedModel, batch: Batch, logits: torch.Tensor) -> tuple[float, float]:
    """Return how many trained tokens are the most likely ones, and how many tokens are trained."""
    labels = batch["labels"][:, 1:]
    trained = labels != NOT_TRAINED
    return float(((logits[:, :-1].argmax(-1) == labels) & trained).sum()), float(trained.sum())


def nothing(model: PreTrainedModel, batch: Batch, logits: torch.Tensor) -> tuple[float, float]:
    """Measure nothing."""
    return 0.0, 0.0


def wrong_result(model: PreTrainedModel, batch: Batch, logits: torch.Tensor) -> Any:
    """Return something else than a pair."""
    return 1.0


ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ([exact_tokens, exact_tokens], "two metrics in jobs/evaluate.py have the name exact tokens; rename one."),
        ([wrong_result], "the metric wrong_result returns 1.0; return a sum and a number of items."),
    ],
)
def test_bad_metrics_are_refused(
    metrics: list[Any],
    message: str,
    options: EvaluateOptions,
    speaker: Path,
    ray_session: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(evaluate, "METRICS", metrics)
    with pytest.raises(UserError, match=re.escape(message)):
        evaluate.main(options.model_copy(update={"models": (str(speaker),)}))


def test_models_are_compared_in_one_table(
    options: EvaluateOptions,
    speaker: Path,
    stranger: Path,
    packed: Path,
    ray_session: None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(evaluate, "METRICS", [exact_tokens, nothing])
    evaluate.main(options.model_copy(update={"models": (str(speaker), str(stranger)), "name": "both"}))
    saved = json.loads(Path(options.output, "both.json").read_text())
    assert (saved["documents"], saved["answers"]) == (DOCUMENT_COUNT, ANSWER_COUNT)
    assert [model["model"] for model in saved["models"]] == [str(speaker), str(stranger)]
    for model in saved["models"]:
        scored = _score(model["model"], packed)
        assert model["exact_match"] == scored.exact / ANSWER_COUNT
        assert model["perplexity"] == pytest.approx(math.exp(scored.loss / scored.trained_tokens), rel=1e-5)
        assert model["tokens_per_s"] > 0
    shown = capsys.readouterr().out
    right, strange = (model["own"]["exact tokens"] for model in saved["models"])
    assert right == pytest.approx(1 - WRONG_COUNT / _count_trained(packed))
    assert strange < right
    assert [model["own"]["nothing"] for model in saved["models"]] == [None, None]
    assert "exact tokens" in shown
    assert {f"{right:.4f}", f"({right - strange:+.4f})"} <= set(shown.split())
    share = f"{1 - WRONG_COUNT / ANSWER_COUNT:.1%}"
    assert f"{share} (+{share})" in shown
    assert f"the difference from {stranger}" in shown.replace("\n", "")


@pytest.mark.parametrize("loss", [800.0, math.nan, math.inf])
def test_a_loss_without_a_perplexity_is_shown_and_saved_as_valid_json(
    loss: float, options: EvaluateOptions, packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = dict.fromkeys(("documents", "answers", "trained_tokens", "exact", "generated", "stopped"), 1.0)
    sums = counts | {"loss": loss, "tokens": 1.0, "seconds": 1.0}
    results = [
        evaluation.from_sums(candidates.Candidate(name, name, None), sums | {"loss": value})
        for name, value in (("high", loss), ("low", 1.0))
    ]
    evaluation.print_table(results, counts)
    assert f"{loss:.4f}" in capsys.readouterr().out
    changed = options.model_copy(update={"output": str(tmp_path), "name": "high"})
    evaluation.save(results, counts, changed, read_manifest(str(packed)))
    saved = json.loads((tmp_path / "high.json").read_text(), parse_constant=lambda name: pytest.fail(f"{name} in JSON"))
    high, low = saved["models"]
    assert (high["loss"], high["perplexity"]) == (loss if math.isfinite(loss) else None, None)
    assert low["perplexity"] == pytest.approx(math.e)


# ------------------------------------------------------------------------------------------ errors


def test_run_and_checkpoint_folders_are_refused(run: Path) -> None:
    (checkpoint,) = run.glob("step-*")
    for folder, kind in ((checkpoint, "a checkpoint"), (run, "a run")):
        with pytest.raises(UserError, match=f"is the folder of {kind}; evaluate its model instead: {run}/model$"):
            candidates.find(f"{folder}/")


def test_another_tokenizer_is_refused_with_both_names(
    options: EvaluateOptions, speaker: Path, stranger: Path, tmp_path: Path
) -> None:
    other = packed_rows.write_other_tokenizer(stranger, tmp_path / "other")
    with pytest.raises(UserError, match=rf"tokenizer of {speaker}, .* differs from that of {other}"):
        evaluate.main(options.model_copy(update={"models": (str(speaker), str(other))}))


def test_adapters_without_all_weights_are_refused(run: Path, packed: Path, tmp_path: Path) -> None:
    adapter = shutil.copytree(run / "adapter", tmp_path / "adapter")
    weights = load_file(adapter / "adapter_model.safetensors")
    weights.pop(min(weights))
    save_file(weights, adapter / "adapter_model.safetensors")
    with pytest.raises(UserError, match="adapter cannot be used: its files lack base_model"):
        _score(str(adapter), packed)


def test_a_missing_model_is_refused(options: EvaluateOptions) -> None:
    with pytest.raises(UserError, match="cannot load the model nothing"):
        evaluate.main(options.model_copy(update={"models": ("nothing",)}))


def test_data_with_nothing_held_out_is_refused(options: EvaluateOptions, packed: Path, tmp_path: Path) -> None:
    manifest = json.loads((packed / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps(manifest | {"eval": {"files": [], "rows": 0}}))
    with pytest.raises(UserError, match="larger --eval-share"):
        evaluate.main(options.model_copy(update={"data": str(tmp_path)}))


def test_a_gpu_out_of_memory_gives_one_sentence(options: EvaluateOptions) -> None:
    full = RayTaskError("task", "traceback", torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(UserError, match=r"no room for 2 rows .* smaller --batch-rows"):
        raise evaluation.explain(full, options)
    other = RayTaskError("task", "traceback", ZeroDivisionError())
    assert evaluation.explain(other, options) is other


@pytest.mark.parametrize("profile", settings.PROFILES)
def test_both_profiles_hold_valid_options(profile: str) -> None:
    assert len(settings.load(EvaluateOptions, "evaluate", profile=profile).models) == 2  # after and before training


# ------------------------------------------------------------------------------------------ helpers


def _generate(model: PreTrainedModel, tokens: list[int], count: int) -> list[int]:
    """Return the `count` tokens with which transformers greedily continues these tokens."""
    prompt = torch.tensor([tokens])
    made = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=count)
    return made[0, len(tokens) :].tolist()


def _answers(labels: list[int]) -> list[tuple[int, int]]:
    """Return where each sequence of trained tokens begins and ends."""
    trained = [False, *(label != NOT_TRAINED for label in labels), False]
    edges = [at for at, (before, after) in enumerate(pairwise(trained)) if before != after]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _count_trained(packed: Path) -> int:
    """Return the number of held-out tokens that are trained. A first token of a row cannot be predicted."""
    rows = PackedRows(str(packed), "eval")
    return int((rows.read(0, len(rows))["labels"][:, 1:] != NOT_TRAINED).sum())


def _score(model: str, packed: Path, batch_rows: int = 2) -> Score:
    """Return the score of a model on all held-out rows, computed in this process."""
    candidate = candidates.find(model)
    candidates.check(candidate, str(packed), read_manifest(str(packed)))
    scorer = Scorer(candidate, str(packed), "cpu", "fp32", (), report=lambda **_: None)
    rows = read_manifest(str(packed)).eval.rows
    parts: list[dict[str, Any]] = [
        scorer({"first": first, "rows": min(batch_rows, rows - first)}) for first in range(0, rows, batch_rows)
    ]
    return Score(**{name: sum(part[name] for part in parts) for name in Score._fields})
