"""Raw rows, tokenised and packed by Ray Data on their way into the workers: no preprocess step, no packed copy."""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import pyarrow as pa
import ray.data
import ray.train
from ray import ObjectRef

import settings
from pipeline.data import rows
from pipeline.data.conversations import Tokenize, load, padding_id
from pipeline.data.options import PreprocessOptions
from pipeline.data.packing import pack
from pipeline.data.shards import fetch
from pipeline.training.dataset import Batch, as_arrays, as_batch
from settings import UserError

DOCUMENTS_PACKED_TOGETHER = 1024  # the last row of each lot stays partly empty
NOTICE = (
    "--stream: bad rows are skipped uncounted, nothing is evaluated, and a resumed run starts over in the rows, though "
    "not in its steps"
)


class Recipe(NamedTuple):
    """What [preprocess] says about the rows."""

    sources: list[rows.Source]
    tokenize: Tokenize


def read_recipe(model: str) -> Recipe:
    """The rows of [preprocess], for the tokenizer of `model`."""
    options = settings.load(PreprocessOptions, "preprocess")
    return Recipe(rows.find_all(options.input, options.mix), load(options, model))


def dataset(recipe: Recipe) -> ray.data.Dataset:
    """The packed rows, in the order of the input."""
    ray.data.DataContext.get_current().enable_progress_bars = False
    shared = ray.put(recipe.tokenize)
    return rows.dataset(recipe.sources).map_batches(
        functools.partial(_packed, shared=shared), batch_size=DOCUMENTS_PACKED_TOGETHER, batch_format="pyarrow"
    )


def _packed(table: pa.Table, shared: ObjectRef) -> pa.Table:
    tokenize = fetch(shared)
    return pack(tokenize(table), tokenize.sequence_length, padding_id(tokenize.tokenizer))


class StreamSource:
    """This worker's share of the stream, over and over."""

    def __init__(self, recipe: Recipe, rows_per_rank: int) -> None:
        self.sequence_length = recipe.tokenize.sequence_length
        self.chat_template = recipe.tokenize.tokenizer.chat_template
        self.eos_ids = recipe.tokenize.eos_ids
        self._batches = self._epochs(rows_per_rank)

    def rows(self, step: int) -> Batch:
        """The next rows, whatever the step: a stream has no position."""
        return next(self._batches)

    def names(self, step: int, first: int, count: int) -> list[str]:
        """None: a stream has no position."""
        return []

    def _epochs(self, rows_per_rank: int) -> Iterator[Batch]:
        shard = ray.train.get_dataset_shard("train")
        while True:
            batches = 0
            for table in shard.iter_batches(batch_size=rows_per_rank, batch_format="pyarrow", drop_last=True):
                batches += 1
                yield as_batch(as_arrays(table))
            if not batches:
                raise UserError(
                    "the stream has less than one global batch; give more rows or a smaller --global-batch-rows."
                )
