"""Rows of an input as prompts: the tokens that the server would make of the same words, or what is wrong."""

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import jinja2
import pyarrow as pa
import ray
import ray.data
from ray import ObjectRef
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from pipeline.data import rows
from pipeline.data.conversations import canonical
from pipeline.data.row_formats import BadRow, well_formed
from pipeline.data.rows import Found, Piece, Source
from pipeline.generation.output import Output
from pipeline.ray_support import model_cache
from settings import UserError

COLUMNS = ("messages", "prompt")
ROWS_AT_ONCE = 256  # handed on together


class Survey(NamedTuple):
    """What the rows' ids tell before anything is generated."""

    rows: int
    """Rows of the input that are still to be done, bad ones included."""
    skipped: frozenset[str]
    """Ids of rows that were answered before."""
    repeated: frozenset[str]
    """Ids that several rows have."""


def survey(source: Source, id_column: str, answered: frozenset[str]) -> Survey:
    """Read all ids, each piece in a task of its own.

    Raises:
        UserError: no row has one.
    """
    read = functools.partial(_ids, source=source, id_column=id_column)
    seen: Counter[str | None] = Counter()
    for batch in rows.a_task_each(source).map_batches(read, batch_size=None, batch_format="pyarrow").iter_rows():
        seen.update(batch["ids"])
    if not seen.keys() - {None}:
        raise UserError(
            f"no row of {source.name} has an id in the column {id_column}, by which a killed run goes on; "
            "name the column with --id-column."
        )
    skipped = answered & seen.keys()
    repeated = frozenset(name for name, count in seen.items() if name is not None and count > 1)
    return Survey(seen.total() - sum(seen[name] for name in skipped), skipped, repeated)


def _ids(pieces: pa.Table, source: Source, id_column: str) -> pa.Table:
    ids: list[str | None] = []
    for piece in [Piece(**piece) for piece in pieces.to_pylist()]:
        for found in rows.read(source.filesystem, piece, (id_column,)):
            try:
                ids.append(_id_of(rows.parsed(found), id_column))
            except BadRow:
                ids.append(None)
    return pa.table({"ids": pa.array([ids], pa.list_(pa.string()))})


def _id_of(row: dict[str, Any], column: str) -> str:
    value = row.get(column)
    if isinstance(value, bool) or not isinstance(value, int | str) or value == "":
        raise BadRow(f"no text or whole number in the column {column}")
    return str(value)


class Tokenize:
    """Makes prompts of rows, as vLLM's server makes them of requests."""

    def __init__(self, model: str, id_column: str, max_model_len: int, skip_ids: Collection[str] = ()) -> None:
        """Load the tokenizer.

        Raises:
            UserError: the model has none.
        """
        try:
            folder = model_cache.on_this_node(model_cache.find(model), weights=False)
            self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise UserError(f"{model} gives no tokenizer ({reason}); pass another --model.") from None
        self.id_column = id_column
        self.max_model_len = max_model_len
        self.skip_ids = frozenset(skip_ids)

    def prompt(self, found: Found, skipped: frozenset[str], repeated: frozenset[str]) -> dict[str, Any] | None:
        """The id, the prompt as it stands in the row, and its tokens; None for a row that is skipped.

        Raises:
            BadRow: there is no prompt, or none that can be answered.
        """
        row = rows.parsed(found)
        name = _id_of(row, self.id_column)
        if name in skipped:
            return None
        if name in repeated:
            raise BadRow("an id that another row has too")
        if name in self.skip_ids:
            raise BadRow("skipped by --skip-ids")
        prompt, tokens = self._tokens(row)
        if not tokens:
            raise BadRow("an empty prompt")
        if len(tokens) >= self.max_model_len:
            raise BadRow(f"too long: no token of max_model_len = {self.max_model_len} is left for the answer")
        return {"id": name, "prompt": prompt, "tokenized_prompt": tokens}

    def _tokens(self, row: dict[str, Any]) -> tuple[str, list[int]]:
        """As /v1/chat/completions and /v1/completions, each of which adds a model's first token in its own way."""
        if row.get("messages") is not None:
            messages = well_formed(row["messages"])
            prompt = canonical(messages).decode()
            return prompt, self.tokenizer(self._rendered(messages), add_special_tokens=False)["input_ids"]
        if not isinstance(prompt := row.get("prompt"), str) or not prompt:
            raise BadRow("neither messages nor a prompt that is text")
        canonical([{"content": prompt}])
        return prompt, self.tokenizer(prompt)["input_ids"]

    def _rendered(self, messages: list[dict[str, Any]]) -> str:
        try:
            return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except (jinja2.TemplateError, TypeError, ValueError, IndexError) as error:
            raise BadRow(f"the chat template refuses it: {error}") from None


def dataset(
    source: Source, found: Survey, tokenize: Tokenize, output: Output, report: Callable[..., Any] | None = None
) -> ray.data.Dataset:
    """The prompts that are still to be answered; bad rows go aside. Each piece calls `report(rejected=…)`."""
    read = functools.partial(
        _prompts, source=source, shared=ray.put((tokenize, found.skipped, found.repeated)), output=output, report=report
    )
    return rows.a_task_each(source).map_batches(read, batch_size=None, batch_format="pyarrow")


@functools.cache
def _fetch(shared: ObjectRef) -> tuple[Tokenize, frozenset[str], frozenset[str]]:
    return ray.get(shared)


def _prompts(
    pieces: pa.Table, source: Source, shared: ObjectRef, output: Output, report: Callable[..., Any] | None
) -> Iterator[pa.Table]:
    tokenize, skipped, repeated = _fetch(shared)
    for piece in [Piece(**piece) for piece in pieces.to_pylist()]:
        good: list[dict[str, Any]] = []
        bad: list[dict[str, Any]] = []
        for found in rows.read(source.filesystem, piece, (tokenize.id_column, *COLUMNS)):
            try:
                if made := tokenize.prompt(found, skipped, repeated):
                    good.append(made)
            except BadRow as problem:
                bad.append({"row": rows.raw(found), "reason": str(problem)})
            if len(good) == ROWS_AT_ONCE:
                yield pa.Table.from_pylist(good)
                good = []
        if good:
            yield pa.Table.from_pylist(good)
        if bad:
            output.save_rejected(f"{piece.path}:{piece.start}", bad)
            if report:
                report(rejected=len(bad))
