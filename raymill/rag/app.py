"""The Serve application of `serve_rag`: retriever, reranker, generator and ingress, which scale independently.

The deployments are in several modules, so that only the retriever and the reranker import torch. Their classes are
arguments, so that jobs/serve_rag.py can replace them: docs/rag.md.
"""

from typing import NamedTuple

from ray import serve
from ray.serve.deployment import Application

from raymill.rag.ingress import Ingress
from raymill.rag.options import RagOptions, Replicas
from raymill.serving.rate_limits import RequestLimits
from raymill.serving.request_queue import NO_RAY_LIMIT


class Parts(NamedTuple):
    """The classes of the deployments behind the ingress. Each takes the arguments of the library's own class."""

    retriever: type
    """With the methods of `raymill.rag.retrieval.Retriever`."""
    reranker: type
    """With the methods of `raymill.rag.retrieval.Reranker`."""
    generator: type
    """With the methods of `raymill.rag.generator.Generator`."""


def build(options: RagOptions, parts: Parts, location: str, address: str, limits: RequestLimits) -> Application:
    """Return the Serve application without starting it.

    `location` is the path or URI of the index; `address` is the URL of the model that writes the answers.
    """
    stop_s = limits.shutdown_s
    found = _deployment("Retriever", parts.retriever, options.retriever, stop_s)
    retriever = found.bind(location, options.device, options.candidates)
    reranker = _deployment("Reranker", parts.reranker, options.ranker, stop_s).bind(options.reranker, options.device)
    generator = _deployment("Generator", parts.generator, options.answerer, stop_s)
    answerer = generator.bind(options.generator, address, options.prompt_characters)
    ingress = _deployment("Ingress", serve.ingress()(Ingress), options.ingress, stop_s)
    ingress = ingress.options(max_ongoing_requests=NO_RAY_LIMIT)
    return ingress.bind((retriever, reranker, answerer), limits, options.sources, options.min_score)


def _deployment(name: str, cls: type, replicas: Replicas, stop_s: float) -> serve.Deployment:
    return serve.deployment(
        cls,
        name=name,  # not that of a user's own class, because dashboards show these names
        autoscaling_config={
            "min_replicas": replicas.min_replicas,
            "max_replicas": replicas.max_replicas,
            "target_ongoing_requests": replicas.target_ongoing_requests,
        },
        max_ongoing_requests=2 * replicas.target_ongoing_requests,
        graceful_shutdown_timeout_s=stop_s,  # Serve's 20 s would cut answers off
        max_surge_percent=100,  # an update starts new replicas before it stops the old ones
        max_constructor_retry_count=1,  # do not retry a replica that cannot load its model
        ray_actor_options={"num_cpus": replicas.num_cpus, "num_gpus": replicas.num_gpus},
    )
