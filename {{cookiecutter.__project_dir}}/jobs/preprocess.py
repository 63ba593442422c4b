"""Turns conversations into packed rows of tokens: read, shuffled, tokenised, packed and written in a stream.

The shuffle is a global one: rows go to partitions by a hash of seed and content, and each partition is sorted by
that hash. So the result depends on the input and the settings alone, not on workers, blocks or timing.
"""

from pipeline.data.options import PreprocessOptions
from pipeline.ray_support import cli

if __name__ == "__main__":
    cli.parse(PreprocessOptions, "preprocess")  # before the imports below, which take seconds

import contextlib
import errno
import hashlib
import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import groupby, islice
from typing import Any

import ray
from ray.data import DataContext
from ray.exceptions import RayTaskError
from rich.console import Console
from rich.text import Text

import settings
from pipeline.data import rows, shards
from pipeline.data.conversations import NOT_TRAINED, Document, Tokenize, load, tokenizer_hash
from pipeline.data.output import Output
from pipeline.data.row_formats import BadRow
from pipeline.ray_support import capacity, model_cache, ray_data
from pipeline.ray_support.private.data import ShuffleDiskError
from pipeline.ray_support.progress import Progress, time_left
from settings import UserError

HEAD_ROWS = 100  # looked at before anything is started
EXAMPLES, EXAMPLE_CHARACTERS = 3, 100
PARTS = ("train", "eval")


def main(options: PreprocessOptions) -> None:
    """Turn conversations into packed rows of tokens, of which only the assistant's are trained."""
    sources = rows.find_all(options.input, options.mix)
    tokenize = load(options)
    for source in sources:
        head = rows.head(source, max(options.show, HEAD_ROWS))
        _describe(head, source)
        _show(head.rows, options.show, tokenize)
    plan = shards.Plan(
        output=settings.resolve(options.output),
        sequence_length=options.sequence_length,
        eval_share=options.eval_share,
        seed=options.seed,
        partitions=_partitions(sources, options.shard_mib),
        deduplicate=options.deduplicate,
    )
    recipe = _recipe(sources, plan, options, tokenize)
    output = Output(plan.output)
    if output.holds(recipe):
        print(f"{plan.output} is already made from this input with these settings; nothing to do.")
        return
    cli.connect()
    for setting, name in (*rows.names(sources), ("output", plan.output)):
        capacity.refuse_private_paths({setting: name}, options.shared_paths, "preprocess")
    output.begin(options.overwrite)
    partitions = _make_shards(sources, plan, tokenize)
    manifest = recipe | _outcome(partitions, sources)
    _check(manifest, options, plan)
    output.finish(manifest)
    _print_summary(manifest, plan)


def _partitions(sources: list[rows.Source], shard_mib: float) -> int:
    """How many partitions: a power of two, so that about the same input, split into other files, gives as many."""
    size = sum(int(source.text_size * source.weight) for source in sources)
    return 1 << int((size - 1) / (shard_mib * 2**20)).bit_length()


def _recipe(
    sources: list[rows.Source], plan: shards.Plan, options: PreprocessOptions, tokenize: Tokenize
) -> dict[str, Any]:
    """The part of the manifest that is known beforehand, and decides the rest of it."""
    tokenizer = tokenize.tokenizer
    return {
        "format": 2,
        "sequence_length": plan.sequence_length,
        "seed": plan.seed,
        "eval_share": plan.eval_share,
        "partitions": plan.partitions,
        "input": [
            {
                "name": source.name,
                "weight": source.weight,
                "files": len(source.files),
                "bytes": source.size,
                "hash": hashlib.sha256(json.dumps(source.files).encode()).hexdigest(),
            }
            for source in sources
        ],
        "tokenizer": {
            "model": model_cache.find(options.model),
            "hash": tokenizer_hash(tokenizer),
            "vocabulary": len(tokenizer),
            "chat_template": tokenizer.chat_template,
            "eos_ids": tokenize.eos_ids,
        },
        "chat_template_hash": hashlib.sha256((tokenizer.chat_template or "").encode()).hexdigest(),
        **{name: getattr(options, name) for name in ("turns", "past_reasoning", "overlong", "deduplicate")},
    }


def _outcome(partitions: list[shards.Partition], sources: list[rows.Source]) -> dict[str, Any]:
    """The part of the manifest that is known afterwards."""
    rejected = sum((Counter(partition.rejected) for partition in partitions), Counter())
    made = {part: [shard for partition in partitions if (shard := getattr(partition, part))] for part in PARTS}
    hashes = "".join(shard.sha256 for part in PARTS for shard in made[part])
    return {
        "rows_read": sum(partition.rows for partition in partitions),
        "rows_duplicate": sum(partition.duplicates for partition in partitions),
        "rows_rejected": rejected.total(),
        "rejected_by_reason": dict(sorted(rejected.items())),
        "sources": {source.name: _of_source(partitions, number) for number, source in enumerate(sources)},
        **{part: _part(made[part]) for part in PARTS},
        "content_hash": hashlib.sha256(hashes.encode()).hexdigest(),
    }


def _of_source(partitions: list[shards.Partition], number: int) -> dict[str, int]:
    counts = sum((Counter(partition.sources.get(number, {})) for partition in partitions), Counter())
    return {count: counts[count] for count in ("documents", "tokens", "trained_tokens")}


def _part(made: list[shards.Shard]) -> dict[str, Any]:
    counts = ("rows", "documents", "cut_documents", "tokens", "trained_tokens")
    files = [{"name": shard.name, "rows": shard.rows} for shard in made]
    lengths = sum((Counter(shard.lengths) for shard in made), Counter())
    summed = {count: sum(getattr(shard, count) for shard in made) for count in counts}
    return {"files": files} | summed | {"lengths": {str(bound): lengths[bound] for bound in sorted(lengths)}}


def _make_shards(sources: list[rows.Source], plan: shards.Plan, tokenize: Tokenize) -> list[shards.Partition]:
    with DataContext.current(_data_context()), Progress(_Line(sum(source.size for source in sources))) as progress:
        keyed = rows.dataset(sources, plan.seed, progress.report).map_batches(
            partial(rows.assign, seed=plan.seed, places=rows.places(plan.partitions)),
            batch_size=None,
            batch_format="pyarrow",
        )
        written = keyed.groupby("place", num_partitions=plan.partitions).map_groups(
            partial(shards.write, plan=plan, shared=ray.put(tokenize), report=progress.report),
            batch_format="pyarrow",
        )
        try:
            summaries = [shards.Partition.model_validate_json(row["summary"]) for row in written.iter_rows()]
        except RayTaskError as error:
            raise _explained(error) from None
    return sorted(summaries, key=lambda partition: partition.number)


def _explained(error: RayTaskError) -> Exception:
    """What to tell a person about a task that failed: one sentence where the input or a disk is at fault."""
    if isinstance(error.cause, UserError):
        return UserError(str(error.cause).splitlines()[0])  # Ray adds advice of its own in the lines below
    no_space = isinstance(error.cause, OSError) and error.cause.errno == errno.ENOSPC
    if no_space or isinstance(error.cause, ShuffleDiskError):
        return UserError(
            f"no space is left in {tempfile.gettempdir()} on a node: the shuffle keeps the text of the input there, "
            "compressed; free some, or use a larger disk: RAY_TMPDIR=FOLDER inv up (with python -m: TMPDIR=FOLDER)."
        )
    return error


def _data_context() -> DataContext:
    """Ray Data's settings: blocks that are small beside the object store, and a shuffle over disks."""
    context = ray_data.quiet_context()
    store = int(min(node["Resources"]["object_store_memory"] for node in ray.nodes() if node["Alive"]))
    context.target_max_block_size = min(context.target_max_block_size, store // 16)
    context.shuffle_input_batch_bytes = min(context.shuffle_input_batch_bytes, store // 8)
    # through the object store, the many small pieces of a shuffle would gather in the memory of this process
    context.use_disk_based_hash_shuffle = True
    # by default Ray Data reserves a core for the shuffle, which waits until everything is read
    context.op_resource_reservation_enabled = False
    return context


class _Line:
    """The progress line. All rows are read and shuffled before the first is packed."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._packing_since_s = 0.0

    def __call__(self, totals: dict[str, int], seconds: float) -> str:
        read, packed, done = (totals.get(name, 0) for name in ("rows_read", "rows_packed", "bytes_read"))
        if not packed:
            self._packing_since_s = seconds
        if not read:
            return f"starting workers: {seconds:.0f} s"
        if done < self._size:
            speed, left = read / seconds, time_left(done, self._size, seconds)
            return f"reading: {read:,} rows, {done / self._size:.0%} of the input, {speed:,.0f} rows/s, {left}"
        if not packed:
            return f"shuffling: {read:,} rows, {seconds:.0f} s since the start"
        seconds -= self._packing_since_s
        speed, left = packed / seconds, time_left(packed, read, seconds)
        return f"packing: {packed:,} of {read:,} rows, {speed:,.0f} rows/s, {left}"


def _check(manifest: dict[str, Any], options: PreprocessOptions, plan: shards.Plan) -> None:
    """Refuse a result with too many bad rows, or without training rows."""
    bad, read = manifest["rows_rejected"], manifest["rows_read"]
    if bad > options.max_bad_share * read:
        reasons = "; ".join(f"{reason}: {count:,}" for reason, count in manifest["rejected_by_reason"].items())
        raise UserError(
            f"{bad:,} of {read:,} rows are bad ({reasons}), more than max_bad_share = {options.max_bad_share} allows; "
            f"see {plan.output}/rejected and correct the input, or pass another --max-bad-share."
        )
    if not manifest["train"]["rows"]:
        raise UserError(f"no row of {options.input} is left for training; give more rows or a smaller --eval-share.")


def _print_summary(manifest: dict[str, Any], plan: shards.Plan) -> None:
    for part in PARTS:
        counts = manifest[part]
        filled = counts["tokens"] / max(1, counts["rows"] * plan.sequence_length)
        trained = counts["trained_tokens"] / max(1, counts["tokens"])
        print(
            f"{part}: {counts['documents']:,} documents ({counts['cut_documents']:,} cut) in {counts['rows']:,} "
            f"rows of {plan.sequence_length} tokens: {filled:.1%} filled, {counts['trained_tokens']:,} tokens "
            f"({trained:.0%}) trained"
        )
        if counts["lengths"]:
            lengths = ", ".join(f"{count:,} up to {bound}" for bound, count in counts["lengths"].items())
            print(f"  tokens per document: {lengths}")
    if len(manifest["sources"]) > 1:
        for name, counts in manifest["sources"].items():
            print(f"  {name}: {counts['documents']:,} documents, {counts['tokens']:,} tokens")
    duplicates = f", {manifest['rows_duplicate']:,} were duplicates" if plan.deduplicate else ""
    print(f"{manifest['rows_rejected']:,} of {manifest['rows_read']:,} rows were bad{duplicates}.")
    print(f"Written to {plan.output}.")


def _describe(head: rows.Head, source: rows.Source) -> None:
    """Print the formats found, and the first rows."""
    unused = f"; not used: {', '.join(head.unused)}" if head.unused else ""
    print(f"{source.name}: {' and '.join(head.formats)}{unused}")
    for row in head.rows[:EXAMPLES]:
        text = row["row"].decode(errors="replace")
        print(
            f"  {row['problem'] or 'row'}: {text[:EXAMPLE_CHARACTERS]}{'…' if len(text) > EXAMPLE_CHARACTERS else ''}"
        )


def _show(first: list[dict[str, Any]], count: int, tokenize: Tokenize) -> None:
    """Print documents with the trained tokens in green."""
    console = Console(force_terminal=True, soft_wrap=True)  # a submitted job's log is no terminal, its reader has one
    for number, document in enumerate(islice(_documents(first, tokenize), count), 1):
        console.print(Text(f"example {number} (green: trained)", style="bold"))
        console.print(_coloured(document, tokenize))


def _documents(first: list[dict[str, Any]], tokenize: Tokenize) -> Iterator[Document]:
    for row in first:
        with contextlib.suppress(BadRow):
            yield from tokenize.documents(row)


def _coloured(document: Document, tokenize: Tokenize) -> Text:
    text = Text()
    pairs = zip(document.input_ids.tolist(), document.labels.tolist(), strict=True)
    for trained, run in groupby(pairs, key=lambda pair: pair[1] != NOT_TRAINED):
        text.append(tokenize.tokenizer.decode([token for token, _ in run]), style="green" if trained else "dim")
    return text


if __name__ == "__main__":
    cli.run(main)
