"""What a user tunes about `generate`: the [generate] section of settings.toml, and the command line."""

from pydantic import Field, PositiveInt

import settings


class GenerateOptions(settings.Section):
    """The [generate] section of settings.toml; each engine is as [serve] describes it."""

    input: str
    """Parquet or JSONL with `messages`, or a `prompt` to go on from: a file, folder, glob or s3:// URI."""
    output: str
    """Folder or s3:// URI that gets answers/ and rejected/; what is answered there is not done again."""
    id_column: str = "id"
    """Column with each row's unique id, a string or an integer. A killed run resumes by it."""
    model: str = ""
    """Folder in Hugging Face format, hub id, or s3:// URI; empty: the one of [serve]."""
    shared_paths: tuple[str, ...] = ()
    """Folders that every node mounts; on several nodes, other local paths are refused."""
    num_workers: PositiveInt
    """Engines at most, each on the devices of one replica of [serve]."""
    max_tokens: PositiveInt
    """Tokens of an answer at most; where max_model_len of [serve] leaves room for fewer, so many."""
    temperature: float = Field(default=0, ge=0)
    """0: always the likeliest token; more: drawn, and other answers each time."""
    rows_per_file: PositiveInt
    """Answers in one file, about. A killed run does again those that were not in a file yet."""
    overwrite: bool = False
    """Do all rows again, also those that are answered."""
    skip_ids: tuple[str, ...] = ()
    """Ids of rows to skip, such as rows that crash the engine."""
