"""Write project_files.txt, the list of a generated project's files. Review its diff."""

import tempfile
from pathlib import Path

import bake

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        names = bake.files(bake.bake(Path(folder) / "project"))
    Path(__file__).with_suffix(".txt").write_text("\n".join(names) + "\n", encoding="utf-8")
