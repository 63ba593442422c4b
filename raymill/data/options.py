"""Options of `preprocess`: the [preprocess] section of settings.toml, and the command line."""

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from raymill import settings
from raymill.data.filters.options import FilterOptions

Turns = Literal["all", "last"]
PastReasoning = Literal["served", "keep"]
TokenizerEngine = Literal["auto", "transformers"]
Task = Literal["supervised", "preference", "unpaired_preference"]
Overlong = Literal["truncate", "drop", "error"]


class PreprocessOptions(settings.Section):
    """The [preprocess] section of settings.toml."""

    input: str
    """Parquet, JSONL, JSON, CSV, TSV, Arrow, Feather or Excel with conversations, instructions with answers, prompts
    with completions, or text: a file, folder, glob, s3:// URI, or hf://datasets/OWNER/NAME; or a Delta, Iceberg or
    Lance table, with @version=N after its path for an older version."""
    task: Task = "supervised"
    """What the rows are for. supervised: answers to learn; preference: pairs of a chosen and a rejected answer;
    unpaired_preference: answers with a label that says whether they are good."""
    mix: tuple[str, ...] = ()
    """More inputs, each written as INPUT=WEIGHT. Each row of INPUT is used WEIGHT times on average."""
    output: str
    """Folder or s3:// URI for the packed data."""
    shared_paths: tuple[str, ...] = ()
    """Folders that every node mounts. If the cluster has several nodes, other local paths are refused."""
    model: str
    """Hugging Face folder or hub id whose tokenizer and chat template are used."""
    chat_template: str | None = None
    """Chat template to use instead of the model's own: a file, or another model's folder or hub id."""
    turns: Turns = "all"
    """Assistant turns to train: all, or only those after the last user message."""
    past_reasoning: PastReasoning = "served"
    """Reasoning in earlier turns. served: as the served model sees it; keep: all of it, for templates that
    have generation blocks or that TRL knows."""
    overlong: Overlong = "truncate"
    """How to handle conversations with too many tokens: truncate them, drop them, or stop with an error."""
    tokenizer_engine: TokenizerEngine = "auto"
    """What encodes texts. auto: for large inputs fastokens, which gives the same tokens in less time; transformers."""
    sequence_length: PositiveInt
    """Tokens in each packed row."""
    deduplicate: bool = False
    """Use identical rows only once."""
    filters: FilterOptions = FilterOptions()
    """Which rows to drop or to change."""
    eval_share: float = Field(ge=0, lt=1)
    """Share of the rows, 0 to 1, to hold out for evaluation. A hash of each row selects them."""
    max_bad_share: float = Field(ge=0, le=1)
    """Share of bad rows, 0 to 1, above which the job fails. Bad rows are saved in rejected/."""
    seed: int
    """Random seed for the order of the rows."""
    shard_mib: PositiveFloat = 32
    """MiB of text in a shard, before tokenization. The task that writes it needs about thirty times as much memory."""
    show: int = Field(0, ge=0)
    """Print this many examples of each input before the work starts, with the trained tokens in color."""
    overwrite: bool = False
    """Replace a complete data set that was made from other input or with other settings."""
