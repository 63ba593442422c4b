"""Turns rows into prompts with the same tokens as in a request to the server. Rejects bad rows."""

import functools
import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import pyarrow as pa
import ray
import ray.data
from ray import ObjectRef
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from raymill.data import file_formats, rows
from raymill.data.examples import BadRow, Completion, Conversation, canonical_json, to_json
from raymill.data.file_formats import Piece, RawRow
from raymill.data.messages import normalize_messages, normalize_tools
from raymill.data.row_dataset import one_task_per_piece
from raymill.data.row_sources import RowSource
from raymill.data.template_renderer import TemplateFailure, TemplateRenderer
from raymill.data.tokenizer import SpecialTokens
from raymill.errors import UserError
from raymill.generation.answer_folder import ROW_HASH, AnswerFolder
from raymill.ray_support import hub_access, model_cache

COLUMNS = ("messages", "tools", "prompt")
BLOCK_ROWS = 256


class RemainingRows(NamedTuple):
    """Which rows remain to be answered."""

    count: int
    """Number of remaining rows, including bad ones."""
    answered: frozenset[str]
    """Ids of rows that earlier runs answered and whose content is still the same."""
    repeated: frozenset[str]
    """Ids that several rows share."""
    changed: frozenset[str] = frozenset()
    """Ids of rows that earlier runs answered, but with other content."""


class PromptTokenizer:
    """Turns rows into prompts as vLLM's server does with requests."""

    def __init__(self, model: str, id_column: str, max_model_len: int, skip_ids: Collection[str] = ()) -> None:
        """Load the tokenizer.

        Raises:
            UserError: the tokenizer cannot be loaded.
        """
        try:
            folder = model_cache.on_this_node(model_cache.find(model), weights=False)
            self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise hub_access.explain(error, model) or UserError(
                f"the tokenizer of {model} cannot be loaded ({reason}); pass another --model."
            ) from None
        self._special_tokens = SpecialTokens.of(self.tokenizer)
        self.id_column = id_column
        self.max_model_len = max_model_len
        self.skip_ids = frozenset(skip_ids)
        self._renderers: dict[str, TemplateRenderer] = {}  # by template: a model may have another one for tools

    def prompt(self, raw: RawRow, remaining: RemainingRows) -> dict[str, Any] | None:
        """Return a row's id and content hash, its prompt and the prompt's tokens, or None if the row is answered.

        Raises:
            BadRow: the row is skipped, or has no unique id or no usable prompt.
        """
        row = rows.parse(raw)
        row_id = _id_of(row, self.id_column)
        if row_id in remaining.answered:
            return None
        if row_id in remaining.repeated:
            raise BadRow("an id that another row also has")
        if row_id in self.skip_ids:
            raise BadRow("skipped by --skip-ids")
        content = _content_of(row)
        prompt, tokens = self._tokenize(content)
        if not tokens:
            raise BadRow("an empty prompt")
        if len(tokens) >= self.max_model_len:
            raise BadRow(f"too long: no token of max_model_len = {self.max_model_len} is left for the answer")
        return {"id": row_id, ROW_HASH: _hash_of(content), "prompt": prompt, "tokenized_prompt": tokens}

    def _tokenize(self, content: Conversation | str) -> tuple[str, list[int]]:
        """Return the prompt, with the tokens that /v1/chat/completions or /v1/completions would give the model.

        There is one exception: special tokens that a `prompt` already has are not doubled, as in training.
        """
        if isinstance(content, Conversation):
            prompt = canonical_json(content.messages).decode()
            return prompt, self.tokenizer(self._render(content), add_special_tokens=False)["input_ids"]
        canonical_json(content)  # raises BadRow if the text is not valid Unicode
        return content, self._special_tokens.prompt(self.tokenizer(content, add_special_tokens=False)["input_ids"])

    def _render(self, conversation: Conversation) -> str:
        if not self.tokenizer.chat_template:
            raise BadRow("messages, but the model has no chat template")
        try:
            template = self.tokenizer.get_chat_template(tools=conversation.tools)
            if template not in self._renderers:
                self._renderers[template] = TemplateRenderer(template, self.tokenizer.special_tokens_map)
            return self._renderers[template].prompt(conversation)
        except TemplateFailure as failure:
            raise BadRow(f"the chat template cannot render the messages: {failure}") from None


def find_remaining(source: RowSource, id_column: str, answered: Mapping[str, str]) -> RemainingRows:
    """Read all rows, with one task per piece, and return those that remain to be answered.

    `answered` has the content hashes of the answered rows, keyed by id. An answer counts only if its row has the same
    content.

    Raises:
        UserError: no row has an id.
    """
    shared = ray.put(answered)
    read = functools.partial(_read_identities, source=source, id_column=id_column, answered=shared)
    seen: Counter[str | None] = Counter()
    changed: set[str] = set()
    for batch in one_task_per_piece(source).map_batches(read, batch_size=None, batch_format="pyarrow").iter_rows():
        seen.update(batch["ids"])
        changed.update(batch["changed"])
    if not seen.keys() - {None}:
        raise UserError(
            f"no row of {source.name} has an id in the column {id_column}. Without ids, a killed run could not "
            "resume. Name the column with --id-column."
        )
    valid = frozenset(answered).intersection(seen) - changed
    repeated = frozenset(row_id for row_id, count in seen.items() if row_id is not None and count > 1)
    count = seen.total() - sum(seen[row_id] for row_id in valid)
    return RemainingRows(count, valid, repeated - valid, frozenset(changed))


def dataset(
    source: RowSource,
    remaining: RemainingRows,
    tokenizer: PromptTokenizer,
    output: AnswerFolder,
    report: Callable[..., Any] | None = None,
) -> ray.data.Dataset:
    """Return the remaining prompts. For each piece, save bad rows to `output`, and call `report(rejected=…)`."""
    shared = ray.put((tokenizer, remaining))
    read = functools.partial(_read_prompts, source=source, shared=shared, output=output, report=report)
    return one_task_per_piece(source).map_batches(read, batch_size=None, batch_format="pyarrow")


def _read_identities(pieces: pa.Table, source: RowSource, id_column: str, answered: ObjectRef) -> pa.Table:
    """Return the ids of all rows, and the ids of the answered rows whose content has changed."""
    hashes = _fetch(answered)
    ids: list[str | None] = []
    changed: list[str] = []
    # without answers, the content does not matter
    columns = (id_column, *COLUMNS) if hashes else (id_column,)
    for piece in [Piece(**piece) for piece in pieces.to_pylist()]:
        for raw in file_formats.read(source.files.filesystem, piece, columns):
            try:
                row = rows.parse(raw)
                ids.append(row_id := _id_of(row, id_column))
            except BadRow:
                ids.append(None)
                continue
            if row_id in hashes and not _has_hash(row, hashes[row_id]):
                changed.append(row_id)
    strings = pa.list_(pa.string())
    return pa.table({"ids": pa.array([ids], strings), "changed": pa.array([changed], strings)})


def _has_hash(row: dict[str, Any], row_hash: str) -> bool:
    try:
        return _hash_of(_content_of(row)) == row_hash
    except BadRow:
        return False


def _content_of(row: dict[str, Any]) -> Conversation | str:
    """Return the part of a row that determines its answer.

    Raises:
        BadRow: the row has no usable prompt.
    """
    if row.get("messages") is not None:
        return Conversation(normalize_messages(row["messages"]), normalize_tools(row.get("tools")) or None)
    if not isinstance(prompt := row.get("prompt"), str) or not prompt:
        raise BadRow("neither messages nor a prompt that is text")
    return prompt


def _hash_of(content: Conversation | str) -> str:
    """Return a hash that is the same for a parquet row as for a line of JSONL."""
    example = content if isinstance(content, Conversation) else Completion(content, "")
    return hashlib.sha256(to_json(example)).hexdigest()


def _id_of(row: dict[str, Any], column: str) -> str:
    value = row.get(column)
    if isinstance(value, bool) or not isinstance(value, int | str) or value == "":
        raise BadRow(f"no text or whole number in the column {column}")
    return str(value)


@functools.cache
def _fetch(shared: ObjectRef) -> Any:
    """Return an object from the object store, which each process reads only once."""
    return ray.get(shared)


def _read_prompts(
    pieces: pa.Table, source: RowSource, shared: ObjectRef, output: AnswerFolder, report: Callable[..., Any] | None
) -> Iterator[pa.Table]:
    tokenizer, remaining = _fetch(shared)
    for piece in [Piece(**piece) for piece in pieces.to_pylist()]:
        good: list[dict[str, Any]] = []
        bad: list[dict[str, Any]] = []
        for row in file_formats.read(source.files.filesystem, piece, (tokenizer.id_column, *COLUMNS)):
            try:
                if prompt := tokenizer.prompt(row, remaining):
                    good.append(prompt)
            except BadRow as problem:
                bad.append({"row": rows.to_bytes(row), "reason": str(problem)})
            if len(good) == BLOCK_ROWS:
                yield pa.Table.from_pylist(good)
                good = []
        if good:
            yield pa.Table.from_pylist(good)
        if bad:
            output.save_rejected(f"{piece.path}:{piece.start}", bad)
            if report:
                report(rejected=len(bad))
