"""Options of `evaluate`, from [evaluate] in settings.toml and from the command line."""

from typing import Literal

from pydantic import Field, PositiveInt

from raymill import settings
from raymill.training.options import NAME


class EvaluateOptions(settings.Section):
    """The [evaluate] section of settings.toml."""

    models: tuple[str, ...] = Field(min_length=1)
    """Hugging Face folders, s3:// folders, hub ids, or `adapter` folders of LoRA runs. Each model is
    compared with the last one."""
    data: str
    """Folder or URI that `preprocess` wrote to. Only the held-out part is used."""
    output: str
    """Folder or URI for the result, NAME.json."""
    name: str = Field("evaluation", pattern=NAME)
    """Name of the result. A result with the same name is replaced."""
    shared_paths: tuple[str, ...] = ()
    """Folders that every node mounts. If the cluster has several nodes, other local paths are refused."""
    num_workers: PositiveInt
    """Number of copies of each model, which work in parallel."""
    device: Literal["cpu", "cuda"]
    """Device of the copies: each uses one CPU, or one GPU."""
    precision: Literal["fp32", "bf16"]
    """Number format of the weights and of the computation."""
    batch_rows: PositiveInt
    """Rows in one forward pass."""
