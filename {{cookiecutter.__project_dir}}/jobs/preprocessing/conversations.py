"""Turns rows into conversations, and conversations into documents: tokens of which only the assistant's are trained."""

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import jinja2
import numpy as np
import pyarrow as pa

import settings
from jobs import weights

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerFast

COLUMNS = ("messages", "instruction", "response")
NO_COLUMNS = "neither messages nor instruction and response"
ROLES = ("system", "developer", "user", "assistant", "tool")
NOT_TRAINED = -100  # the label that Hugging Face losses skip
DOCUMENTS = pa.schema(
    [
        ("input_ids", pa.list_(pa.int32())),
        ("labels", pa.list_(pa.int32())),
        ("cut", pa.bool_()),
        ("problem", pa.string()),
    ]
)

T = TypeVar("T")

Message = dict[str, Any]


class BadRow(Exception):
    """A row that nothing can be trained on. Its text is the reason, worded alike for all rows of its kind."""


class Document(NamedTuple):
    """A tokenised conversation, int32: `labels` repeats a token where it is trained and is NOT_TRAINED elsewhere."""

    input_ids: np.ndarray
    labels: np.ndarray
    cut: bool


def conversation(row: Mapping[str, Any]) -> list[Message]:
    """The messages of a row that has `messages`, or `instruction` and `response`.

    Raises:
        BadRow: the columns are missing, a message is malformed, or the assistant says nothing.
    """
    messages = row.get("messages")
    if messages is None:
        if row.get("instruction") is None or row.get("response") is None:
            raise BadRow(NO_COLUMNS)
        messages = [{"role": "user", "content": row["instruction"]}, {"role": "assistant", "content": row["response"]}]
    messages = well_formed(messages)
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    if not answers:
        raise BadRow("no assistant turn")
    if not all(answer.strip() for answer in answers):
        raise BadRow("an empty assistant turn")
    return messages


def well_formed(messages: object) -> list[Message]:
    """Messages that have a known role and a text each, without what they lack.

    Raises:
        BadRow: they are anything else.
    """
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise BadRow("messages is not a list of objects")
    # parquet spells a key that a message lacks as null; a template must not see it
    messages = [{key: value for key, value in message.items() if value is not None} for message in messages]
    if not all(message.get("role") in ROLES for message in messages):
        raise BadRow(f"a message whose role is none of {', '.join(ROLES)}")
    if not all(isinstance(message.get("content"), str) for message in messages):
        raise BadRow("a message whose content is not text")
    return messages


def canonical(messages: list[Message]) -> bytes:
    """The conversation as JSON that depends on nothing but its content.

    Raises:
        BadRow: a text is not Unicode: it holds half of a surrogate pair.
    """
    text = json.dumps(messages, sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=str)
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise BadRow("text that is not valid Unicode") from None


def read_template(path: str | None) -> str | None:
    """The text of the chat template that the settings name, a file that is uploaded with this project; None for none.

    Raises:
        Refusal: there is no such file.
    """
    if path is None:
        return None
    try:
        return (settings.PROJECT / path).read_text(encoding="utf-8")
    except OSError as error:
        raise settings.Refusal(
            f"the chat template {path} cannot be read ({error.strerror}); correct chat_template in [preprocess]."
        ) from None


def load_tokenizer(model: str, chat_template: str | None = None) -> "PreTrainedTokenizerFast":
    """The tokenizer of a Hugging Face folder or hub id, with `chat_template` (its text) in place of its own.

    Raises:
        Refusal: it cannot be loaded, cannot map characters to tokens, or has no chat template.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # seconds, spared to workers that only read rows

    try:
        tokenizer = AutoTokenizer.from_pretrained(weights.on_this_node(weights.find(model), weights=False))
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise settings.Refusal(
            f"{model} gives no tokenizer ({reason}); set model in [preprocess] to a folder with one, or to a hub id."
        ) from None
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise settings.Refusal(f"{model} has a tokenizer without a tokenizer.json, so no mask can be made; convert it.")
    if not (chat_template or tokenizer.chat_template):
        raise settings.Refusal(
            f"{model} has no chat template; set chat_template in [preprocess], for example to "
            "jobs/chat_templates/chatml.jinja."
        )
    tokenizer.chat_template = chat_template or tokenizer.get_chat_template()  # one, where it has several by name
    return tokenizer


def tokenizer_hash(tokenizer: "PreTrainedTokenizerFast") -> str:
    """SHA-256 of what decides which tokens a text becomes; the chat template has its own hash."""
    definition = json.loads(tokenizer.backend_tokenizer.to_str())
    # how the last call padded and cut, not what the tokenizer is
    definition |= {"truncation": None, "padding": None}
    return hashlib.sha256(json.dumps(definition, sort_keys=True).encode()).hexdigest()


def padding_id(tokenizer: "PreTrainedTokenizerFast") -> int:
    """The token that fills rows: any would do, as padding is neither trained nor seen by a document."""
    return next(token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if token is not None)


class Tokenize:
    """Turns a table of rows into a table of documents; made for `Dataset.map_batches(batch_format="pyarrow")`."""

    def __init__(self, model: str, sequence_length: int, chat_template: str | None = None) -> None:
        """`chat_template` is the text of a template, not its path.

        Raises:
            Refusal: as `load_tokenizer`, or the template is broken or does not mark what the assistant says.
        """
        self.tokenizer = load_tokenizer(model, chat_template)
        self.tokenizer.backend_tokenizer.no_padding()  # a tokenizer.json may ask for both
        self.tokenizer.backend_tokenizer.no_truncation()
        self.sequence_length = sequence_length
        self._check_generation_marks(model)

    def __call__(self, table: pa.Table) -> pa.Table:
        """A row for each row of `table`, as DOCUMENTS has it; a bad row has its `problem` and no tokens.

        The rows are as `jobs.preprocessing.rows` reads them, or have `messages`, or `instruction` and `response`.
        """
        read = [_or_problem(_messages, row) for row in table.to_pylist()]
        documents = iter(self._documents([messages for messages in read if not isinstance(messages, BadRow)]))
        made = [messages if isinstance(messages, BadRow) else next(documents) for messages in read]
        return pa.Table.from_pylist([_as_row(document) for document in made], DOCUMENTS)

    def encode(self, messages: list[Message]) -> Document:
        """The document of one conversation, cut at its end to `sequence_length` tokens.

        Raises:
            BadRow: the template refuses the messages, or no trained token is left.
        """
        try:
            (encoded,) = self._apply_template([messages])
        except (jinja2.TemplateError, TypeError) as error:
            raise BadRow(f"the chat template refuses it: {error}") from None
        return self._cut(*encoded)

    def document(self, row: Mapping[str, Any]) -> Document:
        """The document of one row, as `encode`; the row is as in `__call__`."""
        return self.encode(_messages(row))

    def _documents(self, conversations: list[list[Message]]) -> list[Document | BadRow]:
        """All in one call, which takes about four fifths of the time of a call for each."""
        try:
            encoded = self._apply_template(conversations)
        except (jinja2.TemplateError, TypeError):  # one of them is refused: which, and why, shows a call for each
            return [_or_problem(self.encode, messages) for messages in conversations]
        return [_or_problem(self._cut, *each) for each in encoded]

    def _cut(self, tokens: np.ndarray, trained: np.ndarray) -> Document:
        # the first token has no context of its own: what lies before it in a packed row is another document
        trained[:1] = False
        kept = slice(self.sequence_length)
        if not trained[kept].any():
            raise BadRow("no assistant token within sequence_length")
        labels = np.where(trained[kept], tokens[kept], np.int32(NOT_TRAINED))
        return Document(tokens[kept], labels, cut=len(tokens) > self.sequence_length)

    def _apply_template(self, conversations: list[list[Message]]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Of each conversation the tokens, and which of them are trained: int32 and bool, equally long.

        What `tokenizer.apply_chat_template(…, return_assistant_tokens_mask=True)` does, but for its Python lists, which
        it fills token by token.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        texts, answers = render_jinja_template(
            conversations,
            chat_template=self.tokenizer.chat_template,
            return_assistant_tokens_mask=True,
            **self.tokenizer.special_tokens_map,
        )
        encodings = self.tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
        return [
            (np.array(encoding.ids, np.int32), _within(spans, encoding))
            for encoding, spans in zip(encodings, answers, strict=True)
        ]

    def _check_generation_marks(self, model: str) -> None:
        probe = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
        try:
            ((_, marks),) = self._apply_template([probe])
        except jinja2.TemplateError as error:
            raise settings.Refusal(
                f"the chat template for {model} is broken ({error}); correct chat_template in [preprocess]."
            ) from None
        if not marks.any():
            raise settings.Refusal(
                f"the chat template for {model} does not mark what the assistant says with {{% generation %}}, so "
                "nothing would be trained; set chat_template in [preprocess] to one that does, for example "
                "jobs/chat_templates/chatml.jinja."
            )


def _messages(row: Mapping[str, Any]) -> list[Message]:
    """The conversation of a row as `Tokenize` takes them."""
    if row.get("problem"):
        raise BadRow(row["problem"])
    return json.loads(row["row"]) if isinstance(row.get("row"), bytes) else conversation(row)


def _within(spans: list[tuple[int, int]], encoding: "Encoding") -> np.ndarray:
    """Which tokens lie in the spans of characters, (start, stop)."""
    found = np.zeros(len(encoding), bool)
    for start, stop in spans:
        first, last = encoding.char_to_token(start), encoding.char_to_token(stop - 1)
        if first is not None:
            found[first : None if last is None else last + 1] = True
    return found


def _or_problem(make: Callable[..., T], *arguments: Any) -> T | BadRow:
    try:
        return make(*arguments)
    except BadRow as bad:
        return bad


def _as_row(made: Document | BadRow) -> dict[str, Any]:
    if isinstance(made, BadRow):
        return {"input_ids": [], "labels": [], "cut": False, "problem": str(made)}
    return made._asdict()
