"""Splits texts into chunks."""

from collections.abc import Iterator

from tokenizers import Tokenizer

CHARACTERS_PER_TOKEN = 16  # of ordinary text; a long word can be a single unknown token
SECTION_CHARACTERS = 2**20  # of a long text, tokenized at once; an offset takes about 120 bytes for each token


class Chunker:
    """Splits a text into chunks of at most `tokens` tokens, which overlap by about `overlap` tokens.

    A chunk has at most CHARACTERS_PER_TOKEN times as many characters as `tokens`.
    """

    def __init__(self, tokenizer: Tokenizer, tokens: int, overlap: int) -> None:
        self._tokenizer = tokenizer
        self._tokens = tokens
        self._overlap = overlap

    def __call__(self, text: str) -> Iterator[str]:
        """Yield the chunks in order."""
        limit = CHARACTERS_PER_TOKEN * self._tokens
        for section in _cut(text, SECTION_CHARACTERS):
            for chunk in self._chunks(section):
                if len(chunk) <= limit:
                    yield chunk
                else:  # a part of a long word can have more tokens than the whole word
                    for part in _cut(chunk, limit):
                        yield from self._chunks(part)

    def _chunks(self, text: str) -> list[str]:
        offsets = self._tokenizer.encode(text, add_special_tokens=False).offsets
        chunks, start = [], 0
        while len(offsets) - start > self._tokens:
            stop = _word_start(text, offsets, start, start + self._tokens)
            chunks.append(text[offsets[start][0] : offsets[stop][0]].strip())
            next_start = stop - self._overlap
            start = _word_start(text, offsets, start, next_start) if next_start > start else stop
        chunks.append(text[offsets[start][0] if start else 0 :].strip())
        return [chunk for chunk in chunks if chunk]


def _word_start(text: str, offsets: list[tuple[int, int]], after: int, token: int) -> int:
    """Return the last token in (after, token] that starts a word, or `token` if there is none."""
    for number in range(token, after, -1):
        first = offsets[number][0]
        if text[first].isspace() or text[first - 1].isspace():
            return number
    return token


def _cut(text: str, limit: int) -> Iterator[str]:
    """Yield consecutive parts of at most `limit` characters, which end after a word unless a word is very long."""
    start = 0
    while len(text) - start > limit:
        part = text[start : start + limit]
        last = "" if part[-1].isspace() else part.split()[-1]
        if len(last) <= limit // 2:
            part = part[: limit - len(last)]
        yield part
        start += len(part)
    yield text[start:]
