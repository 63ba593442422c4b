"""Distinguishes final failures, which would also occur in a new worker, from failures that a retry may avoid."""

import traceback

import torch

from raymill.errors import UserError
from raymill.settings import inv
from raymill.training.options import TrainOptions

ERRORS_OF_CODE = (
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NotImplementedError,
    TypeError,
    ValueError,
)
"""Types of errors that come from code, options, model or rows. A lost worker or connection raises other types."""


def is_final(error: Exception) -> bool:
    """Return whether a new worker would fail in the same way."""
    if isinstance(error, OSError):  # some network errors of the Hugging Face hub are also ValueErrors
        return False
    return isinstance(error, (torch.OutOfMemoryError, *ERRORS_OF_CODE))


def describe(error: Exception, options: TrainOptions) -> str:
    """Describe a final failure on one line. Further lines hold the traceback, unless a GPU ran out of memory."""
    if isinstance(error, torch.OutOfMemoryError):
        return (
            "a GPU ran out of memory. Try a smaller --micro-batch-rows, --gradient-checkpointing, --lora-rank 16, or "
            f"finetune_fsdp on more workers. To see what fits, run: {inv('plan', options.model)}"
        )
    sentence = (
        f"a worker failed with {reason(error)}. Its traceback is above. A retry would fail in the same way, so Ray "
        "did not retry. Fix what the traceback points to, then run the same command to resume."
    )
    return "\n".join([sentence, *traceback.format_exception(error)])


def reason(error: Exception) -> str:
    """Return the type and the message of an error on one line. The message of a UserError needs no type."""
    return " ".join((f"{error}" if isinstance(error, UserError) else f"{type(error).__name__}: {error}").split())
