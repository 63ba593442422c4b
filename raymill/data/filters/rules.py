"""Published rules that tell running text from lists, menus, spam and machine output.

Gopher's are those of Rae et al. 2021 (arXiv:2112.11446), appendix A.1.1 and table A1, for English text. FineWeb's are
those of Penedo et al. 2024 (arXiv:2406.17557), section 3.6. They were made for pages of the web.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from raymill.data.filters.options import Rules

WORD = re.compile(r"\w+(?:['\u2019-]\w+)*")
STOP_WORDS = {"the", "be", "to", "of", "and", "that", "have", "with"}
BULLETS = ("\u2022", "\u2023", "\u25cf", "\u25b6", "-", "*")
ELLIPSES = ("...", "\u2026")
LINE_ENDS = (".", "!", "?", '"', "'", "\u201d", "\u3002", "\uff01", "\uff1f")
MAX_TOP_SHARE = {2: 0.20, 3: 0.18, 4: 0.16}
"""By the length of a run of words: the largest share of the text's characters that its most frequent run may have."""
MAX_REPEATED_SHARE = {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10}
"""By the length of a run of words: the largest share of the text's characters in runs that occur twice."""


def broken(text: str, rules: Sequence[Rules]) -> str | None:
    """Return the first rule that a text breaks, or None."""
    return next((f"{name}: {reason}" for name in rules for reason in CHECKS[name](text)), None)


def _gopher(text: str) -> Iterator[str]:
    words = text.split()
    if not 50 <= len(words) <= 100_000:
        yield "not between 50 and 100,000 words"
        return
    if not 3 <= sum(map(len, words)) / len(words) <= 10:
        yield "words of unusual length"
    if max(text.count("#"), sum(map(text.count, ELLIPSES))) > 0.1 * len(words):
        yield "more than one # or ellipsis in ten words"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if sum(line.startswith(BULLETS) for line in lines) > 0.9 * len(lines):
        yield "most lines are items of a list"
    if sum(line.endswith(ELLIPSES) for line in lines) > 0.3 * len(lines):
        yield "many lines end with an ellipsis"
    if sum(any(map(str.isalpha, word)) for word in words) < 0.8 * len(words):
        yield "many words without a letter"
    if len(STOP_WORDS & set(text.lower().split())) < 2:
        yield "less than two of the words the, be, to, of, and, that, have, with"


def _gopher_repetition(text: str) -> Iterator[str]:
    for name, pieces in (("line", text.splitlines()), ("paragraph", re.split(r"\n{2,}", text))):
        pieces = [piece.strip() for piece in pieces if piece.strip()]
        repeated = _repeated(pieces)
        if len(repeated) > 0.3 * len(pieces):
            yield f"repeated {name}s"
        elif sum(map(len, repeated)) > 0.2 * len(text):
            yield f"long repeated {name}s"
    words = WORD.findall(text.lower())
    for size, share in MAX_TOP_SHARE.items():
        counts = Counter(zip(*(words[first:] for first in range(size)), strict=False))
        if counts:
            run, count = max(counts.items(), key=lambda item: (item[1], item[0]))
            if count > 1 and count * sum(map(len, run)) > share * len(text):
                yield f"a run of {size} words over and over"
    for size, share in MAX_REPEATED_SHARE.items():
        if _repeated_run_characters(words, size) > share * len(text):
            yield f"repeated runs of {size} words"


def _fineweb(text: str) -> Iterator[str]:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return
    if sum(line.endswith(LINE_ENDS) for line in lines) < 0.12 * len(lines):
        yield "few lines end with punctuation"
    if sum(len(line) < 30 for line in lines) > 0.67 * len(lines):
        yield "most lines are short"
    if sum(map(len, _repeated(lines))) > 0.1 * sum(map(len, lines)):
        yield "repeated lines"


CHECKS: dict[Rules, Callable[[str], Iterator[str]]] = {
    "gopher": _gopher,
    "gopher_repetition": _gopher_repetition,
    "fineweb": _fineweb,
}


def _repeated(pieces: list[str]) -> list[str]:
    """Return each piece that an earlier one is equal to."""
    seen: set[str] = set()
    return [piece for piece in pieces if piece in seen or seen.add(piece)]


def _repeated_run_characters(words: list[str], size: int) -> int:
    """Return the characters of the words in runs that an earlier run is equal to. Each word counts once."""
    seen, characters, counted = set(), 0, 0
    for first, run in enumerate(zip(*(words[offset:] for offset in range(size)), strict=False)):
        if run in seen:
            new = words[max(first, counted) : first + size]
            characters, counted = characters + sum(map(len, new)), first + size
        seen.add(run)
    return characters
