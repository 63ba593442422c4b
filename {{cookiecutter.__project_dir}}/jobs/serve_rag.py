"""Answer questions at /rag from the documents that `embed` has indexed, with numbered sources.

The app has the same address, keys and limits as the model of `serve_llm`, and can ask that model for the answers.
"""

from raymill.job import Job, connect
from raymill.rag.options import RagOptions

JOB = Job(RagOptions, "rag")  # reads the options, before the slow imports below

import os

from raymill.rag import deployment
from raymill.rag.app import Parts
from raymill.rag.generator import Generator
from raymill.rag.retrieval import Reranker, Retriever
from raymill.serving import deploy, preflight
from raymill.serving.options import RAG_APP

PARTS = Parts(Retriever, Reranker, Generator)  # you can replace each by a class of your own: docs/rag.md


def main(options: RagOptions) -> None:
    """Serve answers from the index. Return when the app is healthy or, without a cluster, after Ctrl-C."""
    preflight.check_api_key()
    deployment.check_index(options)
    connect(log_to_driver=False)
    url = deployment.deploy_rag(options, PARTS)
    print(f"answers from {options.index} are served at {url}, for any OpenAI client", flush=True)
    print(f"web page: {url.removesuffix('v1')}", flush=True)
    if os.environ.get("RAY_ADDRESS", "local") == "local":
        deploy.wait_for_interrupt(RAG_APP)


JOB.run(main)
