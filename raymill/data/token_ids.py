"""Token ids from fastokens, in a thirtieth of the time of Hugging Face's tokenizers.

fastokens tells no offsets. But a token of a byte-level vocabulary stands for a known number of bytes of its text, so
their sum says where it ends. Where the sum over a text differs from the size of the text, the ids are not used.
"""

import importlib.metadata
import unicodedata
from typing import Any, Literal, NamedTuple, TypedDict, get_args

import msgspec
import numpy as np
from tokenizers import Tokenizer

PACKAGE = "fastokens"
Form = Literal["NFC", "NFD", "NFKC", "NFKD"]
PROBES = (
    "Hello world, it's 1234567 and 3.14!",
    "caf\u00e9 na\u00efve \u00c5ngstr\u00f6m",
    "cafe\u0301 \ufb01 \u212b \u1100\u1161",
    "\u4f60\u597d\uff0c\u4e16\u754c \u65e5\u672c\u8a9e \ud55c\uad6d\uc5b4",
    "\u0939\u093f\u0928\u094d\u0926\u0940 \u0639\u0631\u0628\u064a",
    "\U0001f600\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea",
    "  two\n\n\n   spaces\t\ttabs \r\n\r\n end   ",
    " " * 70 + "x",
    "a" * 300,
    "\u00a0\u2003\u200b\ufeff\u2028\u0085x",
    "def f(x):\n        return {'a': [1, 2], \"b\": x}  # caf\u00e9\n",
    "DON'T I'LL you'Re \u017fS \u0130I \u01c5",
    "\u0663\u0664 \u00bd \u2167 x\u00b2",
    "\x00\x01\x7f",
    "<|not_a_token|> <s> </s> [INST] <unk>",
    "https://example.org/a?b=c&d=%20e",
)
NEIGHBOURS = (("x", "y"), (" x ", "\n y "), ("\n", ""))


class UnsupportedTokenizer(Exception):
    """fastokens cannot give the ids of a tokenizer. The message says why."""


class Encoded(NamedTuple):
    """The tokens of several texts, one text after the other."""

    ids: np.ndarray
    """int32 (tokens,)."""
    ends: np.ndarray
    """int64 (tokens,): the number of bytes of all texts up to the end of the token."""
    starts: np.ndarray
    """int64 (texts + 1,): the number of tokens before each text."""
    is_exact: np.ndarray
    """bool (texts,): whether the tokens stand for exactly the bytes of the text."""


class Model(TypedDict):
    """The model in a definition. Its merges are left out: to decode those of a large vocabulary takes a second."""

    type: str
    vocab: Any


class Definition(TypedDict):
    """The parts of a tokenizer.json that say how many bytes a token stands for."""

    added_tokens: list[dict[str, Any]]
    normalizer: dict[str, Any] | None
    pre_tokenizer: dict[str, Any] | None
    model: Model


class TokenIds:
    """Encodes texts with fastokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Build fastokens' tokenizer, and compare it with `tokenizer` on texts that tokenizers treat differently.

        For a vocabulary of 150,000 tokens, this takes two to four CPU seconds. `tokenizer` neither pads nor truncates.

        Raises:
            UnsupportedTokenizer: the tokens are not made of bytes, or fastokens encodes a text differently.
        """
        text = tokenizer.to_str()
        definition = msgspec.json.decode(text, type=Definition)
        self._lengths = token_lengths(definition)
        self._form = _normal_form(definition["normalizer"])
        import fastokens  # late, because only workers that pack many rows need it

        try:
            self._fast = fastokens.Tokenizer.from_json_str(text)
        except ValueError as error:
            raise UnsupportedTokenizer(str(error)) from None
        texts = [*PROBES, *_with_neighbours(definition["added_tokens"])]
        encoded = self.encode(texts)
        expected = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        for text, ids, encoding in zip(texts, np.split(encoded.ids, encoded.starts[1:-1]), expected, strict=True):
            if ids.tolist() != encoding.ids:
                raise UnsupportedTokenizer(f"{PACKAGE} {version()} encodes {text[:40]!r} differently")

    def encode(self, texts: list[str]) -> Encoded:
        """Return the tokens of texts, without those that the tokenizer adds to a prompt."""
        ids_buffer, starts_buffer = self._fast.encode_batch_flat(texts)
        ids = np.frombuffer(ids_buffer, np.uint32).astype(np.int32)
        starts = np.frombuffer(starts_buffer, np.uint64).astype(np.int64)
        ends = np.cumsum(self._lengths[ids])
        sizes = np.diff(np.concatenate([[0], ends])[starts])
        return Encoded(ids, ends, starts, sizes == list(map(self._size, texts)))

    def _size(self, text: str) -> int:
        """Return the number of bytes that the tokens of a text must stand for, or -1 if the tokenizer changes it."""
        if text.isascii():
            return len(text)
        if self._form and not unicodedata.is_normalized(self._form, text):
            return -1
        return len(text.encode())


def version() -> str:
    """Return the version of fastokens."""
    return importlib.metadata.version(PACKAGE)


def token_lengths(definition: Definition) -> np.ndarray:
    """Return the number of bytes of text that each token stands for, int64 (vocabulary,).

    `definition` is the content of a tokenizer.json. An added token stands for its content.

    Raises:
        UnsupportedTokenizer: the tokens are not made of bytes.
    """
    steps = _steps(definition["pre_tokenizer"])
    byte_level = [step for step in steps if step["type"] == "ByteLevel"]
    if definition["model"]["type"] != "BPE" or not byte_level or any(map(_adds_space, byte_level)):
        raise UnsupportedTokenizer("its tokens are not made of bytes")
    alphabet = {chr(byte) for byte in (*range(33, 127), *range(161, 173), *range(174, 256))}
    alphabet |= {chr(256 + at) for at in range(256 - len(alphabet))}
    added = {token["id"]: token["content"] for token in definition["added_tokens"]}
    vocabulary = definition["model"]["vocab"]
    lengths = np.zeros(max((*vocabulary.values(), *added)) + 1, np.int64)
    for token, token_id in vocabulary.items():
        if token_id not in added and not alphabet.issuperset(token):
            raise UnsupportedTokenizer(f"its token {token!r} is not made of bytes")
        lengths[token_id] = len(token)
    for token_id, content in added.items():
        lengths[token_id] = len(content.encode())
    return lengths


def trims_offsets(definition: dict[str, Any]) -> bool:
    """Return whether a tokenizer's offsets leave out white space at the edges of tokens.

    `definition` is the content of a tokenizer.json.
    """
    processor = definition["post_processor"] or {}
    return any(step.get("trim_offsets") for step in processor.get("processors", [processor]))


def _normal_form(normalizer: dict[str, Any] | None) -> Form | None:
    """Return the form of Unicode into which a normalizer brings texts, or None if there is no normalizer.

    Raises:
        UnsupportedTokenizer: it changes texts in another way.
    """
    if normalizer and normalizer["type"] not in get_args(Form):
        raise UnsupportedTokenizer(f"its normalizer is {normalizer['type']}")
    return normalizer["type"] if normalizer else None


def _steps(pre_tokenizer: dict[str, Any] | None) -> list[dict[str, Any]]:
    return pre_tokenizer.get("pretokenizers", [pre_tokenizer]) if pre_tokenizer else []


def _adds_space(step: dict[str, Any]) -> bool:
    return step.get("add_prefix_space", False)


def _with_neighbours(added: list[dict[str, Any]]) -> list[str]:
    return [f"{before}{token['content']}{after}" for token in added for before, after in NEIGHBOURS]
