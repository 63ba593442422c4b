"""The manifest that `preprocess` writes: the configuration and input of a data set, and its counts."""

import hashlib
import json
from collections import Counter
from typing import Any

from raymill.data import row_formats, token_ids
from raymill.data.files import InputFiles
from raymill.data.filters.gate import Gate
from raymill.data.options import PreprocessOptions
from raymill.data.row_sources import RowSource
from raymill.data.shards import PartitionSummary, ShardPlan, ShardSummary
from raymill.data.tokenization import DocumentTokenizer
from raymill.data.tokenizer import tokenizer_hash
from raymill.errors import UserError
from raymill.ray_support import model_cache

FORMAT = 3
PARTS = ("train", "eval")
OPTIONS = ("turns", "past_reasoning", "overlong", "deduplicate")


def configuration(
    sources: list[RowSource],
    plan: ShardPlan,
    options: PreprocessOptions,
    tokenizer: DocumentTokenizer,
    gate: Gate | None = None,
) -> dict[str, Any]:
    """Return the part of the manifest that is known before the run. This part determines the results."""
    hugging_face = tokenizer.tokenizer
    return {
        "format": FORMAT,
        "sequence_length": plan.sequence_length,
        "seed": plan.seed,
        "eval_share": plan.eval_share,
        "partitions": plan.partitions,
        "input": [
            {
                "name": source.name,
                "weight": source.weight,
                "files": len(source.files.files),
                "bytes": source.size,
                "hash": _hash(source.files),
                **({} if source.files.version is None else {"version": source.files.version}),
            }
            for source in sources
        ],
        "formats": row_formats.identity(sources[0].formats),
        "tokenizer": {
            "model": model_cache.find(options.model),
            "hash": tokenizer_hash(hugging_face),
            "vocabulary": len(hugging_face),
            "chat_template": hugging_face.chat_template,
            "eos_ids": tokenizer.eos_ids,
        },
        "chat_template_hash": hashlib.sha256((hugging_face.chat_template or "").encode()).hexdigest(),
        **{name: getattr(options, name) for name in OPTIONS},
        **({} if options.task == "supervised" else {"task": options.task}),  # older data sets have none
        "filters": gate.identity() if gate else None,
    }


def results(partitions: list[PartitionSummary], sources: list[RowSource]) -> dict[str, Any]:
    """Return the part of the manifest that is known after the run."""
    rejected = sum((Counter(partition.rejected) for partition in partitions), Counter())
    dropped: dict[int, Counter[str]] = {}
    for partition in partitions:
        for number, counts in partition.dropped.items():
            dropped.setdefault(number, Counter()).update(counts)
    written = {part: [shard for partition in partitions if (shard := getattr(partition, part))] for part in PARTS}
    hashes = "".join(shard.sha256 for part in PARTS for shard in written[part])
    return {
        "rows_read": sum(partition.rows for partition in partitions),
        "rows_duplicate": sum(partition.duplicates for partition in partitions),
        "rows_rejected": rejected.total(),
        "rejected_by_reason": dict(sorted(rejected.items())),
        "rows_dropped": sum(counts.total() for counts in dropped.values()),
        "dropped_by_reason": {
            sources[number].name: dict(sorted(dropped[number].items())) for number in sorted(dropped)
        },
        "rows_changed": sum(partition.changed for partition in partitions),
        "sources": {source.name: _source_counts(partitions, number) for number, source in enumerate(sources)},
        **{part: _part_counts(written[part]) for part in PARTS},
        "largest_id": max((shard.largest_id for part in PARTS for shard in written[part]), default=None),
        "content_hash": hashlib.sha256(hashes.encode()).hexdigest(),
        "fastokens": {
            "version": token_ids.version(),
            "documents": sum(partition.fast_documents for partition in partitions),
        },
    }


def check(manifest: dict[str, Any], options: PreprocessOptions, plan: ShardPlan) -> None:
    """Raise UserError if too many rows are bad, or no row is left for training."""
    bad, read = manifest["rows_rejected"], manifest["rows_read"]
    if bad > options.max_bad_share * read:
        reasons = "; ".join(f"{reason}: {count:,}" for reason, count in manifest["rejected_by_reason"].items())
        raise UserError(
            f"{bad:,} of {read:,} rows are bad ({reasons}), more than max_bad_share = {options.max_bad_share} allows; "
            f"see {plan.output}/rejected and correct the input, or pass a larger --max-bad-share."
        )
    if not manifest["train"]["rows"]:
        dropped = manifest["rows_dropped"]
        filtered = f", because filters dropped {dropped:,} of {read:,} rows ({plan.output}/dropped)" if dropped else ""
        raise UserError(
            f"no row of {options.input} is left for training{filtered}; add rows, or pass a smaller --eval-share."
        )


def print_summary(manifest: dict[str, Any], plan: ShardPlan) -> None:
    for part in PARTS:
        counts = manifest[part]
        filled = counts["tokens"] / max(1, counts["rows"] * plan.sequence_length)
        trained = counts["trained_tokens"] / max(1, counts["tokens"])
        print(
            f"{part}: {counts['documents']:,} documents ({counts['cut_documents']:,} cut) in {counts['rows']:,} "
            f"rows of {plan.sequence_length} tokens: {filled:.1%} filled, {counts['trained_tokens']:,} tokens "
            f"({trained:.0%}) trained"
        )
        if (good := counts.get("good_documents")) is not None:
            print(f"  {good:,} good and {counts['documents'] - good:,} bad answers")
        if counts["lengths"]:
            lengths = ", ".join(f"{count:,} up to {bound}" for bound, count in counts["lengths"].items())
            print(f"  tokens per document: {lengths}")
    if len(manifest["sources"]) > 1:
        for name, counts in manifest["sources"].items():
            print(f"  {name}: {counts['documents']:,} documents, {counts['tokens']:,} tokens")
    duplicates = f", {manifest['rows_duplicate']:,} were duplicates" if plan.deduplicate else ""
    for name, reasons in manifest["dropped_by_reason"].items():
        listed = "; ".join(f"{reason}: {count:,}" for reason, count in reasons.items())
        print(f"  {name}: {sum(reasons.values()):,} rows were dropped ({listed}); see {plan.output}/dropped")
    if manifest["filters"]:
        dropped, changed = manifest["rows_dropped"], manifest["rows_changed"]
        print(f"Filters dropped {dropped:,} rows and changed {changed:,}.")
    print(f"{manifest['rows_rejected']:,} of {manifest['rows_read']:,} rows were bad{duplicates}.")
    print(f"Written to {plan.output}.")


def _hash(found: InputFiles) -> str:
    """Return a hash of what the files are, for a table of its columns, and of which rows are left out."""
    listed = [file[:3] for file in found.files]
    if found.version is not None or any(file.deleted for file in found.files):
        details = [(file.values, file.deleted.hex()) for file in found.files]
        listed = [*listed, *details, found.table]
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()


def _source_counts(partitions: list[PartitionSummary], number: int) -> dict[str, int]:
    counts = sum((Counter(partition.sources.get(number, {})) for partition in partitions), Counter())
    return {count: counts[count] for count in ("documents", "tokens", "trained_tokens")}


def _part_counts(shards: list[ShardSummary]) -> dict[str, Any]:
    names = ["rows", "documents", "cut_documents", "tokens", "trained_tokens"]
    if any(shard.good_documents is not None for shard in shards):
        names.append("good_documents")
    files = [{"name": shard.name, "rows": shard.rows} for shard in shards]
    lengths = sum((Counter(shard.lengths) for shard in shards), Counter())
    counts = {name: sum(getattr(shard, name) for shard in shards) for name in names}
    return {"files": files} | counts | {"lengths": {str(bound): lengths[bound] for bound in sorted(lengths)}}
