"""Writes a small model, and packed rows for it in the format of `preprocess`, without Ray."""

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from raymill.data.packing import pack
from raymill.data.tokenization import DocumentTokenizer
from raymill.data.tokenizer import padding_id, tokenizer_hash


def write_model(folder: Path, assets: Path, seed: int = 0, **config: float) -> Path:
    """Write an untrained Llama with about 100,000 parameters and the demo's tokenizer. Return `folder`."""
    tokenizer = AutoTokenizer.from_pretrained(assets / "model")
    torch.manual_seed(seed)
    shape = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    LlamaForCausalLM(LlamaConfig(**shape | config)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_other_tokenizer(model: Path, folder: Path) -> Path:
    """Write a copy of `model` whose tokenizer lacks one merge. Return `folder`."""
    shutil.copytree(model, folder)
    definition = json.loads((model / "tokenizer.json").read_text())
    definition["model"]["merges"].pop()
    (folder / "tokenizer.json").write_text(json.dumps(definition))
    return folder


def tokenize(assets: Path, model: Path, sequence_length: int) -> pa.Table:
    """Return the demo's conversations as tokenized documents."""
    lines = (assets / "data/pairs.jsonl").read_text().splitlines()
    return DocumentTokenizer(str(model), sequence_length)(pa.Table.from_pylist([json.loads(line) for line in lines]))


def write(
    folder: Path,
    documents: pa.Table,
    model: Path,
    sequence_length: int,
    train: list[int],
    evaluated: int,
    eos_ids: list[int] | None = None,
) -> None:
    """Pack and write documents: a training shard for each number of rows in `train`, and `evaluated` held-out rows."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = pack(documents, sequence_length, padding_id(tokenizer))
    ends = [sum(train[: number + 1]) for number in range(len(train))]
    shards = [rows.slice(end - count, count) for end, count in zip(ends, train, strict=True)]
    manifest: dict[str, Any] = {
        "sequence_length": sequence_length,
        "content_hash": "0" * 64,
        "tokenizer": {
            "model": str(model),
            "hash": tokenizer_hash(tokenizer),
            "vocabulary": len(tokenizer),
            "chat_template": tokenizer.chat_template if eos_ids else tokenizer.chat_template + "{# as preprocessed #}",
            "eos_ids": eos_ids or sorted([tokenizer.eos_token_id, tokenizer.pad_token_id]),
        },
    }
    for part, tables in {"train": shards, "eval": [rows.slice(sum(train), evaluated)]}.items():
        (folder / part).mkdir()
        files = [{"name": f"part-{number:05d}.parquet", "rows": len(table)} for number, table in enumerate(tables)]
        for file, table in zip(files, tables, strict=True):
            pq.write_table(table, folder / part / str(file["name"]), row_group_size=5)
        manifest[part] = {"files": files, "rows": sum(map(len, tables))}
    (folder / "manifest.json").write_text(json.dumps(manifest))
