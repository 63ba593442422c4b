"""Answers the rows of `generate` with vLLM's offline `LLM` class. Runs in the project's environment, not the peers'."""

import json
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from exchange import answer
from vllm import LLM, SamplingParams


def main(asked: dict[str, Any]) -> dict[str, float]:
    """Answer the rows. Return `answered_s`, the seconds that LLM.generate takes, without the start of the engine.

    Args:
        asked: `rows` (a JSONL file), `output` (a parquet file), `engine` (arguments of LLM) and `max_tokens`.
    """
    rows = [json.loads(line) for line in Path(asked["rows"]).read_text(encoding="utf-8").splitlines()]
    engine = LLM(**asked["engine"])
    tokenizer = engine.get_tokenizer()
    texts = tokenizer.apply_chat_template([row["messages"] for row in rows], add_generation_prompt=True, tokenize=False)
    prompts = [{"prompt_token_ids": tokens} for tokens in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    started = time.perf_counter()
    made = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=asked["max_tokens"]), use_tqdm=False)
    seconds = time.perf_counter() - started
    ids, said = [row["id"] for row in rows], [one.outputs[0].text for one in made]
    pq.write_table(pa.table({"id": ids, "answer": said}), asked["output"])
    return {"answered_s": seconds}


if __name__ == "__main__":
    answer(main)
