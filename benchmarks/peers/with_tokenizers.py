"""Renders, tokenizes and masks rows in a bare pool of processes. Its speed is an upper bound for `preprocess`."""

import json
import multiprocessing
import os
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes already use all cores
import numpy as np
from exchange import answer
from tokenizers import Tokenizer
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

NOT_TRAINED = -100
LINES = 1000  # lines per task of the pool


def main(asked: dict[str, Any]) -> dict[str, float]:
    """Tokenize the rows. Return `seconds`, `tokens` and `trained_tokens`.

    Args:
        asked: `model`, `rows` (a JSONL file) and `sequence_length`.
    """
    described = AutoTokenizer.from_pretrained(asked["model"])
    special = {"bos_token": described.bos_token, "eos_token": described.eos_token}
    output = Path("arrays")
    output.mkdir()
    started = time.perf_counter()
    with multiprocessing.Pool(
        initializer=_begin,
        initargs=(asked["model"], described.chat_template, special, asked["sequence_length"], output),
    ) as pool:
        counts = np.array(list(pool.imap_unordered(_encode, _chunks(asked["rows"]))))
    seconds = time.perf_counter() - started
    tokens, trained = counts.sum(axis=0).tolist()
    return {"seconds": seconds, "tokens": tokens, "trained_tokens": trained}


def _chunks(file: str) -> Iterator[tuple[int, list[str]]]:
    with open(file, encoding="utf-8") as lines:
        number = 0
        while chunk := list(islice(lines, LINES)):
            yield number, chunk
            number += 1


def _begin(model: str, template: str, special: dict[str, str], length: int, output: Path) -> None:
    global TOKENIZER, RENDER, LENGTH, OUTPUT
    TOKENIZER = Tokenizer.from_file(f"{model}/tokenizer.json")
    RENDER = {"chat_template": template, "return_assistant_tokens_mask": True} | special
    LENGTH, OUTPUT = length, output


def _encode(chunk: tuple[int, list[str]]) -> tuple[int, int]:
    """Write the tokens and labels of some lines as arrays. Return the numbers of tokens and of trained tokens."""
    number, lines = chunk
    texts, answers = render_jinja_template([json.loads(line)["messages"] for line in lines], **RENDER)
    all_tokens, all_labels = [], []
    for encoding, spans in zip(TOKENIZER.encode_batch(texts, add_special_tokens=False), answers, strict=True):
        tokens = np.array(encoding.ids, dtype=np.int32)
        labels = np.full_like(tokens, NOT_TRAINED)
        for start, stop in spans:
            first, last = encoding.char_to_token(start), encoding.char_to_token(stop - 1)
            labels[first : last + 1] = tokens[first : last + 1]
        all_tokens.append(tokens[:LENGTH])
        all_labels.append(labels[:LENGTH])
    tokens, labels = np.concatenate(all_tokens), np.concatenate(all_labels)
    np.savez(OUTPUT / f"{number}.npz", tokens=tokens, labels=labels, lengths=[len(one) for one in all_tokens])
    return len(tokens), int((labels != NOT_TRAINED).sum())


if __name__ == "__main__":
    answer(main)
