"""Test tokenization and packing: which tokens are trained, and that documents do not attend to each other."""

import json
import re
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from families import train_tokenizer
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from raymill.data.chat_template import CHATML, CHATML_TOKENS, ChatTemplate
from raymill.data.document_encoder import _count_until
from raymill.data.examples import BadRow, Conversation, to_json
from raymill.data.packing import pack
from raymill.data.row_formats import read_example
from raymill.data.tokenization import NOT_TRAINED, DocumentTokenizer, TokenizedDocument
from raymill.data.tokenizer import load_tokenizer, read_template, tokenizer_hash
from raymill.errors import UserError

UNMARKED = re.sub(r"\{%-? (end)?generation %\}", "", read_template(CHATML) or "")
SYSTEM = {"role": "system", "content": "Answer briefly."}
QUESTION = {"role": "user", "content": "What does ENOENT mean?"}
ANSWER = {"role": "assistant", "content": "No such file or directory"}
FOLLOW_UP = {"role": "user", "content": "And EPERM?"}
SECOND_ANSWER = {"role": "assistant", "content": "Operation not permitted"}


@pytest.fixture(scope="module")
def model_folder(assets: Path) -> str:
    return str(assets / "model")


@pytest.fixture(scope="module")
def chatml_folder(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a tokenizer that has ChatML's tokens, like those of Qwen's base models."""
    folder = tmp_path_factory.mktemp("chatml")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model_folder)
    tokenizer.add_special_tokens({"extra_special_tokens": list(CHATML_TOKENS)})
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def tokenize(model_folder: str) -> DocumentTokenizer:
    return DocumentTokenizer(model_folder, sequence_length=128)


@pytest.fixture(scope="module")
def documents(assets: Path, tokenize: DocumentTokenizer) -> pa.Table:
    lines = (assets / "data" / "pairs.jsonl").read_text(encoding="utf-8").splitlines()
    return tokenize(pa.Table.from_pylist([json.loads(line) for line in lines[:60]]))


def encode(tokenize: DocumentTokenizer, *messages: dict) -> TokenizedDocument:
    """Tokenize a conversation that gives exactly one document, and return that document."""
    [document] = tokenize.documents({"messages": list(messages)})
    return document


def table_of(lengths: list[int]) -> pa.Table:
    """Return documents of these lengths. All their tokens differ, and the odd ones are trained."""
    tokens = [list(range(start, stop)) for start, stop in pairwise(np.cumsum([0, *lengths]))]
    labels = [[token if token % 2 else NOT_TRAINED for token in document] for document in tokens]
    lists = pa.list_(pa.int32())
    return pa.table({"input_ids": pa.array(tokens, lists), "labels": pa.array(labels, lists)})


def unpack(packed: pa.Table, pad_id: int) -> list[tuple[list[int], list[int]]]:
    """Split packed rows where position_ids restart. Return the documents (tokens and labels) without padding."""
    found = []
    for row in packed.to_pylist():
        starts = [index for index, position in enumerate(row["position_ids"]) if position == 0]
        for start, stop in zip(starts, [*starts[1:], None], strict=True):
            tokens = row["input_ids"][start:stop]
            if set(tokens) != {pad_id}:
                found.append((tokens, row["labels"][start:stop]))
    return found


# ---------------------------------------------------------------- packing


def test_unpacking_restores_every_document() -> None:
    lengths = np.random.default_rng(0).integers(1, 65, 500).tolist()
    documents = table_of(lengths)
    packed = pack(documents, 64, pad_id=-1)
    expected = list(zip(documents["input_ids"].to_pylist(), documents["labels"].to_pylist(), strict=True))
    assert sorted(unpack(packed, pad_id=-1)) == sorted(expected)


def test_rows_have_one_length_and_type() -> None:
    packed = pack(table_of([3, 5, 2]), 8, pad_id=-1)
    assert packed.schema == pa.schema(
        [(name, pa.list_(pa.int32(), 8)) for name in ("input_ids", "labels", "position_ids")]
    )


def test_padding_is_not_trained_and_counts_from_zero() -> None:
    (row,) = pack(table_of([3, 2]), 8, pad_id=-1).to_pylist()
    assert row["input_ids"] == [0, 1, 2, 3, 4, -1, -1, -1]
    assert row["labels"] == [-100, 1, -100, 3, -100, -100, -100, -100]
    assert row["position_ids"] == [0, 1, 2, 0, 1, 0, 1, 2]


def test_rows_have_little_padding() -> None:
    lengths = np.random.default_rng(1).integers(5, 400, 3000).tolist()
    rows = len(pack(table_of(lengths), 512, pad_id=-1))
    assert sum(lengths) / (rows * 512) > 0.97


def test_no_documents_give_no_rows() -> None:
    assert len(pack(table_of([]), 8, pad_id=-1)) == 0
    assert len(pack(table_of([0, 0]), 8, pad_id=-1)) == 0


@pytest.mark.parametrize("restart", [True, False], ids=["packed", "control: positions that do not restart"])
def test_documents_do_not_attend_to_each_other(documents: pa.Table, model_folder: str, restart: bool) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    worst = 0.0
    for row in pack(documents, 128, pad_id=0).slice(0, 4).to_pylist():
        tokens, positions = torch.tensor([row["input_ids"]]), torch.tensor([row["position_ids"]])
        starts = [*(positions[0] == 0).nonzero().flatten().tolist(), 128]
        given = positions if restart else torch.arange(128)[None]
        with torch.no_grad():
            together = model(input_ids=tokens, position_ids=given, use_cache=False).logits[0]
            for start, stop in pairwise(starts):
                alone = model(input_ids=tokens[:, start:stop], use_cache=False).logits[0]
                worst = max(worst, (together[start:stop] - alone).abs().max().item())
    assert worst < 1e-5 if restart else worst > 1e-3


# ---------------------------------------------------------------- masks


@pytest.mark.parametrize("template", [None, CHATML], ids=["the model's template", "chatml"])
def test_exactly_what_the_assistant_says_is_trained(chatml_folder: str, template: str | None) -> None:
    tokenize = DocumentTokenizer(chatml_folder, 256, read_template(template))
    document = encode(tokenize, SYSTEM, QUESTION, ANSWER, FOLLOW_UP, SECOND_ANSWER)
    end = "<|im_end|>" if template else "<|eos|>"
    trained = [label for label in document.labels.tolist() if label != NOT_TRAINED]
    assert tokenize.tokenizer.decode(trained) == f"{ANSWER['content']}{end}{SECOND_ANSWER['content']}{end}"
    assert all(label in (token, NOT_TRAINED) for token, label in zip(*document[:2], strict=True))


@pytest.mark.parametrize("template", [None, CHATML], ids=["the model's template", "chatml"])
def test_tokens_and_masks_are_those_of_transformers(assets: Path, chatml_folder: str, template: str | None) -> None:
    tokenize = DocumentTokenizer(chatml_folder, 10_000, read_template(template))
    lines = (assets / "data" / "pairs.jsonl").read_text(encoding="utf-8").splitlines()[:200]
    two_turns = [SYSTEM, QUESTION, ANSWER, FOLLOW_UP, SECOND_ANSWER]
    for messages in (two_turns, *(json.loads(line)["messages"] for line in lines)):
        theirs = tokenize.tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        ours = encode(tokenize, *messages)
        assert ours.input_ids.tolist() == theirs["input_ids"]
        assert (ours.labels != NOT_TRAINED).tolist() == [bool(mark) for mark in theirs["assistant_masks"]]


def test_chatml_renders_qwens_format(model_folder: str) -> None:
    tokenizer = load_tokenizer(model_folder, read_template(CHATML))
    whole = tokenizer.apply_chat_template([SYSTEM, QUESTION, ANSWER], tokenize=False)
    prompt = tokenizer.apply_chat_template([SYSTEM, QUESTION], tokenize=False, add_generation_prompt=True)
    assert whole == (
        "<|im_start|>system\nAnswer briefly.<|im_end|>\n"
        "<|im_start|>user\nWhat does ENOENT mean?<|im_end|>\n"
        "<|im_start|>assistant\nNo such file or directory<|im_end|>\n"
    )
    assert prompt == whole.removesuffix("No such file or directory<|im_end|>\n")


def test_long_conversations_are_cut_at_the_end(model_folder: str, tokenize: DocumentTokenizer) -> None:
    whole = encode(tokenize, QUESTION, ANSWER)
    cut = encode(DocumentTokenizer(model_folder, len(whole.input_ids) - 2), QUESTION, ANSWER)
    assert not whole.cut
    assert cut.input_ids.tolist() == whole.input_ids[:-2].tolist()
    assert cut.labels.tolist() == whole.labels[:-2].tolist()
    assert cut.cut
    with pytest.raises(BadRow, match="no trained token within sequence_length"):
        encode(DocumentTokenizer(model_folder, 4), QUESTION, ANSWER)


def test_instruction_and_response_are_a_conversation() -> None:
    row = {"instruction": QUESTION["content"], "response": ANSWER["content"]}
    assert read_example(row) == read_example({"messages": [QUESTION, ANSWER]}) == Conversation([QUESTION, ANSWER])


def test_json_is_the_same_for_parquet_and_jsonl() -> None:
    parquet_messages = [{"content": "é", "name": None, "role": "user"}, ANSWER | {"name": None}]
    jsonl_messages = [*json.loads('[{"role": "user", "content": "\\u00e9"}]'), ANSWER]
    assert to_json(read_example({"messages": parquet_messages})) == to_json(Conversation(jsonl_messages))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"note": "hello"}, "no known columns"),
        ({"instruction": "Say hello.", "response": None}, "no known columns"),
        ({"messages": "hello"}, "messages is text but not valid JSON"),
        ({"messages": ["hello"]}, "messages is a list with text, not a list of objects"),
        ({"messages": []}, "no assistant turn"),
        ({"messages": [QUESTION]}, "no assistant turn"),
        ({"messages": [QUESTION, {"role": "assistant", "content": " \n"}]}, "an empty assistant turn"),
        ({"messages": [QUESTION, {"role": "oracle", "content": "42"}]}, "a message with an unknown role"),
        ({"messages": [QUESTION, {"role": "assistant", "content": 42}]}, "a message with content that is not text"),
        ({"instruction": 1, "response": "one"}, "a message with content that is not text"),
    ],
)
def test_bad_rows_have_a_reason(tokenize: DocumentTokenizer, row: dict, reason: str) -> None:
    with pytest.raises(BadRow, match=reason):
        tokenize.documents(row)


def test_half_a_surrogate_pair_is_a_bad_row() -> None:
    with pytest.raises(BadRow, match="not valid Unicode"):
        to_json(Conversation([{"role": "assistant", "content": "\ud800"}]))


def test_a_row_that_the_template_refuses_is_a_bad_row(chatml_folder: str) -> None:
    strict = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system message') }}{% endif %}"
    tokenize = DocumentTokenizer(chatml_folder, 128, f"{strict}{read_template(CHATML)}")
    table = tokenize(pa.Table.from_pylist([{"messages": [SYSTEM, QUESTION, ANSWER]}, {"messages": [QUESTION, ANSWER]}]))
    assert table["problem"].to_pylist() == ["the chat template does not render a system message", None]
    assert table["input_ids"][0].as_py() == []


@pytest.mark.parametrize("overlong", ["drop", "error"])
def test_overlong_conversations_are_dropped_or_raise_an_error(model_folder: str, overlong: Any) -> None:
    tokenize = DocumentTokenizer(model_folder, 8, overlong=overlong)
    expected = (BadRow, "longer than sequence_length") if overlong == "drop" else (UserError, "--overlong trunc")
    with pytest.raises(expected[0], match=expected[1]):
        encode(tokenize, QUESTION, ANSWER)


def test_texts_and_completions_are_trained_but_prompts_are_not(tokenize: DocumentTokenizer) -> None:
    [text] = tokenize.documents({"text": "No such file"})
    assert tokenize.tokenizer.decode(text.input_ids.tolist()) == "No such file<|eos|>", (
        "the tokenizer adds no BOS token"
    )
    assert text.labels[1:].tolist() == text.input_ids[1:].tolist()
    [pair] = tokenize.documents({"prompt": "ENOENT: ", "completion": "No such file"})
    trained = [label for label in pair.labels.tolist() if label != NOT_TRAINED]
    assert tokenize.tokenizer.decode(trained) == "No such file<|eos|>"


def test_text_needs_no_chat_template(model_folder: str, tmp_path: Path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model_folder)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    assert len(DocumentTokenizer(str(tmp_path), 128).documents({"text": "No such file"})) == 1


def test_a_span_that_ends_in_a_decomposed_character_ends_at_its_token() -> None:
    """NFC joins e and its accent into one character, so no separate token belongs to the accent."""
    bpe = Tokenizer(models.WordLevel({"c": 0, "af\u00e9": 1, "[UNK]": 2}, unk_token="[UNK]"))
    bpe.normalizer, bpe.pre_tokenizer = normalizers.NFC(), pre_tokenizers.WhitespaceSplit()
    assert _count_until(6, bpe.encode("c afe\u0301 c c"), 9) == 2


# ---------------------------------------------------------------- tokenizers and templates


def test_a_template_that_never_ends_a_turn_is_refused(chatml_folder: str) -> None:
    with pytest.raises(UserError, match=r"would never stop: .*; set chat_template in \[preprocess\] to raymill/"):
        DocumentTokenizer(chatml_folder, 128, "{% for message in messages %}{{ message['content'] }}{% endfor %}")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for %}", "it fails in line 1 with TemplateSyntaxError"),
        ("{{ raise_exception('no\nway') }}", "it says 'no'"),
        ("{{ 1 // 0 }}", "it fails in line 1 with ZeroDivisionError"),
        ("\n\n{{ range(10 ** 9) }}", "it fails in line 3 with OverflowError"),
        ("{{ 'a' * 10 ** 18 }}", "it fails in line 1 with MemoryError"),
        ("{{ [].pop() }}", "it fails in line 1 with (SecurityError|IndexError)"),
        ("{{ cycler() }}", "it fails in line 1 with RuntimeError"),
        ("{% macro a() %}\n{{ a() }}{% endmacro %}{{ a() }}", "it fails in line 2 with RecursionError"),
        ("{{ messages[0].role.nothing.here }}", "it fails in line 1 with UndefinedError"),
    ],
)
def test_a_broken_template_is_refused(model_folder: str, template: str, reason: str) -> None:
    with pytest.raises(UserError, match=rf"cannot be used \({reason}\); correct chat_template"):
        DocumentTokenizer(model_folder, 128, template)


@pytest.mark.parametrize(
    ("condition", "call", "reason"),
    [
        ("messages | length > 3", "1 // 0", "it fails in line 1 with ZeroDivisionError"),
        ("messages | length > 3", "messages[9].content", "it fails in line 1 with UndefinedError"),
        ("messages | length > 3", "raise_exception('Only one turn.')", "it says 'Only one turn.'"),
        ("not messages", "messages[0].content", "it renders no prompt for an assistant turn without earlier messages"),
    ],
)
def test_a_row_at_which_a_template_fails_is_a_bad_row(
    chatml_folder: str, condition: str, call: str, reason: str
) -> None:
    template = f"{{% if {condition} %}}{{{{ {call} }}}}{{% endif %}}{UNMARKED}"
    tokenize = DocumentTokenizer(chatml_folder, 128, template)
    assert encode(tokenize, QUESTION, ANSWER)
    with pytest.raises(BadRow, match=f"^the chat template cannot render the messages: {re.escape(reason)}$"):
        encode(tokenize, *([ANSWER] if condition == "not messages" else []), QUESTION, ANSWER, FOLLOW_UP, SECOND_ANSWER)


def test_an_untrained_turn_may_come_first(chatml_folder: str) -> None:
    template = "{% if not messages %}{{ messages[0].content }}{% endif %}"
    tokenize = DocumentTokenizer(chatml_folder, 128, template + UNMARKED)
    document = encode(tokenize, ANSWER | {"weight": 0}, QUESTION, SECOND_ANSWER, FOLLOW_UP, ANSWER | {"weight": 0})
    trained = [label for label in document.labels.tolist() if label != NOT_TRAINED]
    assert tokenize.tokenizer.decode(trained) == f"{SECOND_ANSWER['content']}<|im_end|>"
    assert document.labels[-1] != NOT_TRAINED, "text after the last trained turn teaches nothing"


MARKED = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}<think>\n\n</think>{% endgeneration %}"
    "{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}{% else %}{{ message.content }}<|im_end|>"
    "{% endif %}\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


def test_a_marked_turn_is_tokenized_apart_from_its_prompt(tmp_path: Path) -> None:
    """The mark includes the end of the prompt, and its second line break belongs to the model."""
    merging = train_tokenizer([QUESTION["content"], ANSWER["content"]])
    merging.add_tokens([*CHATML_TOKENS, "<think>", "</think>"], special_tokens=True)
    merging.save_pretrained(tmp_path)
    tokenize = DocumentTokenizer(str(tmp_path), 128, MARKED)
    document = encode(tokenize, QUESTION, ANSWER)
    prompt = merging.apply_chat_template(
        [QUESTION], chat_template=MARKED, add_generation_prompt=True, return_dict=False
    )
    assert len(merging.encode("\n\n")) == 1, "control"
    assert document.input_ids[: len(prompt)].tolist() == prompt
    trained = document.labels[document.labels != NOT_TRAINED].tolist()
    assert merging.decode(trained) == f"<think>\n\n</think>{ANSWER['content']}<|im_end|>"


def test_a_model_without_a_template_is_refused(model_folder: str, tmp_path: Path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model_folder)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="has no chat template; set chat_template"):
        encode(DocumentTokenizer(str(tmp_path), 128), QUESTION, ANSWER)


def test_mistrals_own_tokenizer_file_is_not_used(model_folder: str, tmp_path: Path) -> None:
    """With tekken.json, transformers would use mistral-common's class, which has no offsets and no chat template."""
    mistral_common = pytest.importorskip("mistral_common", reason="vLLM installs it, on Linux")
    shutil.copytree(model_folder, tmp_path / "model")
    tekken = Path(mistral_common.__file__).parent / "data" / "tekken_240718.json"
    (tmp_path / "model" / "tekken.json").symlink_to(tekken)
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "mistral"}))
    assert len(DocumentTokenizer(str(tmp_path / "model"), 128).documents({"messages": [QUESTION, ANSWER]})) == 1


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be loaded"):
        load_tokenizer(str(tmp_path))


def test_chatml_is_refused_if_the_tokenizer_lacks_its_tokens(model_folder: str) -> None:
    with pytest.raises(UserError, match="would never stop"):
        DocumentTokenizer(model_folder, 128, read_template(CHATML))


def test_a_base_model_learns_to_stop_at_the_end_of_chatml_turns(chatml_folder: str) -> None:
    tokenize = DocumentTokenizer(chatml_folder, 128, read_template(CHATML))
    ids = tokenize.tokenizer.convert_tokens_to_ids
    assert tokenize.eos_ids == sorted([ids("<|eos|>"), ids("<|im_end|>")])


def test_another_models_template_must_exist(model_folder: str, tmp_path: Path) -> None:
    assert read_template(model_folder) == load_tokenizer(model_folder).chat_template
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model_folder)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="has no chat template; correct chat_template"):
        read_template(str(tmp_path))
    # the error keeps the reason, because a gated model, a missing network and a typo need different remedies
    with pytest.raises(UserError, match=r"the tokenizer of acme/nothing cannot be loaded \(.+\); set chat_template to"):
        read_template("acme/nothing")


def test_a_stop_id_may_be_missing_from_the_tokenizer(model_folder: str) -> None:
    tokenizer = load_tokenizer(model_folder)
    template = ChatTemplate(tokenizer, [tokenizer.eos_token_id, 1_000_000])
    assert template.eos_ids == [tokenizer.eos_token_id, 1_000_000]


def test_arguments_nested_too_deeply_are_rejected(chatml_folder: str) -> None:
    nested: dict[str, Any] = {}
    for _ in range(900):
        nested = {"a": nested}
    call = {"function": {"name": "f", "arguments": nested}}
    row = {"messages": [QUESTION, {"role": "assistant", "tool_calls": [call]}]}
    template = "{{ messages | tojson }}" + (read_template(CHATML) or "")
    with pytest.raises(BadRow):
        DocumentTokenizer(chatml_folder, 128, template).documents(row)


def test_a_missing_template_is_refused() -> None:
    with pytest.raises(UserError, match=r"missing\.jinja cannot be read"):
        read_template("missing.jinja")


def test_the_tokenizer_hash_changes_only_with_the_tokens(model_folder: str) -> None:
    tokenizer = load_tokenizer(model_folder)
    before = tokenizer_hash(tokenizer)
    tokenizer(["a", "longer text"], padding=True, truncation=True, max_length=2)
    assert tokenizer_hash(tokenizer) == before == tokenizer_hash(load_tokenizer(model_folder, read_template(CHATML)))
    tokenizer.add_tokens(["<|new|>"])
    assert tokenizer_hash(tokenizer) != before
