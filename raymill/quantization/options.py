"""Options of `quantize`, from [quantize] in settings.toml and from the command line."""

from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from raymill import settings


class QuantizeOptions(settings.Section):
    """The [quantize] section of settings.toml."""

    model: str
    """Folder in Hugging Face format, hub id, or s3:// URI. For a LoRA run, its merged `model` folder."""
    data: str
    """Folder or URI that `preprocess` wrote to. Its first training rows show which weights matter."""
    output: str
    """Folder or URI for the quantized model, which is replaced."""
    scheme: Literal["W4A16", "W8A8"]
    """W4A16: weights of 4 bits, which saves the most memory. W8A8: weights and activations of 8 bits (INT8)."""
    rows: PositiveInt
    """Training rows to use."""
    num_gpus: NonNegativeInt
    """GPUs: 0 or 1."""
