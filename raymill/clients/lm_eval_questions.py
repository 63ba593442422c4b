"""Write the questions of lm-eval's tasks to a file with one JSON object per line.

`lm_eval.write_questions` runs this file in lm-eval's own environment, so it imports nothing of the project.
"""

import argparse
import json
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("tasks")
    parser.add_argument("file", type=Path)
    parser.add_argument("--include_path", help="a folder with tasks of your own")
    arguments = parser.parse_args()

    from lm_eval.tasks import TaskManager  # type: ignore[missing-import]

    found = TaskManager(include_path=arguments.include_path).load(arguments.tasks.split(","))["tasks"]
    lines: dict[str, None] = {}  # each row once, although several tasks may ask about it
    for name, task in found.items():
        # whole rows: prompts differ from one evaluation to another, but their questions do not
        rows = task.eval_docs
        lines.update(dict.fromkeys(f"{json.dumps(dict(row), default=str)}\n" for row in rows))
        print(f"{name}: {len(rows):,} questions", flush=True)
    arguments.file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = arguments.file.with_suffix(".unfinished")
    unfinished.write_text("".join(lines), encoding="utf-8")
    unfinished.replace(arguments.file)


if __name__ == "__main__":
    main()
