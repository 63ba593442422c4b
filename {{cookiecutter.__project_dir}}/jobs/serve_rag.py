"""Serves answers from the documents that `embed` put into an index, with numbered sources, at /rag.

It stands beside the model of `serve_llm`, at the same address, behind the same keys and limits, and asks that model.
"""

from pipeline.rag.options import RagOptions
from pipeline.ray_support import cli

if __name__ == "__main__":
    cli.parse(RagOptions, "rag")  # before the imports below, which take seconds

import asyncio
import logging
import os

import ray
from ray import serve

import settings
from jobs import serve_llm
from pipeline.rag import index
from pipeline.ray_support import capacity, job_secrets, model_cache
from pipeline.serving import canary
from pipeline.serving.options import ServeOptions
from settings import UserError

APP, PATH = "rag", "/rag"


def main(options: RagOptions) -> None:
    """Serve answers from the index, with sources, over an OpenAI-compatible API, and return when it answers."""
    job_secrets.load()
    if not job_secrets.read(["SERVE_API_KEY"]):
        raise UserError("SERVE_API_KEY is not set, and nothing is served without a key: put it into .env.")
    asyncio.run(index.Reader.open(settings.resolve(options.index)))  # refuses where there is none
    cli.connect(log_to_driver=False)
    print(f"answers from {options.index} are served at {deploy(options)}, for any client of OpenAI's API", flush=True)
    if os.environ.get("RAY_ADDRESS", "local") == "local":
        serve_llm.wait_for_interrupt(APP)


def deploy(options: RagOptions) -> str:
    """Deploy the application, or update the one that runs; returns the base URL for OpenAI clients when it answers.

    Raises:
        settings.UserError: there is no model to ask, or the application fails to start.
    """
    from pipeline.rag import app  # imports torch

    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # what it says at INFO, wait_until_healthy says shorter
    location = settings.resolve(options.index)
    paths = {"index": location} | ({"reranker": model_cache.find(options.reranker)} if options.reranker else {})
    capacity.refuse_private_paths(paths, options.shared_paths, "rag")
    server = _server(options)
    url = f"{server.root}{PATH}"
    is_update = serve_llm.answers(url)
    application = app.build(options, location, serve_llm.address(server), server.rules)
    target = serve.RunTarget(application, name=APP, route_prefix=PATH)
    serve.run_many([target], wait_for_applications_running=False)
    serve_llm.wait_until_healthy("serve_rag", APP, APP, url, options.start_timeout_s, is_update=is_update)
    return f"{url}/v1"


def _server(options: RagOptions) -> ServeOptions:
    """[serve], with the address at which Serve listens; it is started there where nothing is served yet."""
    server = settings.load(ServeOptions, "serve")
    if listens := serve_llm.current_address():
        server = server.model_copy(update=dict(zip(("host", "port"), listens, strict=True)))
    else:
        serve_llm.check_address(server)
        serve_llm.start_serve(server)
    if options.generator == "model" and canary.ROOT not in ray.get(canary.actor().apps.remote()):
        raise UserError("no model is served that could answer: inv submit serve_llm, or pass --generator quote.")
    return server


if __name__ == "__main__":
    cli.run(main)
