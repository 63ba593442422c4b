"""Serve a model with vLLM over an OpenAI-compatible API.

python -m jobs.serve_llm            serves the model in [serve] of settings.toml, or updates the running one
python -m jobs.serve_llm --help     explains every option
"""

from raymill.job import Job, connect
from raymill.serving.options import ServeOptions

JOB = Job(ServeOptions, "serve")  # reads the options, before the slow imports below

import os

from raymill.serving import deploy, preflight
from raymill.serving.hooks import Check, Hooks, Logger
from raymill.settings import inv

CHECKS: list[Check] = []  # functions that reject requests, and
LOGGERS: list[Logger] = []  # functions that log them: docs/serving.md


def main(options: ServeOptions) -> None:
    """Serve a model. Return when it is healthy or, without a cluster, after Ctrl-C."""
    preflight.check_api_key()
    preflight.check_model(options)
    connect(log_to_driver=False)  # vLLM prints pages of messages, which are also in Ray's log files
    deploy.deploy_model(options, Hooks(tuple(CHECKS), tuple(LOGGERS)))
    print(f"{options.served_name} is served at {options.url}\nnext: {inv('chat')}", flush=True)
    if os.environ.get("RAY_ADDRESS", "local") == "local":
        deploy.wait_for_interrupt()


JOB.run(main)
