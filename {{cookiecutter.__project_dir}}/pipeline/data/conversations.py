"""Turn rows into documents: tokens, of which only what the model should say is trained."""

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

import settings
from pipeline.data.chat_template import ChatTemplate, Conversation, Rejected, Rendered, remedy
from pipeline.data.options import Overlong, PastReasoning, PreprocessOptions, Turns
from pipeline.data.row_formats import BadRow, Completion, Example, example
from pipeline.ray_support import model_cache

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerFast

NOT_TRAINED = -100  # the label that Hugging Face losses skip
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


class Document(NamedTuple):
    """Tokens, int32: `labels` repeats a token where it is trained and is NOT_TRAINED elsewhere."""

    input_ids: np.ndarray
    labels: np.ndarray
    cut: bool


def canonical(value: object) -> bytes:
    """Return a value as JSON that depends on nothing but its content.

    Raises:
        BadRow: a text is not Unicode: it holds half of a surrogate pair.
    """
    return _dumped(value, sort_keys=True)


def _dumped(value: object, *, sort_keys: bool) -> bytes:
    text = json.dumps(value, sort_keys=sort_keys, ensure_ascii=False, separators=(",", ":"), default=str)
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise BadRow("text that is not valid Unicode") from None


def to_json(found: Example) -> bytes:
    """Return an example as JSON, the same for parquet and JSONL. Arguments and schemas keep the order of their keys.

    Raises:
        BadRow: as `canonical`.
    """
    return _dumped({name: value for name, value in found._asdict().items() if value}, sort_keys=False)


def from_json(row: bytes) -> Example:
    """Return the example that `to_json` encoded."""
    fields = json.loads(row)
    if "messages" in fields:
        return Conversation(fields["messages"], fields.get("tools"))
    return Completion(fields.get("prompt", ""), fields["completion"])


def read_template(path: str | None) -> str | None:
    """Return the text of a chat template, from a file of this project or from a model. None gives None.

    Raises:
        UserError: the file cannot be read, or the model has no template.
    """
    if path is None:
        return None
    file = settings.PROJECT / path
    if file.suffix != ".jinja" and not file.is_file():
        template = load_tokenizer(path, setting="chat_template").chat_template
        if not template:
            raise settings.UserError(f"{path} has no chat template; correct chat_template in [preprocess].")
        return template
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise settings.UserError(
            f"the chat template {path} cannot be read ({error.strerror}); correct chat_template in [preprocess]."
        ) from None


def load_tokenizer(
    model: str, chat_template: str | None = None, *, setting: str = "model"
) -> "PreTrainedTokenizerFast":
    """The tokenizer of a Hugging Face folder or hub id, with `chat_template` (its text) in place of its own.

    `setting` is the one in [preprocess] that names `model`, for the message.

    Raises:
        UserError: it cannot be loaded, or cannot map characters to tokens.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # seconds, spared to workers that only read rows

    try:
        folder = model_cache.on_this_node(model_cache.find(model), weights=False)
        # mistral-common's tokenizer, which a tekken.json would select, has neither offsets nor a chat template
        tokenizer = AutoTokenizer.from_pretrained(folder, mistral_format=False)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise settings.UserError(
            f"{model} gives no tokenizer ({reason}); set {setting} in [preprocess] to a folder with one, or to a hub "
            "id."
        ) from None
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise settings.UserError(
            f"{model} has a tokenizer without a tokenizer.json, so no mask can be made; convert it."
        )
    if chat_template or tokenizer.chat_template:
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


def eos_ids(model: str, tokenizer: "PreTrainedTokenizerFast") -> set[int]:
    """Return the tokens at which vLLM stops: those of generation_config.json or config.json, and the tokenizer's."""
    from transformers import AutoConfig, GenerationConfig

    folder = model_cache.on_this_node(model_cache.find(model), weights=False)
    ids: int | list[int] | None = None
    with contextlib.suppress(OSError, ValueError):
        ids = GenerationConfig.from_pretrained(folder).eos_token_id
    if ids is None:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            ids = AutoConfig.from_pretrained(folder).get_text_config().eos_token_id
    return {*(ids if isinstance(ids, list) else [ids]), tokenizer.eos_token_id} - {None}


class Tokenize:
    """Turns a table of rows into a table of documents; made for `Dataset.map_batches(batch_format="pyarrow")`."""

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
        """`chat_template` is the text of a template, not its path.

        Raises:
            UserError: as `load_tokenizer` and `ChatTemplate`.
        """
        self.tokenizer = load_tokenizer(model, chat_template)
        self.tokenizer.backend_tokenizer.no_padding()  # a tokenizer.json may ask for both
        self.tokenizer.backend_tokenizer.no_truncation()
        self.sequence_length = sequence_length
        self.overlong = overlong
        self._model = model
        self.template = (
            ChatTemplate(
                self.tokenizer,
                eos_ids(model, self.tokenizer),
                given=chat_template is not None,
                turns=turns,
                past_reasoning=past_reasoning,
            )
            if self.tokenizer.chat_template
            else None
        )

    @property
    def eos_ids(self) -> list[int]:
        """Stop tokens of a model that is trained on the documents. Empty: those of the base model."""
        return self.template.eos_ids if self.template else []

    def __call__(self, table: pa.Table) -> pa.Table:
        """Return the documents of `table`, as DOCUMENTS has them; `row` is the position in `table`.

        A row gives one document, or several if its template renders earlier turns differently later. A bad row gives
        one with a `problem` and no tokens. Rows are as `pipeline.data.rows` reads them, or as published.
        """
        read = [_or_problem(self._read, row) for row in table.to_pylist()]
        rendered = self._rendered(read)
        texts = [each.text for good in rendered if not isinstance(good, BadRow) for each in good]
        encodings = iter(self.tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False))
        made: list[dict[str, Any]] = []
        for number, found in enumerate(rendered):
            cut = found if isinstance(found, BadRow) else self._cut_all([(one, next(encodings)) for one in found])
            made += [_as_row(number, document) for document in ([cut] if isinstance(cut, BadRow) else cut)]
        return pa.Table.from_pylist(made, DOCUMENTS)

    def documents(self, row: Mapping[str, Any]) -> list[Document]:
        """Return the documents of one row, as in `__call__`.

        Raises:
            BadRow: nothing can be trained on it.
        """
        [rendered] = self._rendered([self._read(row)])
        if isinstance(rendered, BadRow):
            raise rendered
        encodings = self.tokenizer.backend_tokenizer.encode_batch(
            [each.text for each in rendered], add_special_tokens=False
        )
        made = self._cut_all(list(zip(rendered, encodings, strict=True)))
        if isinstance(made, BadRow):
            raise made
        return made

    def _read(self, row: Mapping[str, Any]) -> Example:
        if row.get("problem"):
            raise BadRow(row["problem"])
        found = from_json(row["row"]) if isinstance(row.get("row"), bytes) else example(row)
        if isinstance(found, Conversation) and not self.template:
            raise settings.UserError(
                f"{self._model} has no chat template; set chat_template in [preprocess] to {remedy(self.tokenizer)}."
            )
        return found

    def _rendered(self, read: list[Example | BadRow]) -> list[list[Rendered] | BadRow]:
        conversations = [found for found in read if isinstance(found, Conversation)]
        made = iter(self.template.batch(conversations) if self.template else [])
        return [
            found
            if isinstance(found, BadRow)
            else [self._plain(found)]
            if isinstance(found, Completion)
            else _or_bad(next(made))
            for found in read
        ]

    def _plain(self, found: Completion) -> Rendered:
        """Return the text with its BOS and EOS tokens. All of it but the prompt is trained."""
        begin = (self.tokenizer.bos_token or "") + found.prompt
        text = begin + found.completion + (self.tokenizer.eos_token or "")
        return Rendered(text, [(len(begin), len(text))])

    def _cut_all(self, encoded: list[tuple[Rendered, "Encoding"]]) -> list[Document] | BadRow:
        """Return the documents of one row within `sequence_length`, or why the row is bad."""
        if any(len(encoding) > self.sequence_length for _, encoding in encoded):
            if self.overlong == "error":
                raise settings.UserError(
                    f"a conversation has more than sequence_length = {self.sequence_length} tokens; pass a larger "
                    "--sequence-length, or --overlong truncate."
                )
            if self.overlong == "drop":
                return BadRow("longer than sequence_length")
        cut = [self._cut(rendered, encoding) for rendered, encoding in encoded]
        good = [document for document in cut if document is not None]
        if good and len(good) < len(cut):  # a whole turn was cut off: count it
            good[-1] = good[-1]._replace(cut=True)
        return good or BadRow("no trained token within sequence_length")

    def _cut(self, rendered: Rendered, encoding: "Encoding") -> Document | None:
        """Return a document of at most `sequence_length` tokens, or None if no trained token is left."""
        tokens, trained = np.array(encoding.ids, np.int32), _within(rendered.spans, encoding)
        # the first token has no context of its own: what lies before it in a packed row is another document
        trained[:1] = False
        kept = slice(self.sequence_length)
        if not trained[kept].any():
            return None
        labels = np.where(trained[kept], tokens[kept], np.int32(NOT_TRAINED))
        return Document(tokens[kept], labels, cut=len(tokens) > self.sequence_length)


def load(options: PreprocessOptions, model: str = "") -> Tokenize:
    """Return the tokenization that the settings describe. `model` replaces the one of the settings."""
    return Tokenize(
        model or options.model,
        options.sequence_length,
        read_template(options.chat_template),
        turns=options.turns,
        past_reasoning=options.past_reasoning,
        overlong=options.overlong,
    )


def _within(spans: list[tuple[int, int]], encoding: "Encoding") -> np.ndarray:
    """Return which tokens lie in the spans of characters, (start, stop)."""
    found = np.zeros(len(encoding), bool)
    for start, stop in spans:
        first, last = _token(encoding, range(start, stop)), _token(encoding, range(stop - 1, start - 1, -1))
        if first is not None and last is not None:
            found[first : last + 1] = True
    return found


def _token(encoding: "Encoding", characters: range) -> int | None:
    """Return the first token of these characters: a normalizer may drop or join some."""
    return next((token for at in characters if (token := encoding.char_to_token(at)) is not None), None)


def _or_bad(made: list[Rendered] | Rejected) -> list[Rendered] | BadRow:
    if isinstance(made, Rejected):
        return BadRow(str(made))
    return made or BadRow("no assistant turn that is trained")


def _or_problem(make: Callable[..., T], *arguments: Any) -> T | BadRow:
    try:
        return make(*arguments)
    except BadRow as bad:
        return bad


def _as_row(number: int, made: Document | BadRow) -> dict[str, Any]:
    if isinstance(made, BadRow):
        return {"row": number, "input_ids": [], "labels": [], "cut": False, "problem": str(made)}
    return made._asdict() | {"row": number}
