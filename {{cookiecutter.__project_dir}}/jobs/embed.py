"""Embed documents into an index for `serve_rag`. Later runs embed only new or changed documents.

A hash of the text shows whether a document has changed. Documents that are gone from the input are removed from the
index.
"""

from raymill.job import Job, connect
from raymill.rag.options import EmbedOptions

JOB = Job(EmbedOptions, "embed")  # reads the options, before the slow imports below

from raymill import settings
from raymill.errors import UserError
from raymill.rag import documents, embedding, hit_rate, index, pipeline
from raymill.rag.chunking import Chunker
from raymill.rag.embedder import EmbeddingModelInfo
from raymill.rag.hit_rate import Question
from raymill.ray_support import capacity, job_lease, model_cache
from raymill.settings import inv


def main(options: EmbedOptions) -> None:
    """Split documents into chunks, embed the chunks, and save them with their vectors in a searchable index."""
    source = documents.find(settings.resolve(options.input))
    questions = hit_rate.load_questions(options.questions, Question, "embed")
    model = model_cache.find(options.model)
    model_info = EmbeddingModelInfo(model)
    location = settings.resolve(options.index)
    connect()
    _check_cluster(options, model, location)
    config = index.IndexConfig(options.model, options.chunk_tokens, options.chunk_overlap)
    resources = {"num_cpus": options.num_cpus, "num_gpus": options.num_gpus}
    pool = pipeline.WorkerPool(
        options.num_workers, resources, model, options.device, options.precision, options.batch_chunks
    )
    cut = Chunker(model_info.tokenizer, options.chunk_tokens, options.chunk_overlap)
    with job_lease.hold(location, "--index") as lease:
        writer = index.Writer(
            location, options.input, config, model_info.dimension, fresh=options.fresh, confirm=lease.confirm
        )
        counts = embedding.update_index(source, writer, pool, cut, options)
        print(
            "documents:", ", ".join(f"{counts[name]:,} {name}" for name in ("new", "changed", "removed", "unchanged"))
        )
        print(f"{writer.finish():,} chunks are in {location}", flush=True)
    if questions:
        hit_rate.print_hit_rate(questions, pool, location)
    print(f"next: {inv('submit serve_rag')}", flush=True)


def _check_cluster(options: EmbedOptions, model: str, location: str) -> None:
    capacity.refuse_too_many_workers(options.num_workers, options.needs, "num_cpus and num_gpus in [embed]")
    cpus_with_reader = options.num_cpus * options.num_workers + 1
    if sum(node.count * node.resources.get("CPU", 0) for node in capacity.nodes()) < cpus_with_reader:
        raise UserError(
            f"{options.num_workers} workers leave no CPU for reading the documents: use a smaller --num-workers, or "
            "a smaller num_cpus in [embed]."
        )
    paths = {"input": settings.resolve(options.input), "index": location, "model": model}
    capacity.refuse_private_paths(paths, options.shared_paths, "embed")


JOB.run(main)
