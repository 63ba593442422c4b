"""Turn rows into tokenized documents with labels, so that only what the model should write is trained."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from raymill.data.chat_template import ChatTemplate, TemplateRejection, suggestion
from raymill.data.document_encoder import DocumentEncoder, EncodedText
from raymill.data.examples import BadRow, Completion, Conversation, Example, Pair, Rated, from_json
from raymill.data.options import Overlong, PastReasoning, PreprocessOptions, Task, TokenizerEngine, Turns
from raymill.data.row_formats import read_example
from raymill.data.template_renderer import RenderedText
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
        ("is_fast", pa.bool_()),
        ("is_good", pa.bool_()),
    ]
)
KINDS: dict[Task, str] = {
    "supervised": "an answer to learn",
    "preference": "a preference pair",
    "unpaired_preference": "a rated answer",
}
"""What the example of each task is."""

T = TypeVar("T")


class TokenizedDocument(NamedTuple):
    """The int32 tokens of a document. A label is the token itself if it is trained, and otherwise NOT_TRAINED."""

    input_ids: np.ndarray
    labels: np.ndarray
    cut: bool
    """Whether tokens were cut off."""
    is_fast: bool = False
    """Whether the tokens are those of fastokens."""
    is_good: bool | None = None
    """Whether a rated answer is good. None: it is not rated."""


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
        engine: TokenizerEngine = "auto",
        task: Task = "supervised",
    ) -> None:
        """Load the tokenizer of `model`. `chat_template` is the text of a template, not its path.

        Raises:
            UserError: see `load_tokenizer` and `ChatTemplate`.
        """
        self.tokenizer = load_tokenizer(model, chat_template)
        self._encoder = DocumentEncoder(self.tokenizer)
        self.sequence_length = sequence_length
        self.overlong = overlong
        self.engine = engine
        self.task: Task = task
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
            engine=options.tokenizer_engine,
            task=options.task,
        )

    def use_fastokens(self) -> None:
        """Let fastokens encode the rows where it is exact. Afterwards, this object cannot be pickled."""
        self._encoder.use_fastokens()

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
        found: list[tuple[int, TokenizedDocument | BadRow]] = []
        for number, (example, encoded) in enumerate(zip(examples, self._encode(examples), strict=True)):
            documents = self._of_example(example, encoded)
            found += [(number, one) for one in ([documents] if isinstance(documents, BadRow) else documents)]
        return _as_table(found)

    def documents(self, row: Mapping[str, Any]) -> list[TokenizedDocument]:
        """Return the documents of one row, as in `__call__`.

        Raises:
            BadRow: the row cannot be used.
        """
        example = self._read(row)
        [encoded] = self._encode([example])
        documents = self._of_example(example, encoded)
        if isinstance(documents, BadRow):
            raise documents
        return documents

    def _of_example(
        self, example: Example | BadRow, encoded: list[EncodedText] | BadRow
    ) -> list[TokenizedDocument] | BadRow:
        documents = encoded if isinstance(encoded, BadRow) else self._cut_all(encoded, isinstance(example, Pair))
        if isinstance(example, Rated) and not isinstance(documents, BadRow):
            return [document._replace(is_good=example.is_good) for document in documents]
        return documents

    def _read(self, row: Mapping[str, Any]) -> Example:
        if row.get("problem"):
            raise BadRow(row["problem"])
        example = from_json(row["row"]) if isinstance(row.get("row"), bytes) else read_example(row)
        if (task := _task(example)) != self.task:  # as own formats and filters may return
            raise BadRow(f"{KINDS[task]}, which needs --task {task}")
        if isinstance(_answers(example)[0], Conversation) and not self.template:
            raise UserError(
                f"{self._model} has no chat template; set chat_template in [preprocess] to "
                f"{suggestion(self.tokenizer)}."
            )
        return example

    def _encode(self, examples: list[Example | BadRow]) -> list[list[EncodedText] | BadRow]:
        """Return the texts of each example. Those of a pair are the chosen and the rejected one."""
        parts = [[example] if isinstance(example, BadRow) else _answers(example) for example in examples]
        encoded = iter(self._encode_each([part for some in parts for part in some]))
        found = [list(islice(encoded, len(some))) for some in parts]
        return [
            _one_text_each(texts) if isinstance(example, Pair | Rated) else texts[0]
            for example, texts in zip(examples, found, strict=True)
        ]

    def _encode_each(self, examples: list[Conversation | Completion | BadRow]) -> list[list[EncodedText] | BadRow]:
        conversations = [example for example in examples if isinstance(example, Conversation)]
        rendered = iter(self.template.batch(conversations) if self.template else [])
        texts = [self._texts(example, rendered) for example in examples]
        good = [text for one in texts if not isinstance(one, BadRow) for text in one]
        encoded = iter(self._encoder.encode(good))
        return [one if isinstance(one, BadRow) else [text for _ in one for text in next(encoded)] for one in texts]

    def _texts(
        self, example: Conversation | Completion | BadRow, rendered: Iterator[list[RenderedText] | TemplateRejection]
    ) -> Sequence[RenderedText | Completion] | BadRow:
        """Return the texts to encode. `rendered` yields the texts of the next conversation."""
        if isinstance(example, BadRow):
            return example
        if isinstance(example, Completion):
            return [example._replace(completion=self._ended(example.completion))]
        documents = next(rendered)
        if isinstance(documents, TemplateRejection):
            return BadRow(str(documents))
        if not documents:
            return BadRow("no assistant turn that is trained")
        if self.task == "preference" and self.template:
            return [self.template.with_end(example, document) for document in documents]
        return documents

    def _ended(self, completion: str) -> str:
        """Return a text that ends with the EOS token, and has it only once there."""
        eos = self.tokenizer.eos_token or ""
        ended = completion.rstrip()
        return ended if eos and ended.endswith(eos) else completion + eos

    def _cut_all(self, encoded: list[EncodedText], is_pair: bool) -> list[TokenizedDocument] | BadRow:
        """Return the documents of one row, or the reason why the row is bad.

        Each has at most `sequence_length` tokens or, in a pair, both together.
        """
        sizes = [len(text.ids) for text in encoded]
        if (sum(sizes) if is_pair else max(sizes)) > self.sequence_length:
            if self.overlong == "error":
                raise UserError(
                    f"a conversation has more than sequence_length = {self.sequence_length} tokens; pass a larger "
                    "--sequence-length, or --overlong truncate."
                )
            if self.overlong == "drop":
                return BadRow("longer than sequence_length")
        if is_pair:
            return self._cut_pair(encoded)
        cut = [self._cut(text, self.sequence_length) for text in encoded]
        good = [document for document in cut if document is not None]
        if good and len(good) < len(cut):  # a whole turn was cut off: count it as a cut
            good[-1] = good[-1]._replace(cut=True)
        return good or BadRow("no trained token within sequence_length")

    def _cut_pair(self, encoded: list[EncodedText]) -> list[TokenizedDocument] | BadRow:
        """Return both documents, with answers that are cut to the same number of tokens."""
        prompts = [text.spans[0][0] if text.spans else len(text.ids) for text in encoded]
        answers = [len(text.ids) - prompt for text, prompt in zip(encoded, prompts, strict=True)]
        room = self.sequence_length - sum(prompts)
        longest = max(answers) if sum(answers) <= room else max(room // 2, room - min(answers))
        cut = [self._cut(text, prompt + longest) for text, prompt in zip(encoded, prompts, strict=True)]
        good = [document for document in cut if document is not None]
        if len(good) < 2:
            return BadRow("no trained token of both answers within sequence_length")
        if np.array_equal(good[0].input_ids, good[1].input_ids):
            return BadRow("chosen and rejected are equal within sequence_length")
        return good

    def _cut(self, text: EncodedText, length: int) -> TokenizedDocument | None:
        """Return a document of at most so many tokens, or None if no trained token is left."""
        tokens = np.array(text.ids[: max(0, length)], np.int32)
        labels = np.full(len(tokens), NOT_TRAINED, np.int32)
        # do not train the first token: it has no context, because the preceding tokens belong to another document
        spans = [(max(start, 1), min(stop, len(tokens))) for start, stop in text.spans]
        spans = [(start, stop) for start, stop in spans if start < stop]
        for start, stop in spans:
            labels[start:stop] = tokens[start:stop]
        return TokenizedDocument(tokens, labels, len(text.ids) > len(tokens), text.is_fast) if spans else None


def _task(example: Example) -> Task:
    if isinstance(example, Pair):
        return "preference"
    return "unpaired_preference" if isinstance(example, Rated) else "supervised"


def _answers(example: Example) -> list[Conversation | Completion]:
    if isinstance(example, Pair):
        return list(example)
    return [example.answer if isinstance(example, Rated) else example]


def _one_text_each(answers: list[list[EncodedText] | BadRow]) -> list[EncodedText] | BadRow:
    """Return the text of each answer that somebody judged, or the reason why one is bad."""
    found: list[EncodedText] = []
    for texts in answers:
        if isinstance(texts, BadRow):
            return texts
        if len(texts) != 1:
            return BadRow("an answer whose turns the chat template renders as several documents")
        found += texts
    return found


def _or_bad_row(function: Callable[..., T], *arguments: Any) -> T | BadRow:
    try:
        return function(*arguments)
    except BadRow as bad:
        return bad


def _as_table(found: list[tuple[int, TokenizedDocument | BadRow]]) -> pa.Table:
    """Return numbered documents with the schema DOCUMENTS, without making a Python object of each token."""
    none = TokenizedDocument(np.zeros(0, np.int32), np.zeros(0, np.int32), cut=False)
    documents = [none if isinstance(one, BadRow) else one for _, one in found]
    columns = {
        "row": [number for number, _ in found],
        "input_ids": _as_lists([document.input_ids for document in documents]),
        "labels": _as_lists([document.labels for document in documents]),
        "cut": [document.cut for document in documents],
        "problem": [str(one) if isinstance(one, BadRow) else None for _, one in found],
        "is_fast": [document.is_fast for document in documents],
        "is_good": [document.is_good for document in documents],
    }
    return pa.table(columns, DOCUMENTS)


def _as_lists(arrays: list[np.ndarray]) -> pa.ListArray:
    offsets = np.cumsum([0, *map(len, arrays)], dtype=np.int32)
    return pa.ListArray.from_arrays(offsets, np.concatenate([np.zeros(0, np.int32), *arrays]))
