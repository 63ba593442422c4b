"""Options of `generate`, from [generate] in settings.toml and from the command line."""

from pydantic import Field, PositiveInt

from raymill import settings


class GenerateOptions(settings.Section):
    """The [generate] section of settings.toml. The engines use the settings of [serve]."""

    input: str
    """File, folder, glob or s3:// URI of rows with `messages`, or with a `prompt` to continue."""
    output: str
    """Folder or s3:// URI for answers/ and rejected/. Rows that already have an answer there are skipped."""
    id_column: str = "id"
    """Column with each row's unique id, a string or an integer. A killed run needs it to resume."""
    model: str = ""
    """Folder in Hugging Face format, hub id, or s3:// URI. Empty: the model of [serve]."""
    shared_paths: tuple[str, ...] = ()
    """Folders that every node mounts. If the cluster has several nodes, other local paths are refused."""
    num_workers: PositiveInt
    """Maximum number of engines. Each uses the devices of one replica of [serve]."""
    max_tokens: PositiveInt
    """Maximum number of tokens in an answer. max_model_len of [serve] may leave room for fewer."""
    temperature: float = Field(default=0, ge=0)
    """With 0, the most likely token is always chosen. With higher values, tokens are sampled, so answers vary."""
    rows_per_file: PositiveInt
    """Approximate number of answers per file. If a run is killed, unsaved answers are generated again."""
    overwrite: bool = False
    """Delete the answers in output, and answer all rows again."""
    skip_ids: tuple[str, ...] = ()
    """Ids of rows to skip, such as rows that crash the engine."""
