"""Test that models which have only a SentencePiece model, and no tokenizer.json, get SentencePiece's own tokens."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import sentencepiece
from transformers import LlamaConfig

from raymill.data.tokenization import DocumentTokenizer
from raymill.data.tokenizer import load_tokenizer, tokenizer_hash

AS_LLAMA = {
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "split_digits": True,
    "byte_fallback": True,
    "allow_whitespace_only_pieces": True,
}
KINDS: dict[str, dict[str, Any]] = {
    "LlamaTokenizer": {"model_type": "bpe", **AS_LLAMA},
    "GemmaTokenizer": {"model_type": "bpe", "add_dummy_prefix": False, **AS_LLAMA},
    "T5Tokenizer": {"model_type": "unigram", "pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1},
}
"""The tokenizer class of a model, and how its SentencePiece model is trained."""
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}"
    "{{ eos_token }}{% endif %}{% endfor %}"
)
TEXTS = ["Who wrote this?", "a", "", "1234567890", "Grüße, 世界 🙂", "two  spaces, \ttabs\nand lines\n\n"]
"""No text begins with a space, because transformers' Llama then adds no second space, unlike SentencePiece."""


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, assets: Path) -> Path:
    """Return a folder with a configuration, and with a SentencePiece model of the demo's sentences."""
    folder = tmp_path_factory.mktemp(request.param)
    sentencepiece.SentencePieceTrainer.train(
        input=str(assets / "data/pairs.jsonl"),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=400,
        minloglevel=2,
        **KINDS[request.param],
    )
    if request.param == "T5Tokenizer":
        (folder / "tokenizer.model").rename(folder / "spiece.model")
    LlamaConfig(vocab_size=400).save_pretrained(folder)
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    configuration = {"tokenizer_class": request.param, **special, "add_bos_token": True, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(configuration))
    return folder


def _reference(model: Path) -> sentencepiece.SentencePieceProcessor:
    [file] = model.glob("*.model")
    return sentencepiece.SentencePieceProcessor(model_file=str(file))


def test_the_tokens_are_those_of_sentencepiece(model: Path) -> None:
    tokenizer, reference = load_tokenizer(str(model)), _reference(model)
    tokens = {text: tokenizer.encode(text, add_special_tokens=False) for text in TEXTS}
    assert tokens == {text: reference.encode(text) for text in TEXTS}


def test_a_text_begins_with_the_bos_token_and_a_conversation_is_trained(model: Path) -> None:
    tokenizer, reference = load_tokenizer(str(model)), _reference(model)
    if model.name.startswith("T5"):  # has no BOS
        return
    assert tokenizer.encode("Who wrote this?") == [reference.bos_id(), *reference.encode("Who wrote this?")]
    row = {"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Ada."}]}
    table = pa.Table.from_pylist([{"row": json.dumps(row).encode(), "problem": None}])
    documents = DocumentTokenizer(str(model), 64)(table)
    assert documents["problem"].to_pylist() == [None]
    assert reference.eos_id() in documents["labels"][0].as_py()


def test_the_exported_tokenizer_json_has_the_same_tokens(model: Path, tmp_path: Path) -> None:
    load_tokenizer(str(model)).save_pretrained(tmp_path)
    assert (tmp_path / "tokenizer.json").exists()
    assert tokenizer_hash(load_tokenizer(str(tmp_path))) == tokenizer_hash(load_tokenizer(str(model)))
