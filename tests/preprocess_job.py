"""Options, input and results of the job `preprocess` in tests."""

import json
from pathlib import Path
from typing import Any

from raymill import settings
from raymill.data.options import PreprocessOptions


def options(assets: Path, folder: Path, **changes: Any) -> PreprocessOptions:
    """Return the local profile's options, with the demo's data as input and `folder`/packed as output."""
    given = {"input": str(assets / "data"), "output": str(folder / "packed"), "model": str(assets / "model")}
    defaults = settings.load(PreprocessOptions, "preprocess", profile="local")
    return PreprocessOptions.model_validate(defaults.model_dump() | given | changes)


def write_rows(file: Path, found: list[dict[str, Any]]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in found), encoding="utf-8")
    return file


def manifest(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "packed" / "manifest.json").read_text(encoding="utf-8"))
