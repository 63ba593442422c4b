"""Renders, tokenizes and masks rows in a bare pool of processes. Its speed is an upper bound for `preprocess`."""

import json
import multiprocessing
import os
import time
from collections.abc import Iterator
from itertools import accumulate, islice, pairwise
from pathlib import Path
from typing import Any

os.environ |= {"RAYON_NUM_THREADS": "1", "FASTOKENS_BPE_THREADS": "1"}  # the processes already use all cores
import fastokens
import numpy as np
from exchange import answer
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
    TOKENIZER = fastokens.Tokenizer.from_file(f"{model}/tokenizer.json")
    RENDER = {"chat_template": template, "return_assistant_tokens_mask": True} | special
    LENGTH, OUTPUT = length, output


def _encode(chunk: tuple[int, list[str]]) -> tuple[int, int]:
    """Write the tokens and labels of some lines as arrays. Return the numbers of tokens and of trained tokens."""
    number, lines = chunk
    texts, answers = render_jinja_template([json.loads(line)["messages"] for line in lines], **RENDER)
    pieces, is_trained, texts_of_pieces = [], [], []
    for at, (text, spans) in enumerate(zip(texts, answers, strict=True)):
        edges = [0, *(edge for span in spans for edge in span), len(text)]
        pieces += [text[start:stop] for start, stop in pairwise(edges)]
        is_trained += [piece % 2 == 1 for piece in range(len(edges) - 1)]
        texts_of_pieces += [at] * (len(edges) - 1)
    ids, bounds = TOKENIZER.encode_batch_flat(pieces)
    tokens = np.frombuffer(ids, np.uint32).astype(np.int32)
    counts = np.diff(np.frombuffer(bounds, np.uint64).astype(np.int64))
    labels = np.where(np.repeat(is_trained, counts), tokens, NOT_TRAINED)
    lengths = np.bincount(np.repeat(texts_of_pieces, counts), minlength=len(texts))
    within = np.arange(len(tokens)) - np.repeat(list(accumulate(lengths, initial=0))[:-1], lengths)
    kept = within < LENGTH
    np.savez(OUTPUT / f"{number}.npz", tokens=tokens[kept], labels=labels[kept], lengths=np.minimum(lengths, LENGTH))
    return int(kept.sum()), int((labels[kept] != NOT_TRAINED).sum())


if __name__ == "__main__":
    answer(main)
