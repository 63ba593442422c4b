"""Encode documents with the tokens that a server gives to the model, and those that the model then generates.

A server encodes a prompt as a whole, and the model generates tokens after it. So a turn is encoded apart from the text
before it. Otherwise, the end of the prompt and the beginning of the turn could share a token.
"""

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenizers import Encoding, Tokenizer

from raymill.data.template_renderer import RenderedText
from raymill.data.tokenizer import SpecialTokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

WINDOW = 16  # characters before the start of a turn that decide about the tokens there
WORD = re.compile(r"\s{0,32}\S{0,32}\s?")  # matches the text after it that decides
MAX_BOUNDARIES = 100_000


class EncodedText(NamedTuple):
    """The tokens of a text, and the spans (start, stop) of those to train on."""

    ids: list[int]
    spans: list[tuple[int, int]]


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
        definition = json.loads(self._tokenizer.to_str())
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

    def encode(self, document: RenderedText) -> list[EncodedText]:
        """Return the tokens of a text that a chat template rendered.

        All text before a trained turn has the tokens that a server gives to the model. If a server would encode an
        earlier turn differently from the tokens that the model generates, the turns after it are in another document.
        """
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
                return [EncodedText(ids, trained), *self.encode(RenderedText(text, later))]
        return [EncodedText(ids, trained)]

    def encode_completion(self, prompt: str, completion: str) -> EncodedText:
        """Return the tokens of a text without a chat template. The tokenizer adds its special tokens to the prompt."""
        if prompt:
            ids = self._special_tokens.prompt(self._encode(prompt, []).ids)
            first = len(ids)
            ids += self._encode(completion, ids).ids
        else:
            ids = self._special_tokens.start(self._encode(completion, []).ids)
            first = len(self._special_tokens.before)
        return EncodedText(ids, [(first, len(ids))])

    def _is_boundary(self, text: str, at: int, before: list[int]) -> bool:
        """Return whether the text around a position has the same tokens together as apart.

        `before` are the tokens before the position.
        """
        if not before or before[-1] in self._sealing:
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
