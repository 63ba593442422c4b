"""How the scripts here are called: one JSON file says what is asked, another takes the answer."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def answer(main: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Call `main` with the first file that the command names, and write what it returns to the second."""
    asked, answered = map(Path, sys.argv[1:])
    answered.write_text(json.dumps(main(json.loads(asked.read_text(encoding="utf-8")))), encoding="utf-8")
