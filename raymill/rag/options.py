"""Options of `embed`, `serve_rag` and `evaluate_rag`, from settings.toml and from the command line."""

from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveInt, model_validator

from raymill import settings


class EmbedOptions(settings.Section):
    """The [embed] section of settings.toml."""

    input: str
    """A file, folder, glob or s3:// URI: PDF, HTML, Markdown, text, or parquet or JSONL with `text` (and `id`)."""
    index: str
    """Folder or s3:// URI of the index."""
    shared_paths: tuple[str, ...] = ()
    """Folders that every node mounts. If the cluster has several nodes, other local paths are refused."""
    model: str
    """Embedding model: a Hugging Face folder or hub id."""
    chunk_tokens: int = Field(ge=8)
    """Maximum number of tokens in a chunk."""
    chunk_overlap: int = Field(ge=0)
    """Approximate number of tokens by which a chunk overlaps the previous one."""
    num_workers: PositiveInt
    """Number of workers. Each has its own copy of the model."""
    num_cpus: NonNegativeFloat
    """Logical CPUs of each worker."""
    num_gpus: NonNegativeFloat
    """GPUs of each worker."""
    device: Literal["cpu", "cuda"]
    """Device of the workers."""
    precision: Literal["fp32", "bf16"]
    """Data type of the weights and the computation."""
    batch_chunks: PositiveInt
    """Chunks in one forward pass."""
    max_bad_share: float = Field(ge=0, le=1)
    """Share of documents that cannot be read, 0 to 1, above which the job fails."""
    questions: str = ""
    """JSONL with `question` and `document`, the id of the document to find. If set, the job prints the hit rate."""
    fresh: bool = False
    """Rebuild the index from scratch."""

    @model_validator(mode="after")
    def _overlap_is_smaller(self) -> "EmbedOptions":
        if 2 * self.chunk_overlap > self.chunk_tokens:
            raise ValueError("chunk_overlap is more than half of chunk_tokens")
        return self

    @property
    def needs(self) -> dict[str, float]:
        """Resources that Ray reserves for each worker."""
        return {name: amount for name, amount in (("CPU", self.num_cpus), ("GPU", self.num_gpus)) if amount}


class Replicas(settings.Section):
    """Replicas of one deployment, and the resources of each."""

    min_replicas: int = Field(ge=0)
    """Replicas that always run."""
    max_replicas: PositiveInt
    """Maximum number of replicas."""
    target_ongoing_requests: PositiveInt = 8
    """Average number of requests in progress per replica above which replicas are added."""
    num_cpus: NonNegativeFloat
    """Logical CPUs of each replica."""
    num_gpus: NonNegativeFloat = 0
    """GPUs of each replica."""

    @model_validator(mode="after")
    def _in_order(self) -> "Replicas":
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas = {self.min_replicas} is more than max_replicas = {self.max_replicas}")
        return self


class RagOptions(settings.Section):
    """The [rag] section of settings.toml."""

    index: str
    """Folder or s3:// URI of the index that `embed` wrote."""
    shared_paths: tuple[str, ...] = ()
    """Folders that every node mounts. If the cluster has several nodes, other local paths are refused."""
    candidates: PositiveInt
    """Number of chunks that the retriever finds for a question."""
    sources: PositiveInt
    """Number of best-ranked chunks that the answer may use."""
    reranker: str = ""
    """Cross-encoder that ranks the chunks: a Hugging Face folder or hub id. Empty: rank by vectors and shared words."""
    min_score: float
    """Minimum score of a source. If no source reaches it, the answer is "I do not know"."""
    generator: Literal["model", "quote"]
    """`model`: the model of `serve_llm` writes the answer. `quote`: the best source's best sentence is the answer."""
    prompt_characters: PositiveInt
    """Maximum total number of characters of the sources in the prompt."""
    device: Literal["cpu", "cuda"]
    """Device of the retriever and the reranker. With `cuda`, set num_gpus for both."""
    retriever: Replicas
    """Replicas of the retriever, which embeds the question and searches the index."""
    ranker: Replicas
    """Replicas of the reranker."""
    answerer: Replicas
    """Replicas of the generator, which asks the model or quotes a source."""
    ingress: Replicas
    """Replicas of the HTTP API."""
    start_timeout_s: PositiveInt
    """Seconds to wait for the application to become healthy."""


class EvaluateRagOptions(settings.Section):
    """The [evaluate_rag] section of settings.toml."""

    questions: str
    """JSONL with `question`, and optionally `document`, the id of the document to find, and the expected `answer`."""
    output: str
    """JSONL file for the answers, their sources and their scores. An existing file is replaced."""
    at_once: PositiveInt
    """Number of questions that are asked at the same time."""
