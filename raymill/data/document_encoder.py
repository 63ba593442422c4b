"""Encode documents with the tokens that a server gives to the model, and those that the model then generates.

A server encodes a prompt as a whole, and the model generates tokens after it. So a turn is encoded apart from the text
before it. Otherwise, the end of the prompt and the beginning of the turn could share a token.
"""

import contextlib
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from tokenizers import Encoding, Tokenizer

from raymill.data import token_ids
from raymill.data.examples import Completion
from raymill.data.template_renderer import RenderedText
from raymill.data.token_ids import Encoded, TokenIds, UnsupportedTokenizer
from raymill.data.tokenizer import SpecialTokens
from raymill.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

WINDOW = 16  # characters before the start of a turn that decide about the tokens there
WORD = re.compile(r"\s{0,32}\S{0,32}\s?")  # matches the text after it that decides
MAX_BOUNDARIES = 100_000
COMPARED = 100  # one of so many texts is also encoded by Hugging Face's tokenizer


class EncodedText(NamedTuple):
    """The tokens of a text, and the spans (start, stop) of those to train on."""

    ids: Sequence[int] | np.ndarray
    spans: list[tuple[int, int]]
    is_fast: bool = False
    """Whether the ids are those of fastokens."""


class _Joined(NamedTuple):
    """The encodings of two texts, which stand in for one `Encoding`."""

    first: Encoding
    second: Encoding
    start: int
    """Number of characters in the first text."""

    @property
    def ids(self) -> list[int]:
        return self.first.ids + self.second.ids

    def char_to_token(self, at: int) -> int | None:
        if at < self.start:
            return self.first.char_to_token(at)
        token = self.second.char_to_token(at - self.start)
        return None if token is None else len(self.first) + token


class DocumentEncoder:
    """Encodes documents: each trained turn apart from the text before it."""

    def __init__(self, tokenizer: "PreTrainedTokenizerFast") -> None:
        """Switches off the padding and the truncation of `tokenizer`."""
        self._tokenizer: Tokenizer = tokenizer.backend_tokenizer
        self._tokenizer.no_padding()  # a tokenizer.json may enable padding and truncation
        self._tokenizer.no_truncation()
        self._special_tokens = SpecialTokens.of(tokenizer)
        self._token_ids: TokenIds | None = None
        definition = json.loads(self._tokenizer.to_str())
        self._trims_offsets = token_ids.trims_offsets(definition)
        unknown = self._tokenizer.token_to_id(definition["model"].get("unk_token") or "")
        decoder = self._tokenizer.get_added_tokens_decoder()
        added = {token_id: token for token_id, token in decoder.items() if token_id != unknown}
        self._added = frozenset(added)
        # text after these tokens cannot change the tokens before it; a token with rstrip includes white space after it
        self._sealing = frozenset(token_id for token_id, token in added.items() if not token.rstrip)
        self._boundaries: dict[tuple[str, str], bool] = {}
        schemes = set(_remove_dummy_prefixes(definition))
        self._has_prefix_after_tokens = "always" in schemes
        # encodes text that continues other text
        self._continuing = Tokenizer.from_str(json.dumps(definition)) if schemes else None

    def use_fastokens(self) -> None:
        """Let fastokens encode what it encodes as Hugging Face's tokenizer does.

        Afterwards, this object cannot be pickled. If fastokens does not support the tokenizer, nothing changes.
        """
        with contextlib.suppress(UnsupportedTokenizer):
            self._token_ids = TokenIds(self._tokenizer)

    def encode(self, texts: Sequence[RenderedText | Completion]) -> list[list[EncodedText]]:
        """Return the tokens of each text.

        All text before a trained turn has the tokens that a server gives to the model. If a server would encode an
        earlier turn differently from the tokens that the model generates, the turns after it are in another document.

        Raises:
            UserError: fastokens encodes one of the texts that are compared differently.
        """
        if not self._token_ids:
            return list(map(self._encode_apart, texts))
        parts = list(map(_parts, texts))
        encoded = self._token_ids.encode([text for texts in parts for text in texts])
        starts, is_exact = encoded.starts.tolist(), encoded.is_exact.tolist()
        found, first = [], 0
        for text, own in zip(texts, parts, strict=True):
            stop = first + len(own)
            fast = all(is_exact[first:stop]) and self._from_tokens(text, own, encoded, starts[first : stop + 1])
            found.append([fast] if fast else self._encode_apart(text))
            if fast and zlib.crc32("".join(own).encode()) % COMPARED == 0:
                _refuse_difference(fast, self._encode_apart(text))
            first = stop
        return found

    def _from_tokens(
        self, text: RenderedText | Completion, parts: list[str], encoded: Encoded, starts: list[int]
    ) -> EncodedText | None:
        """Return the tokens of a text, or None if its parts must be encoded in another way.

        Part k has the tokens [starts[k], starts[k + 1]) of `encoded`.
        """
        ids = encoded.ids[starts[0] : starts[-1]]
        if isinstance(text, Completion):
            prompt, completion = np.split(ids, [starts[1] - starts[0]])
            return self._completion(text, prompt.tolist(), completion.tolist())._replace(is_fast=True)
        spans = []
        for number, (start, stop) in enumerate(text.spans, 1):
            if number < len(text.spans) and not self._is_boundary(text.text, start, ids[: starts[number] - starts[0]]):
                return None
            tokens, written = starts[number + 1] - starts[number], stop - start
            if written < len(parts[number]):
                if self._trims_offsets and text.text[stop - 1].isspace():
                    return None
                before = encoded.ends[starts[number] - 1] if starts[number] else 0
                size = len(parts[number][: written - 1].encode())
                ends = encoded.ends[starts[number] : starts[number + 1]]
                tokens = int(np.searchsorted(ends, before + size, "right")) + 1
            first = starts[number] - starts[0]
            spans.append((first, first + tokens))
        return EncodedText(ids, spans, is_fast=True)

    def _encode_apart(self, text: RenderedText | Completion) -> list[EncodedText]:
        """Return the tokens of one text from Hugging Face's tokenizer."""
        if isinstance(text, RenderedText):
            return self._encode_document(text)
        prompt = self._encode(text.prompt, []).ids if text.prompt else []
        before = self._special_tokens.prompt(prompt) if text.prompt else []
        return [self._completion(text, prompt, self._encode(text.completion, before).ids)]

    def _encode_document(self, document: RenderedText) -> list[EncodedText]:
        text, spans = document
        ids = self._encode(text[: spans[0][0]], []).ids
        trained: list[tuple[int, int]] = []
        for number, (start, stop) in enumerate(spans, 1):
            later = spans[number:]
            is_separate = bool(later) and not self._is_boundary(text, start, ids)
            end = stop if is_separate else later[0][0] if later else len(text)
            turn = self._encode(text[start:end], ids, offsets=stop < end)
            trained.append((len(ids), len(ids) + _count_until(stop - start, turn, end - start)))
            ids += turn.ids
            if is_separate:
                return [EncodedText(ids, trained), *self._encode_document(RenderedText(text, later))]
        return [EncodedText(ids, trained)]

    def _completion(self, text: Completion, prompt: list[int], completion: list[int]) -> EncodedText:
        """Return the tokens of a text without a chat template. The tokenizer adds its special tokens to the prompt."""
        if text.prompt:
            ids = self._special_tokens.prompt(prompt)
            return EncodedText(ids + completion, [(len(ids), len(ids) + len(completion))])
        ids = self._special_tokens.start(completion)
        return EncodedText(ids, [(len(self._special_tokens.before), len(ids))])

    def _is_boundary(self, text: str, at: int, before: Sequence[int] | np.ndarray) -> bool:
        """Return whether the text around a position has the same tokens together as apart.

        `before` are the tokens before the position.
        """
        if not len(before) or before[-1] in self._sealing:
            return True
        word = WORD.match(text, at)
        around = text[max(0, at - WINDOW) : at], word[0] if word else ""
        if around not in self._boundaries:
            if len(self._boundaries) == MAX_BOUNDARIES:
                self._boundaries.clear()
            first = self._encode(around[0], []).ids
            together = self._encode("".join(around), []).ids
            self._boundaries[around] = together == first + self._encode(around[1], first).ids
        return self._boundaries[around]

    def _encode(self, text: str, before: list[int], *, offsets: bool = False) -> Encoding | _Joined:
        """Return the encoding of a text that follows the tokens `before`.

        Only with `offsets` does it map characters to tokens.
        """
        if not self._continuing or not before:
            return _encode(self._tokenizer, text, offsets)
        if not self._has_prefix_after_tokens:
            return _encode(self._continuing, text, offsets)
        if before[-1] in self._added:
            return _encode(self._tokenizer, text, offsets)
        # the tokenizer adds a space after each added token, but none before the text, because text comes before it
        encoding = _encode(self._tokenizer, text, offsets=True)
        tokens = zip(encoding.ids, encoding.offsets, strict=True)
        start = next((start for token, (start, _) in tokens if token in self._added), len(text))
        return _Joined(
            _encode(self._continuing, text[:start], offsets), _encode(self._tokenizer, text[start:], offsets), start
        )


def _parts(text: RenderedText | Completion) -> list[str]:
    """Return the parts of a text that are encoded apart: the text before the first trained turn, and each turn."""
    if isinstance(text, Completion):
        return [text.prompt, text.completion]
    bounds = [0, *(start for start, _ in text.spans), len(text.text)]
    return [text.text[start:stop] for start, stop in pairwise(bounds)]


def _refuse_difference(fast: EncodedText, expected: list[EncodedText]) -> None:
    """Raise a UserError if fastokens has encoded a text differently."""
    [only] = expected if len(expected) == 1 else [None]
    if only is None or list(fast.ids) != list(only.ids) or fast.spans != only.spans:
        raise UserError(
            f"fastokens {token_ids.version()} encodes a row differently from Hugging Face's tokenizer; set "
            'tokenizer_engine = "transformers" in [preprocess].'
        )


def _encode(tokenizer: Tokenizer, text: str, offsets: bool) -> Encoding:
    if offsets:
        return tokenizer.encode(text, add_special_tokens=False)
    return tokenizer.encode_batch_fast([text], add_special_tokens=False)[0]


def _count_until(stop: int, encoding: Encoding | _Joined, length: int) -> int:
    """Return the number of tokens that begin in the first `stop` of `length` characters."""
    if stop == length:
        return len(encoding.ids)
    # a normalizer may drop or join characters, so look for the last one that has a token
    found = (encoding.char_to_token(at) for at in range(stop - 1, -1, -1))
    return next((token + 1 for token in found if token is not None), 0)


def _remove_dummy_prefixes(definition: dict[str, Any]) -> Iterator[str]:
    """Change the definition of a tokenizer so that it adds no space before a text.

    Yield for each such space where the tokenizer added it: "first" at the start of a text, "always" also after each
    added token.
    """
    for step in (*_steps(definition["normalizer"]), *_steps(definition["pre_tokenizer"])):
        if step["type"] == "Prepend":
            step["prepend"] = ""
            yield "always"
        elif step["type"] == "Metaspace" and step["prepend_scheme"] != "never":
            yield step["prepend_scheme"]
            step["prepend_scheme"] = "never"
        elif step.get("add_prefix_space"):
            step["add_prefix_space"] = False
            yield "always"


def _steps(step: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Yield a normalizer or pre-tokenizer, or the parts of a sequence of them."""
    if step and step["type"] == "Sequence":
        for inner in step.get("normalizers") or step.get("pretokenizers") or []:
            yield from _steps(inner)
    elif step:
        yield step
