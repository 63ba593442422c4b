"""Keep test splits out of training: a folder or a glob may bring them in beside the train split."""

import os
import re
from pathlib import PurePosixPath

from raymill.data.files import InputFiles
from raymill.errors import UserError
from raymill.printable import printable

# the words by which the library `datasets` recognizes splits in the names of files and folders
TRAIN = {"train", "training"}
TEST = {"validation", "valid", "dev", "val", "test", "testing", "eval", "evaluation"}
SEPARATORS = re.compile(r"[-._ 0-9/]+")


def check(source: InputFiles) -> None:
    """Print which files look like a test split. A file that the input names itself is never one.

    Raises:
        UserError: the input has a train split beside the test split.
    """
    if source.name.endswith(source.files[0].path):
        return
    words = {file.path: _words(file.path, source.root) for file in source.files}
    tests = [path for path in words if words[path] & TEST]
    trains = [path for path in words if words[path] & TRAIN and path not in tests]
    if not tests:
        return
    first = PurePosixPath(tests[0]).relative_to(source.root)
    some = f"{first} and {len(tests) - 1:,} more files" if len(tests) > 1 else str(first)
    if trains:
        raise UserError(
            f"{source.name} has {some}, which looks like a test split beside the train split; pass --input "
            f"{_uri(source, _pattern(trains, tests))}, and to train on both, add the other files with --mix INPUT=1."
        )
    print(printable(f"note: {source.name}: trains on {some}, which looks like a test split"), flush=True)


def _words(path: str, root: str) -> set[str]:
    return set(SEPARATORS.split(str(PurePosixPath(path).relative_to(root)).lower()))


def _pattern(trains: list[str], tests: list[str]) -> str:
    """Return a glob that matches the train split and not the test split, or one file of the train split."""
    prefix = os.path.commonprefix(trains)  # noqa: RUF071 - a glob may begin within a name
    return trains[0] if len(trains) == 1 or any(path.startswith(prefix) for path in tests) else f"{prefix}*"


def _uri(source: InputFiles, path: str) -> str:
    scheme, separator, _ = source.name.rpartition("://")
    return f"{scheme}{separator}{path}"
