"""Turn rows into tokenized documents with labels, so that only what the model should write is trained."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from raymill.data.chat_template import ChatTemplate, TemplateRejection, suggestion
from raymill.data.document_encoder import DocumentEncoder, EncodedText
from raymill.data.examples import BadRow, Completion, Conversation, Example, from_json
from raymill.data.options import Overlong, PastReasoning, PreprocessOptions, Turns
from raymill.data.row_formats import read_example
from raymill.data.tokenizer import eos_ids, load_tokenizer, read_template
from raymill.errors import UserError

NOT_TRAINED = -100  # the label that Hugging Face losses ignore
DOCUMENTS = pa.schema(
    [
        ("row", pa.int32()),
        ("input_ids", pa.list_(pa.int32())),
        ("labels", pa.list_(pa.int32())),
        ("cut", pa.bool_()),
        ("problem", pa.string()),
    ]
)

T = TypeVar("T")


class TokenizedDocument(NamedTuple):
    """The int32 tokens of a document. A label is the token itself if it is trained, and otherwise NOT_TRAINED."""

    input_ids: np.ndarray
    labels: np.ndarray
    cut: bool
    """Whether tokens were cut off."""


class DocumentTokenizer:
    """Turns a table of rows into a table of documents, for `Dataset.map_batches(batch_format="pyarrow")`."""

    def __init__(
        self,
        model: str,
        sequence_length: int,
        chat_template: str | None = None,
        *,
        turns: Turns = "all",
        past_reasoning: PastReasoning = "served",
        overlong: Overlong = "truncate",
    ) -> None:
        """Load the tokenizer of `model`. `chat_template` is the text of a template, not its path.

        Raises:
            UserError: see `load_tokenizer` and `ChatTemplate`.
        """
        self.tokenizer = load_tokenizer(model, chat_template)
        self._encoder = DocumentEncoder(self.tokenizer)
        self.sequence_length = sequence_length
        self.overlong = overlong
        self._model = model
        self.template = (
            ChatTemplate(
                self.tokenizer,
                eos_ids(model, self.tokenizer),
                user_defined=chat_template is not None,
                turns=turns,
                past_reasoning=past_reasoning,
                sequence_length=sequence_length,
            )
            if self.tokenizer.chat_template
            else None
        )

    @classmethod
    def from_options(cls, options: PreprocessOptions, model: str = "") -> "DocumentTokenizer":
        """Return the tokenizer that the settings describe. `model` replaces the model of the settings."""
        return cls(
            model or options.model,
            options.sequence_length,
            read_template(options.chat_template),
            turns=options.turns,
            past_reasoning=options.past_reasoning,
            overlong=options.overlong,
        )

    @property
    def eos_ids(self) -> list[int]:
        """Stop tokens of a model that is trained on the documents. Empty without a chat template."""
        return self.template.eos_ids if self.template else []

    def __call__(self, table: pa.Table) -> pa.Table:
        """Return the documents of `table` with the schema DOCUMENTS; `row` is the position in `table`.

        A row gives one document, or several if the template renders a turn differently once a later turn follows. A
        bad row gives one document with a `problem` and no tokens. Rows have the schema `raymill.data.rows.ROWS`, or
        are in a published format.
        """
        examples = [_or_bad_row(self._read, row) for row in table.to_pylist()]
        rows: list[dict[str, Any]] = []
        for number, encoded in enumerate(self._encode(examples)):
            documents = encoded if isinstance(encoded, BadRow) else self._cut_all(encoded)
            rows += [_as_row(number, found) for found in ([documents] if isinstance(documents, BadRow) else documents)]
        return pa.Table.from_pylist(rows, DOCUMENTS)

    def documents(self, row: Mapping[str, Any]) -> list[TokenizedDocument]:
        """Return the documents of one row, as in `__call__`.

        Raises:
            BadRow: the row cannot be used.
        """
        [encoded] = self._encode([self._read(row)])
        documents = encoded if isinstance(encoded, BadRow) else self._cut_all(encoded)
        if isinstance(documents, BadRow):
            raise documents
        return documents

    def _read(self, row: Mapping[str, Any]) -> Example:
        if row.get("problem"):
            raise BadRow(row["problem"])
        example = from_json(row["row"]) if isinstance(row.get("row"), bytes) else read_example(row)
        if isinstance(example, Conversation) and not self.template:
            raise UserError(
                f"{self._model} has no chat template; set chat_template in [preprocess] to "
                f"{suggestion(self.tokenizer)}."
            )
        return example

    def _encode(self, examples: list[Example | BadRow]) -> Iterator[list[EncodedText] | BadRow]:
        conversations = [example for example in examples if isinstance(example, Conversation)]
        rendered = iter(self.template.batch(conversations) if self.template else [])
        for example in examples:
            if isinstance(example, BadRow):
                yield example
            elif isinstance(example, Completion):
                yield [self._encoder.encode_completion(example.prompt, self._ended(example.completion))]
            elif isinstance(documents := next(rendered), TemplateRejection):
                yield BadRow(str(documents))
            else:
                encoded = [text for document in documents for text in self._encoder.encode(document)]
                yield encoded or BadRow("no assistant turn that is trained")

    def _ended(self, completion: str) -> str:
        """Return a text that ends with the EOS token, and has it only once there."""
        eos = self.tokenizer.eos_token or ""
        ended = completion.rstrip()
        return ended if eos and ended.endswith(eos) else completion + eos

    def _cut_all(self, encoded: list[EncodedText]) -> list[TokenizedDocument] | BadRow:
        """Return the documents of one row, cut to `sequence_length` tokens each, or the reason why the row is bad."""
        if any(len(text.ids) > self.sequence_length for text in encoded):
            if self.overlong == "error":
                raise UserError(
                    f"a conversation has more than sequence_length = {self.sequence_length} tokens; pass a larger "
                    "--sequence-length, or --overlong truncate."
                )
            if self.overlong == "drop":
                return BadRow("longer than sequence_length")
        cut = list(map(self._cut, encoded))
        good = [document for document in cut if document is not None]
        if good and len(good) < len(cut):  # a whole turn was cut off: count it as a cut
            good[-1] = good[-1]._replace(cut=True)
        return good or BadRow("no trained token within sequence_length")

    def _cut(self, text: EncodedText) -> TokenizedDocument | None:
        """Return a document of at most `sequence_length` tokens, or None if no trained token is left."""
        tokens = np.array(text.ids[: self.sequence_length], np.int32)
        labels = np.full(len(tokens), NOT_TRAINED, np.int32)
        # do not train the first token: it has no context, because the preceding tokens belong to another document
        spans = [(max(start, 1), min(stop, len(tokens))) for start, stop in text.spans]
        spans = [(start, stop) for start, stop in spans if start < stop]
        for start, stop in spans:
            labels[start:stop] = tokens[start:stop]
        return TokenizedDocument(tokens, labels, cut=len(text.ids) > len(tokens)) if spans else None


def _or_bad_row(function: Callable[..., T], *arguments: Any) -> T | BadRow:
    try:
        return function(*arguments)
    except BadRow as bad:
        return bad


def _as_row(number: int, document: TokenizedDocument | BadRow) -> dict[str, Any]:
    if isinstance(document, BadRow):
        return {"row": number, "input_ids": [], "labels": [], "cut": False, "problem": str(document)}
    return document._asdict() | {"row": number}
