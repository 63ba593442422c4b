"""Turns conversations into packed rows with a batched `datasets.map` in two processes, and with TRL's packing."""

import os
import time
from typing import Any

import datasets
import pyarrow.compute as pc
from exchange import answer
from transformers import AutoTokenizer
from trl import pack_dataset

NOT_TRAINED = -100
PACKED_TOGETHER = 10_000  # documents per batch; the default of `map`, 1000, leaves more padding than `preprocess`


def main(asked: dict[str, Any]) -> dict[str, float]:
    """Tokenize and pack the rows. Return `seconds`, `tokens` and `trained_tokens`.

    Args:
        asked: `model`, `rows` (a JSONL file), `sequence_length` and `eval_share`.
    """
    tokenizer = AutoTokenizer.from_pretrained(asked["model"])
    length = asked["sequence_length"]

    def encode(batch: dict[str, Any]) -> dict[str, Any]:
        encoded = tokenizer.apply_chat_template(
            list(batch["messages"]), return_dict=True, return_assistant_tokens_mask=True
        )
        labels = [
            [token if trained else NOT_TRAINED for token, trained in zip(tokens, mask, strict=True)][:length]
            for tokens, mask in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
        ]
        return {"input_ids": [tokens[:length] for tokens in encoded["input_ids"]], "labels": labels}

    datasets.disable_progress_bars()
    started = time.perf_counter()
    rows: Any = datasets.load_dataset("json", data_files=asked["rows"], split="train")
    made = rows.map(encode, batched=True, num_proc=os.cpu_count(), remove_columns=rows.column_names)
    for name, part in made.train_test_split(asked["eval_share"], seed=0).items():  # also shuffles
        packed = pack_dataset(part, length, map_kwargs={"num_proc": os.cpu_count(), "batch_size": PACKED_TOGETHER})
        packed.to_parquet(f"{name}.parquet")
    seconds = time.perf_counter() - started
    lengths, labels = pc.list_value_length(made.data["input_ids"]), pc.list_flatten(made.data["labels"])
    trained = pc.sum(pc.not_equal(labels, NOT_TRAINED))
    return {"seconds": seconds, "tokens": pc.sum(lengths).as_py(), "trained_tokens": trained.as_py()}


if __name__ == "__main__":
    answer(main)
