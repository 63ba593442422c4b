"""Measures whether learning the layouts of a chat template ever makes `preprocess` slower than without layouts."""

import statistics
import time
from collections.abc import Callable
from functools import partial

import pyarrow as pa

from benchmarks import harness
from benchmarks.report import Result, at_least
from raymill.data.examples import Conversation
from raymill.data.template_layout import Layouts, Render
from raymill.data.template_renderer import RenderedText
from raymill.data.tokenization import DocumentTokenizer

ROUNDS = 9
LENGTH = 1024
TURNS = {1: 3000, 3: 1500, 20: 150}
"""Numbers of questions, and of conversations with as many."""
PROMPTS: dict[str, Callable[[int], str | None]] = {
    "none": lambda _: None,
    "same": lambda _: "You are kind.",
    "unique": lambda number: f"You are character {number}.",
    "mixed": lambda number: "You are kind." if number % 2 else f"You are character {number}.",
}
"""System prompts of the conversation with a number."""
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}


def measure() -> Result:
    """Compare the rows per CPU second of tokenization with and without layouts, which give the same tokens."""
    medians, ratios = [], []
    with harness.scratch() as folder:
        harness.write_model(folder, 16384, **TINY)
        for turns, count in TURNS.items():
            for name, prompt in PROMPTS.items():
                table = _table(turns, count, prompt)
                ways = {way: partial(_rows_per_s, table, str(folder), way) for way in ("layouts", "no layouts")}
                print(f"{turns} questions, system prompts: {name}", flush=True)
                rounds = harness.alternate(ways, ROUNDS, "rows per CPU second")
                made = {way: statistics.median(each[way] for each in rounds) for way in ways}
                ratios.append(harness.median_ratio(rounds, "layouts", "no layouts"))
                medians.append({"questions": turns, "system prompts": name, **made, "ratio": ratios[-1]})
    return {"bars": [at_least(0.95, "lowest median ratio of rows/s with layouts", min(ratios))], "rounds": medians}


def _table(turns: int, count: int, prompt: Callable[[int], str | None]) -> pa.Table:
    facts = harness.docstrings()
    rows = []
    for number in range(count):
        system = prompt(number)
        messages = [{"role": "system", "content": system}] if system else []
        for turn in range(turns):
            fact = facts[(number * turns + turn) % len(facts)]
            messages += [
                {"role": "user", "content": fact.question},
                {"role": "assistant", "content": fact.answer[:200]},
            ]
        rows.append({"messages": messages})
    return pa.Table.from_pylist(rows)


def _rows_per_s(table: pa.Table, model: str, way: str) -> float:
    tokenize = DocumentTokenizer(model, LENGTH)
    assert tokenize.template
    if way == "no layouts":
        tokenize.template._layouts = _NoLayouts(tokenize.template.text, ())  # only benchmarks switch layouts off
    started = time.process_time()
    tokenize(table)
    return len(table) / (time.process_time() - started)


class _NoLayouts(Layouts):
    def documents(self, conversations: list[Conversation], render: Render) -> list[list[RenderedText] | None]:
        return [None] * len(conversations)


if __name__ == "__main__":
    harness.main(measure)
