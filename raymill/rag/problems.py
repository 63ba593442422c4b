"""Reports the documents that `embed` cannot read, and those that have lost most of their text."""

import json
from collections.abc import Iterable

from pyarrow.fs import FileType

from raymill.data.output import open_output
from raymill.errors import UserError
from raymill.rag.documents import Problem

FILE = "problems.jsonl"
SHOWN = 5  # problems of each kind that are printed
EARLY = 1000  # if the first documents are bad, and this many, the rest of the input is not read


class ProblemReport:
    """The problems of one run."""

    def __init__(self, index: str, max_bad_share: float) -> None:
        """`index` is the folder or URI of the index. FILE is written there."""
        self._index = index
        self._max_bad_share = max_bad_share
        self._bad: list[Problem] = []
        self._warnings: list[Problem] = []

    def add(self, problems: Iterable[Problem], good: int) -> None:
        """Add problems. `good` is the number of documents that were read so far.

        Raises:
            UserError: no document can be read, for example because `text` has another name.
        """
        for problem in problems:
            (self._warnings if problem.is_read else self._bad).append(problem)
        if len(self._bad) >= EARLY and not good:
            self.check(good)

    def check(self, good: int) -> None:
        """Write the problems to FILE, in place of those of an earlier run. `good` is the number of documents read.

        Raises:
            UserError: too many documents are bad.
        """
        self._save()
        bad, total = len(self._bad), len(self._bad) + good
        if bad > self._max_bad_share * total:
            raise UserError(
                f"{bad:,} of {total:,} documents are bad ({self._bad[0].message}), more than max_bad_share = "
                f"{self._max_bad_share} allows; see {self._index}/{FILE} and correct or remove them, or pass a larger "
                "--max-bad-share."
            )

    def concern(self, documents: Iterable[str]) -> set[str]:
        """Return those of the documents that are bad, or belong to a file that is bad."""
        bad = {problem.document for problem in self._bad}
        return {document for document in documents if document in bad or document.rpartition("#")[0] in bad}

    def print(self) -> None:
        """Print the number of problems, and the first ones."""
        kinds = {"documents are bad and not in the index": self._bad, "have lost most of their text": self._warnings}
        for kind, problems in kinds.items():
            if problems:
                print(f"{len(problems):,} {kind}:")
                for problem in problems[:SHOWN]:
                    print(f"  {problem.message}")
        if self._bad or self._warnings:
            print(f"All of them are in {self._index}/{FILE}", flush=True)

    def _save(self) -> None:
        lines = [
            json.dumps({"document": each.document, "problem": each.message, "is_read": each.is_read})
            for each in self._bad + self._warnings
        ]
        with open_output(self._index) as (filesystem, folder):
            path = f"{folder}/{FILE}"
            if lines:
                with filesystem.open_output_stream(path) as file:
                    file.write("".join(f"{line}\n" for line in lines).encode())
            elif filesystem.get_file_info(path).type != FileType.NotFound:
                filesystem.delete_file(path)
