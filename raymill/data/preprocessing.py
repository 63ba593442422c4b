"""The preprocess pipeline on Ray Data: read all rows, shuffle them globally, then tokenize, pack and write them."""

import errno
import tempfile
from functools import partial

import ray
from ray.data import DataContext
from ray.exceptions import RayTaskError

from raymill import settings
from raymill.data import row_dataset, samples, shards, shuffle
from raymill.data.filters.gate import Gate
from raymill.data.options import PreprocessOptions
from raymill.data.row_sources import RowSource
from raymill.data.shards import PartitionSummary, ShardPlan
from raymill.data.tokenization import DocumentTokenizer
from raymill.errors import UserError
from raymill.ray_support import ray_logging
from raymill.ray_support.private.data import ShuffleDiskError
from raymill.ray_support.progress import Progress, time_left
from raymill.settings import inv

# Bytes of text per process and token of the vocabulary. With half as many, both tokenizers take the same time: building
# fastokens' takes 36 µs per token of the vocabulary, and Hugging Face's encodes a byte in 0.9 µs.
FAST_BYTES = 64


def plan_shards(options: PreprocessOptions, sources: list[RowSource]) -> ShardPlan:
    """Return the plan for the shards of these sources."""
    return ShardPlan(
        output=settings.resolve(options.output),
        sequence_length=options.sequence_length,
        eval_share=options.eval_share,
        seed=options.seed,
        partitions=_partition_count(sources, options.shard_mib),
        task=options.task,
        # filters compare different rows; equal ones are always found
        deduplicate=options.deduplicate or bool(options.filters.near_duplicates),
        sources=tuple(source.name for source in sources),
    )


def write_shards(
    sources: list[RowSource], plan: ShardPlan, tokenizer: DocumentTokenizer, gate: Gate | None = None
) -> list[PartitionSummary]:
    """Write the packed rows of all sources that pass the gate. Return a summary of each partition, in order.

    Raises:
        UserError: the input or a disk caused a task to fail.
    """
    gate = gate and gate.with_actor()
    describe = PreprocessProgress(sum(source.size for source in sources))
    with DataContext.current(_data_context()), Progress(describe) as progress:
        assigned = row_dataset.dataset(sources, plan.seed, progress.report, gate).map_batches(
            partial(shuffle.assign, seed=plan.seed, groups=shuffle.group_values(plan.partitions)),
            batch_size=None,
            batch_format="pyarrow",
        )
        written = assigned.groupby("group", num_partitions=plan.partitions).map_groups(
            partial(
                shards.write,
                plan=plan,
                tokenizer_ref=ray.put(tokenizer),
                use_fastokens=use_fastokens(sources, tokenizer),
                report=progress.report,
                gate=gate,
            ),
            batch_format="pyarrow",
        )
        try:
            summaries = [PartitionSummary.model_validate_json(row["summary"]) for row in written.iter_rows()]
        except RayTaskError as error:
            raise explain(error) from None
    if gate and (crowded := gate.crowded()):
        print(
            f"note: {crowded:,} rows resemble many others by less than near_duplicates says, so they were compared "
            "with a part of these; some near-duplicates among them may be left",
            flush=True,
        )
    summaries.sort(key=lambda summary: summary.number)
    samples.save((summary.samples for summary in summaries), plan.output)
    return summaries


def explain(error: RayTaskError) -> Exception:
    """Return a UserError if the input or a disk caused a task to fail, otherwise `error`."""
    if isinstance(error.cause, UserError):
        return UserError(str(error.cause).splitlines()[0])  # Ray adds its own advice on the following lines
    disk_is_full = isinstance(error.cause, OSError) and error.cause.errno == errno.ENOSPC
    if disk_is_full or isinstance(error.cause, ShuffleDiskError):
        return UserError(
            f"no space is left in {tempfile.gettempdir()} on a node: the shuffle stores the compressed text of the "
            f"input there; free some space, or use a larger disk: {inv('down')}, then RAY_TMPDIR=FOLDER {inv('up')}. "
            "With python -m, set TMPDIR=FOLDER."
        )
    return error


class PreprocessProgress:
    """Formats the progress line. All rows are read and shuffled before the first is packed."""

    def __init__(self, input_bytes: int) -> None:
        self._input_bytes = input_bytes
        self._packing_since_s = 0.0

    def __call__(self, totals: dict[str, int], seconds: float) -> str:
        read, packed, read_bytes = (totals.get(name, 0) for name in ("rows_read", "rows_packed", "bytes_read"))
        if not packed:
            self._packing_since_s = seconds
        if not read:
            return f"starting workers: {seconds:.0f} s"
        if read_bytes < self._input_bytes:
            share, left = read_bytes / self._input_bytes, time_left(read_bytes, self._input_bytes, seconds)
            return f"reading: {read:,} rows, {share:.0%} of the input, {read / seconds:,.0f} rows/s, {left}"
        if not packed:
            return f"shuffling: {read:,} rows, {seconds:.0f} s since the start"
        seconds -= self._packing_since_s
        speed, left = packed / seconds, time_left(packed, read, seconds)
        return f"packing: {packed:,} of {read:,} rows, {speed:,.0f} rows/s, {left}"


def use_fastokens(sources: list[RowSource], tokenizer: DocumentTokenizer) -> bool:
    """Return whether fastokens saves more time than each of the cluster's processes takes to build its tokenizer."""
    cpus = ray.cluster_resources().get("CPU", 1)
    size = sum(source.text_size * source.weight for source in sources)
    return tokenizer.engine == "auto" and size / cpus > FAST_BYTES * len(tokenizer.tokenizer)


def _partition_count(sources: list[RowSource], shard_mib: float) -> int:
    """Return the number of partitions.

    The number is a power of two, so it rarely changes if the same rows are stored in different files.
    """
    size = sum(int(source.text_size * source.weight) for source in sources)
    return 1 << int((size - 1) / (shard_mib * 2**20)).bit_length()


def _data_context() -> DataContext:
    """Return Ray Data's settings: blocks much smaller than the object store, and a shuffle on disk."""
    context = ray_logging.quiet_context()
    store = int(min(node["Resources"]["object_store_memory"] for node in ray.nodes() if node["Alive"]))
    context.target_max_block_size = min(context.target_max_block_size, store // 16)
    context.shuffle_input_batch_bytes = min(context.shuffle_input_batch_bytes, store // 8)
    # a shuffle through the object store would accumulate its many small pieces in this process's memory
    context.use_disk_based_hash_shuffle = True
    # by default Ray Data reserves a core for the shuffle, although the shuffle waits until everything is read
    context.op_resource_reservation_enabled = False
    return context
