"""Distinguishes final failures, which a new worker would repeat, from failures that a new worker may not repeat."""

import traceback

import torch

from pipeline.training.options import TrainOptions

ERRORS_OF_CODE = (
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NotImplementedError,
    TypeError,
    ValueError,
)
"""Types of errors that depend on code, options, model and rows. A lost worker or connection raises other types."""


def is_final(error: Exception) -> bool:
    """Return whether a new worker would fail in the same way."""
    if isinstance(error, OSError):  # some network errors of the Hugging Face hub are a ValueError as well
        return False
    return isinstance(error, (torch.OutOfMemoryError, *ERRORS_OF_CODE))


def describe(error: Exception, options: TrainOptions) -> str:
    """Return a sentence for a final failure, and on further lines the traceback that the sentence refers to."""
    if isinstance(error, torch.OutOfMemoryError):
        return (
            "a GPU ran out of memory. Try a smaller --micro-batch-rows, --gradient-checkpointing, --lora-rank 16, or "
            f"finetune_fsdp on more workers. To see what fits, run: inv plan {options.model}"
        )
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    sentence = (
        f"a worker failed with {reason}. Its traceback is above. A retry would fail in the same way, so Ray "
        "did not retry. Fix what the traceback points to, then run the same command to resume."
    )
    return "\n".join([sentence, *traceback.format_exception(error)])
