"""Deploys the Serve application that answers questions from an index."""

import asyncio

import ray
from ray import serve

from raymill import settings
from raymill.errors import UserError
from raymill.rag import app, index
from raymill.rag.options import RagOptions
from raymill.ray_support import capacity, model_cache
from raymill.serving import deploy, http_server, routing_state
from raymill.serving.options import RAG_APP, RAG_PATH, ServeOptions
from raymill.settings import inv


def check_index(options: RagOptions) -> None:
    """Raise UserError if the index does not exist. Print a note if it cannot be searched by words."""

    async def has_full_text() -> bool:
        return await (await index.Reader.open(settings.resolve(options.index))).has_full_text()

    if not asyncio.run(has_full_text()):
        print(
            f"note: {options.index} can only be searched by meaning, not by words. Run: {inv('submit embed')}",
            flush=True,
        )


def deploy_rag(options: RagOptions, parts: app.Parts) -> str:
    """Deploy the application, or update the running one. Return the base URL for OpenAI clients when it is healthy.

    Raises:
        UserError: no served model can write the answers, a path or the port cannot be used, or the application fails
            to start.
    """
    location = settings.resolve(options.index)
    paths = {"index": location}
    if options.reranker:
        from raymill.rag import cross_encoder  # imported late, because it imports torch

        paths["reranker"] = model_cache.find(options.reranker)
        cross_encoder.check(paths["reranker"])
    capacity.refuse_private_paths(paths, options.shared_paths, "rag")
    server = _server(options)
    application = app.build(options, parts, location, http_server.cluster_address(server), server.limits)
    timeout_s = options.start_timeout_s
    deployment = deploy.Deployment("serve_rag", RAG_APP, RAG_APP, server.root, RAG_PATH, timeout_s)
    deploy.deploy_app(application, deployment)
    return f"{deployment.url}/v1"


def running_url() -> str:
    """Return the base URL of the running application for OpenAI clients.

    Raises:
        UserError: the application is not running.
    """
    address = http_server.current_address()
    if not address or RAG_APP not in serve.status().applications:
        raise UserError(f"serve_rag is not running. Run: {inv('submit serve_rag')}")
    server = settings.load(ServeOptions, "serve").model_copy(update=dict(zip(("host", "port"), address, strict=True)))
    return f"{http_server.cluster_address(server)}{RAG_PATH}/v1"


def _server(options: RagOptions) -> ServeOptions:
    """Return the options in [serve], with the address at which Serve listens. Start Serve if it is not running."""
    server = settings.load(ServeOptions, "serve")
    if address := http_server.current_address():
        server = server.model_copy(update=dict(zip(("host", "port"), address, strict=True)))
    else:
        http_server.check_address(server)
        http_server.start(server)
    if options.generator == "model" and routing_state.ROOT not in ray.get(routing_state.actor().apps.remote()):
        raise UserError(
            f"no served model can write the answers. Run: {inv('submit serve_llm')}, or pass --generator quote"
        )
    return server
