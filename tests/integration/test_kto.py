"""Test KTO: its rows, its loss and gradient against a plain formula, each strategy, and a resumed run."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import packed_rows
import preprocess_job
import pytest
import torch
from preference_runs import EXACT, WAYS, Row, alone, options_of, plain_adamw, plain_logps, settings_of, spread
from preprocess_job import manifest, write_rows
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from jobs import preprocess
from raymill import settings
from raymill.data import row_formats
from raymill.data.examples import BadRow, Completion, Conversation, Rated, from_json, to_json
from raymill.data.filters import texts
from raymill.data.row_formats import RATED_FORMATS, read_example
from raymill.data.tokenization import NOT_TRAINED
from raymill.errors import UserError
from raymill.evaluation import scoring
from raymill.training import kto, preflight
from raymill.training.dataset import PackedRows, read_manifest
from raymill.training.options import DDPOptions

WEIGHTS = {"beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.7}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text} | more


# ---------------------------------------------------------------- rows


HI = [user("Hi?"), answer("Yes")]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "Q: ", "completion": "a", "label": True}, Rated(Completion("Q: ", "a"), True)),
        ({"prompt": "Q: ", "completion": "a", "label": 0}, Rated(Completion("Q: ", "a"), False)),
        ({"prompt": "Q: ", "completion": "a", "label": "False"}, Rated(Completion("Q: ", "a"), False)),
        ({"prompt": "Q: ", "completion": "a", "label": 1.0}, Rated(Completion("Q: ", "a"), True)),
        ({"prompt": HI[:1], "completion": HI[1:], "label": True}, Rated(Conversation(HI), True)),
        ({"prompt": json.dumps(HI[:1]), "completion": "Yes", "label": 1}, Rated(Conversation(HI), True)),
        ({"prompt": '[{"a": 1}]', "completion": "Yes", "label": 1}, Rated(Completion('[{"a": 1}]', "Yes"), True)),
        ({"messages": HI, "label": False, "system": ""}, Rated(Conversation(HI), False)),
        (
            {"messages": [*HI, user("Why?"), answer("So.")], "label": False},
            Rated(Conversation([HI[0], answer("Yes", weight=0), user("Why?"), answer("So.")]), False),
        ),
        (  # LLaMA-Factory's form
            {
                "conversations": [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Yes"}],
                "kto_tag": True,
            },
            Rated(Conversation(HI), True),
        ),
        ({"instruction": "Hi?", "output": "Yes", "label": False}, Rated(Conversation(HI), False)),
    ],
)
def test_published_ratings_are_read(row: dict[str, Any], expected: Rated) -> None:
    rated = read_example(row, RATED_FORMATS)
    assert rated == expected
    assert from_json(to_json(rated)) == rated
    assert from_json(to_json(texts.replace(rated, str))) == rated


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": "x", "completion": "a", "label": 3}, "a label that is neither true nor false"),
        ({"prompt": "x", "completion": "a", "label": 0.5}, "a label that is neither true nor false"),
        ({"prompt": "x", "completion": "a", "label": "good"}, "a label that is neither true nor false"),
        ({"prompt": "x", "completion": "a", "label": None}, "no known columns"),
        ({"prompt": "x", "completion": " ", "label": True}, "the text is empty"),
        ({"messages": [user("a")], "label": True}, "no assistant turn"),
        ({"text": "a", "label": True}, "no known columns"),
    ],
)
def test_what_is_not_rated_is_a_bad_row(row: dict[str, Any], problem: str) -> None:
    with pytest.raises(BadRow, match=problem):
        read_example(row, RATED_FORMATS)


def test_the_job_decides_whether_a_label_counts() -> None:
    row = {"messages": HI, "label": 3}  # such as a class
    assert isinstance(read_example(row), Conversation)
    formats = row_formats.for_task("unpaired_preference", row_formats.FORMATS)
    assert isinstance(read_example(row | {"label": 1}, formats), Rated)
    with pytest.raises(BadRow, match=r"a rated answer \(label\), which needs --task unpaired_preference"):
        read_example({"prompt": "a", "completion": "b", "label": True})


@pytest.fixture(scope="module")
def changes(assets: Path, tmp_path_factory: pytest.TempPathFactory, ray_session: None) -> dict[str, Any]:
    """Return changes to the settings of the local profile, with packed answers of which two thirds are good."""
    folder, model = tmp_path_factory.mktemp("rated"), tmp_path_factory.mktemp("model")
    packed_rows.write_model(model, assets, num_hidden_layers=2)
    rows = [
        {
            "prompt": [user(f"What is number {n}?")],
            "completion": [answer(f"It is {n}. " + "Sure. " * (n % 5) if n % 3 else "No idea. " * (1 + n % 4))],
            "label": bool(n % 3),
        }
        for n in range(300)
    ]
    made = {"input": str(write_rows(folder / "rows.jsonl", rows)), "model": str(model), "task": "unpaired_preference"}
    preprocess.main(preprocess_job.options(assets, folder, **made, eval_share=0.1, shard_mib=0.01))
    output = tmp_path_factory.mktemp("runs")
    return settings_of(model, folder / "packed", output, objective="kto", global_batch_rows=6, **WEIGHTS)


def test_preprocess_packs_labels(changes: dict[str, Any]) -> None:
    made = manifest(Path(changes["data"]).parent)
    counts = [made[part] for part in ("train", "eval")]
    assert sum(one["documents"] for one in counts) == 300
    assert sum(one["good_documents"] for one in counts) == 200
    assert counts[1]["documents"] > counts[1]["good_documents"] > 0
    tokenizer = AutoTokenizer.from_pretrained(changes["model"])
    batch = PackedRows(changes["data"], "train").read(0, 8)
    seen = 0
    for row, good in zip(rows_of(batch), kto.is_good(batch), strict=True):
        for (prompt, text), is_good in zip(row, good, strict=False):
            number = int(tokenizer.decode(prompt).split("What is number ")[1].split("?")[0])
            assert bool(is_good) == bool(number % 3)
            assert tokenizer.decode(text).startswith(f"It is {number}." if is_good else "No idea.")
            seen += 1
    assert seen > 20


# ---------------------------------------------------------------- formula


Document = tuple[list[int], list[int]]


def rows_of(batch: dict[str, Tensor]) -> list[list[Document]]:
    """Return the prompt and the answer of each document of each row."""
    found = []
    columns = (batch[name].tolist() for name in ("input_ids", "labels", "position_ids"))
    for ids, labels, positions in zip(*columns, strict=True):
        starts = [*(at for at, position in enumerate(positions) if position == 0), len(ids)]
        row = []
        for start, stop in pairwise(starts):
            first = next((at for at in range(start, stop) if labels[at] != NOT_TRAINED), None)
            if first is not None:
                row.append(
                    (ids[start:first], ids[first:stop], [labels[at] != NOT_TRAINED for at in range(first, stop)])
                )
        found.append([(prompt, text) for prompt, text, _ in row])
        assert all(trained[0] for _, _, trained in row)
    return found


def logp(model: PreTrainedModel, prompt: list[int], text: list[int], trained: int) -> Tensor:
    """Return the log-probability of the first `trained` tokens of an answer, without packing."""
    logps = model(torch.tensor([prompt + text])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return logps.gather(1, torch.tensor(text)[:, None]).squeeze(1)[:trained].sum()


def trained_tokens(text: list[int], end: int) -> int:
    """Return the number of trained tokens: all up to the end of the turn."""
    return text.index(end) + 1


def plain_kto(
    model: PreTrainedModel, base: PreTrainedModel, batch: dict[str, Tensor], end: int
) -> dict[str, Tensor | float]:
    """Return the loss as the paper writes it, and what goes into it."""
    mismatched, ratios, labels, own = [], [], [], []
    for row, good in zip(rows_of(batch), kto.is_good(batch).tolist(), strict=True):
        for number, (prompt, text) in enumerate(row):
            _, other = row[(number + 1) % len(row)]
            with torch.no_grad():
                if len(row) > 1:
                    size = trained_tokens(other, end)
                    mismatched.append(logp(model, prompt, other, size) - logp(base, prompt, other, size))
                before = logp(base, prompt, text, trained_tokens(text, end))
            own.append(logp(model, prompt, text, trained_tokens(text, end)))
            ratios.append(own[-1] - before)
            labels.append(good[number])
    kl = torch.stack(mismatched).mean().clamp(min=0)
    beta = WEIGHTS["beta"]
    losses = [
        WEIGHTS["desirable_weight"] * (1 - torch.sigmoid(beta * (ratio - kl)))
        if good
        else WEIGHTS["undesirable_weight"] * (1 - torch.sigmoid(beta * (kl - ratio)))
        for ratio, good in zip(ratios, labels, strict=True)
    ]
    chosen = [float(beta * ratio) for ratio, good in zip(ratios, labels, strict=True) if good]
    return {"loss": torch.stack(losses).mean(), "kl": float(kl), "chosen": sum(chosen) / len(chosen)}


def test_loss_and_gradient_are_those_of_the_formula(changes: dict[str, Any]) -> None:
    """In the first step, the model is its own reference; in later ones it has moved away from it."""
    own = changes | {"name": "formula", "steps": 3, "max_grad_norm": 1e9, "learning_rate": 5e-3}
    rows = alone(own)
    base, model = (AutoModelForCausalLM.from_pretrained(changes["model"]) for _ in range(2))
    end = AutoTokenizer.from_pretrained(changes["model"]).eos_token_id
    optimizer = plain_adamw(model)
    seed = settings.load(DDPOptions, "train", profile="local").seed
    for step in (1, 2, 3):
        batch = PackedRows(changes["data"], "train", seed).read(6 * (step - 1), 6)
        found = plain_kto(model, base, batch, end)
        optimizer.zero_grad()
        assert isinstance(found["loss"], Tensor)
        found["loss"].backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        row = next(one for one in rows if one["step"] == step)
        assert row["loss"] == pytest.approx(found["loss"].item(), abs=1e-5)
        assert row["grad_norm"] == pytest.approx(norm.item(), rel=1e-3)
        assert row["kl"] == pytest.approx(found["kl"], abs=1e-4)
        assert row["rewards/chosen"] == pytest.approx(found["chosen"], abs=1e-4)
        for group in optimizer.param_groups:
            group["lr"] = row["lr"]
        optimizer.step()
    assert rows[3]["kl"] > 0.01, "otherwise the test says nothing about it"
    with torch.no_grad():
        held_out = PackedRows(changes["data"], "eval")
        found = plain_kto(model, base, held_out.read(0, len(held_out)), end)
    assert rows[-1]["eval_kl"] == pytest.approx(found["kl"], abs=1e-4)
    assert rows[-1]["eval_loss"] == pytest.approx(float(found["loss"]), abs=1e-5)


# ---------------------------------------------------------------- strategies, a second start


@pytest.fixture(scope="module")
def kto_alone(changes: dict[str, Any]) -> list[Row]:
    return alone(changes | {"name": "alone"})


@pytest.mark.parametrize(
    "way", ["fsdp", *(pytest.param(way, marks=pytest.mark.nightly) for way in WAYS if way != "fsdp")]
)
def test_two_ranks_agree_with_one_process_and_resume(way: str, kto_alone: list[Row], changes: dict[str, Any]) -> None:
    """The baseline is a mean over the global batch, so neither ranks nor micro-batches matter."""
    for stop in (4, None):
        rows = spread(changes | {"name": way, "stop_after": stop, "micro_batch_rows": 1}, way)
    for name in ("loss", "kl", "rewards/margins", "eval_loss", "eval_kl"):
        assert [row.get(name) for row in rows] == pytest.approx([row.get(name) for row in kto_alone], abs=EXACT), name
    assert kto_alone[-1]["eval_rewards/margins"] > 0.5
    assert kto_alone[-1]["eval_loss"] < kto_alone[0]["eval_loss"] - 0.05


@pytest.mark.parametrize("lora_rank", [4, pytest.param(0, marks=pytest.mark.nightly)])
def test_resumes_bit_for_bit(lora_rank: int, changes: dict[str, Any]) -> None:
    own = changes | {"lora_rank": lora_rank, "learning_rate": 1e-2 if lora_rank else 1e-3}
    for stop in (4, None):
        rows = alone(own | {"name": f"parts-{lora_rank}", "stop_after": stop})
    whole = alone(own | {"name": f"whole-{lora_rank}"})
    assert [row.get("loss") for row in rows] == [row.get("loss") for row in whole]
    assert rows[-1]["rewards/margins"] > 0.1


def test_rows_with_a_single_answer_are_refused(
    assets: Path, tmp_path: Path, changes: dict[str, Any], ray_session: None
) -> None:
    rows = [
        {"prompt": f"Question {n}: " + "and " * 30, "completion": "so" * 5, "label": bool(n % 2)} for n in range(20)
    ]
    made = {"input": str(write_rows(tmp_path / "rows.jsonl", rows)), "model": changes["model"]}
    preprocess.main(
        preprocess_job.options(assets, tmp_path, **made, task="unpaired_preference", sequence_length=64, eval_share=0)
    )
    with pytest.raises(UserError, match=r"100% of the rows of .* hold a single answer, but kto compares each answer"):
        alone(changes | {"name": "single", "data": str(tmp_path / "packed")})


def test_answers_out_of_balance_are_noted(changes: dict[str, Any]) -> None:
    made = read_manifest(changes["data"])
    good, bad = made.train.good_documents, made.train.documents
    assert good
    bad -= good
    balanced = {"desirable_weight": 1.15 * bad / good, "undesirable_weight": 1.0}
    assert preflight.balance_note(options_of(changes | balanced), made) == ""
    note = preflight.balance_note(options_of(changes | {"desirable_weight": 1.0, "undesirable_weight": 1.0}), made)
    assert f"{good} good and {bad} bad answers, whose weights in the loss are {good / bad:.2f} to 1" in note
    assert f"--desirable-weight {balanced['desirable_weight']:.2f}" in note
    supervised = {"objective": "supervised", "desirable_weight": 1.0, "undesirable_weight": 1.0}
    assert preflight.balance_note(options_of(changes | supervised), made) == ""


def test_a_batch_without_bad_answers_has_no_metric_of_them(changes: dict[str, Any]) -> None:
    objective = kto.KTO(options_of(changes))
    batch = PackedRows(changes["data"], "train").read(0, 2)
    batch["is_good"] = torch.ones_like(batch["is_good"])
    counts = objective.counts(batch)
    assert int(counts[2]) == 0
    named = objective.named((torch.ones(6) / counts * (counts > 0)).tolist())
    assert named.keys() == {"loss", "rewards/chosen", "logps/chosen", "kl"}


def test_evaluate_compares_the_log_probabilities_of_good_and_bad_answers(changes: dict[str, Any]) -> None:
    model = AutoModelForCausalLM.from_pretrained(changes["model"])
    batch = PackedRows(changes["data"], "train").read(0, 4)
    with torch.no_grad():
        logps, tokens = plain_logps(model, batch)
    good = torch.cat([row[: len(docs)] for row, docs in zip(kto.is_good(batch), rows_of(batch), strict=True)])
    metrics = scoring.METRICS_OF_TASK["unpaired_preference"]
    counts, found = scoring.score(model, batch, metrics, "unpaired_preference")
    assert counts.loss == pytest.approx(-float(logps[good].sum()), rel=1e-5), "the loss is that of good answers"
    assert counts.trained_tokens == int(tokens[good].sum())
    for metric, these in zip(metrics, (good, ~good), strict=True):
        total, items = found[scoring.name_of(metric)]
        assert (total, items) == (pytest.approx(float(logps[these].sum()), rel=1e-5), int(tokens[these].sum()))
