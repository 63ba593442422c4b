"""The interface of the peer scripts: each reads its arguments from a JSON file and writes its answer to another one."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def answer(main: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Call `main` with the content of the first file on the command line, and write its result to the second."""
    asked, answered = map(Path, sys.argv[1:])
    answered.write_text(json.dumps(main(json.loads(asked.read_text(encoding="utf-8")))), encoding="utf-8")
