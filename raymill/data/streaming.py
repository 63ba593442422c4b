"""Tokenize and pack raw rows with Ray Data while training reads them, without a preprocess step."""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import ray.data
import ray.train
from ray import ObjectRef
from ray.exceptions import RayTaskError

from raymill import job, settings
from raymill.data import preprocessing, row_dataset, row_formats, row_sources
from raymill.data.filters.options import FilterOptions
from raymill.data.options import PreprocessOptions
from raymill.data.packing import pack
from raymill.data.row_sources import RowSource
from raymill.data.shards import fetch
from raymill.data.tokenization import DocumentTokenizer
from raymill.data.tokenizer import padding_id
from raymill.errors import UserError
from raymill.model_config import text_config
from raymill.training import preflight
from raymill.training.dataset import Batch, as_arrays, as_batch

DOCUMENTS_PACKED_TOGETHER = 1024  # at the end of each group, some packed rows remain partly empty
NOTICE = (
    "--stream: bad rows are skipped without being counted, nothing is evaluated, and a resumed run continues at its "
    "step but reads the rows from the start"
)


class StreamInput(NamedTuple):
    """The rows that [preprocess] describes, and their tokenizer."""

    sources: list[RowSource]
    tokenizer: DocumentTokenizer
    embeddings: int
    """Number of tokens that the model has embeddings for."""


def find_input(model: str) -> StreamInput:
    """Return the rows of [preprocess], in the formats of jobs/preprocess.py, with the tokenizer of `model`."""
    options = settings.load(PreprocessOptions, "preprocess")
    embeddings = text_config(preflight.load_config(model)).vocab_size
    script = job.load("preprocess")
    formats = getattr(script, "FORMATS", row_formats.FORMATS)  # missing in scripts of older versions
    if getattr(script, "FILTERS", ()) or options.filters != FilterOptions():
        raise UserError(
            "--stream cannot compare rows, so it does not filter; run preprocess and train on its output, or remove "
            "[preprocess.filters] and FILTERS in jobs/preprocess.py."
        )
    if options.task != "supervised":
        raise UserError(
            f"--stream packs answers to learn, but task is {options.task} in [preprocess]; run preprocess instead."
        )
    sources = row_sources.find_all(options.input, options.mix, formats)
    return StreamInput(sources, DocumentTokenizer.from_options(options, model), embeddings)


def dataset(stream: StreamInput) -> ray.data.Dataset:
    """Return the packed rows, without shuffling them."""
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.raise_original_map_exception = True  # otherwise `preprocessing.explain` finds no UserError in it
    return row_dataset.dataset(stream.sources).map_batches(
        functools.partial(
            _pack,
            tokenizer_ref=ray.put(stream.tokenizer),
            use_fastokens=preprocessing.use_fastokens(stream.sources, stream.tokenizer),
            embeddings=stream.embeddings,
        ),
        batch_size=DOCUMENTS_PACKED_TOGETHER,
        batch_format="pyarrow",
    )


def _pack(table: pa.Table, tokenizer_ref: ObjectRef, use_fastokens: bool, embeddings: int) -> pa.Table:
    tokenizer = fetch(tokenizer_ref, use_fastokens)
    packed = pack(tokenizer(table), tokenizer.sequence_length, padding_id(tokenizer.tokenizer))
    largest = pc.max(pc.list_flatten(packed["input_ids"])).as_py()
    if largest is not None and largest >= embeddings:
        token = tokenizer.tokenizer.convert_ids_to_tokens(largest)
        raise UserError(
            f"the rows contain the token {token!r} with the id {largest}, but the model has embeddings only for ids "
            f"below {embeddings}. Remove the token from the input or from the model's tokenizer, or pass another "
            "--model."
        )
    return packed


class StreamSource:
    """This worker's share of the stream, repeated endlessly."""

    rows_per_epoch = None

    def __init__(self, stream: StreamInput, rows_per_rank: int) -> None:
        self.sequence_length = stream.tokenizer.sequence_length
        self.chat_template = stream.tokenizer.tokenizer.chat_template
        self.eos_ids = stream.tokenizer.eos_ids
        self._batches = self._epochs(rows_per_rank)

    def rows(self, step: int) -> Batch:
        """Return the next rows. The step is ignored, because a stream has no positions."""
        return next(self._batches)

    def names(self, step: int, first: int, count: int) -> list[str]:
        """Return no names, because a stream has no positions."""
        return []

    def _epochs(self, rows_per_rank: int) -> Iterator[Batch]:
        shard = ray.train.get_dataset_shard("train")
        while True:
            batches = 0
            try:
                for table in shard.iter_batches(batch_size=rows_per_rank, batch_format="pyarrow", drop_last=True):
                    batches += 1
                    yield as_batch(as_arrays(table))
            except RayTaskError as error:
                raise preprocessing.explain(error) from None
            if not batches:
                raise UserError(
                    "the stream has less than one global batch; add rows, or pass a smaller --global-batch-rows."
                )
