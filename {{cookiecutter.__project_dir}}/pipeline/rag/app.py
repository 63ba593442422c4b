"""The Serve application behind `serve_rag`: retriever, reranker, generator and ingress, each of which scales by itself.

Each is in a module of its own, so that only those that compute import torch.
"""

from typing import TYPE_CHECKING

from ray import serve
from ray.serve.deployment import Application

from pipeline.rag.generation import Generator
from pipeline.rag.ingress import Ingress
from pipeline.rag.retrieval import Reranker, Retriever
from pipeline.serving.api_middleware import NO_BOUND, RequestLimits

if TYPE_CHECKING:
    from pipeline.rag.options import RagOptions, Replicas


def build(options: "RagOptions", location: str, address: str, rules: RequestLimits) -> Application:
    """The whole application: answers from the index at `location`, and where a model writes them, from that at the
    address; nothing is started."""
    retriever = _deployment(Retriever, options.retriever).bind(location, options.device, options.candidates)
    reranker = _deployment(Reranker, options.ranker).bind(options.reranker, options.device)
    generator = _deployment(Generator, options.answerer).bind(options.generator, address, options.prompt_characters)
    ingress = _deployment(serve.ingress()(Ingress), options.ingress).options(max_ongoing_requests=NO_BOUND)
    return ingress.bind((retriever, reranker, generator), rules, options.sources, options.min_score)


def _deployment(of: type, replicas: "Replicas") -> serve.Deployment:
    return serve.deployment(
        of,
        name=of.__name__,
        autoscaling_config={
            "min_replicas": replicas.min_replicas,
            "max_replicas": replicas.max_replicas,
            "target_ongoing_requests": replicas.target_ongoing_requests,
        },
        max_ongoing_requests=2 * replicas.target_ongoing_requests,
        max_surge_percent=100,  # an update starts the new ones before it ends the old
        max_constructor_retry_count=1,  # what cannot be loaded is not tried again for minutes
        ray_actor_options={"num_cpus": replicas.num_cpus, "num_gpus": replicas.num_gpus},
    )
