"""The Serve application behind `serve_llm`: vLLM replicas, and in front of them OpenAI's HTTP API with a key.

Ray's own ingress serves the API without any key and with CORS open to every origin, so it gets an app of ours here.
Two routes are Serve's and answer all who reach the port: /-/healthz says `success`, /-/routes that `llm` is at `/`.
"""

import hmac
import os
import re
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from ray import serve
from ray.llm._internal.common.callbacks.base import CallbackBase
from ray.llm._internal.serve.core.configs.openai_api_models import OpenAIHTTPException, to_model_metadata
from ray.serve.deployment import Application
from ray.serve.llm import LLMConfig, build_llm_deployment
from ray.serve.llm.deployment import LLMServer
from ray.serve.llm.ingress import OpenAiIngress, make_fastapi_ingress
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from jobs import secrets

if TYPE_CHECKING:
    from jobs.serve_llm import ServeOptions

OPEN_ROUTE = "/health"
HUB_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")


def build(options: "ServeOptions") -> Application:
    """The whole application for these options; nothing is started."""
    model = llm_config(options)
    ingress = serve.deployment(
        make_fastapi_ingress(OpenAiIngress, app=http_app()),
        ray_actor_options={"num_cpus": 0},  # it forwards; the engine does the work
        autoscaling_config=model.deployment_config["autoscaling_config"],
        max_ongoing_requests=10_000,  # the engine's own limit is the one that counts; what exceeds it waits here
    )
    return ingress.bind(
        llm_deployments={model.model_id: build_llm_deployment(model)},
        model_cards={model.model_id: to_model_metadata(model.model_id, model)},
    )


def llm_config(options: "ServeOptions") -> LLMConfig:
    """Ray's description of one model and of the replicas that serve it."""
    engine = {
        "dtype": options.dtype,
        "max_model_len": options.max_model_len,
        "max_num_seqs": options.max_num_seqs,
        "enforce_eager": options.enforce_eager,
        "tensor_parallel_size": options.tensor_parallel_size,
        "pipeline_parallel_size": options.pipeline_parallel_size,
        "kv_cache_memory_bytes": options.kv_cache_gib and int(options.kv_cache_gib * 2**30),
    }
    deployment = {
        "autoscaling_config": {
            "min_replicas": options.min_replicas,
            "max_replicas": options.max_replicas,
            "target_ongoing_requests": options.target_ongoing_requests,
        },
        "max_ongoing_requests": options.max_ongoing_requests,
        "max_constructor_retry_count": 1,  # a model that cannot be loaded is not tried again for minutes
        "ray_actor_options": {"num_cpus": options.num_cpus},
    }
    cpu = options.accelerator == "cpu"
    return LLMConfig(
        model_loading_config={"model_id": options.served_name, "model_source": options.source},
        engine_kwargs=engine,
        deployment_config=deployment,
        accelerator_config={"kind": "cpu"} if cpu else None,  # without it, Ray asks for a GPU
        accelerator_type=None if cpu else options.accelerator,
        callback_config={"callback_class": NodeSetup},
        server_cls=Server,
    )


class Server(LLMServer):
    """A replica with one engine, which says why when it cannot start."""

    async def _start_engine(self) -> None:
        # Ray's own adds a usage report, for which the replica waits until one more process has imported vLLM
        try:
            await self.engine.start()
        except Exception as error:
            raise RuntimeError(_first_error_in_log() or str(error)) from error


def _first_error_in_log() -> str | None:
    """The first error that the engine's processes logged: the exception here only says that one of them died."""
    log = Path("/proc/self/fd/1").read_text(errors="replace")
    found = re.search(r"ERROR .*?\] (\w+(?:Error|Exception): .+)", log)
    return found and found[1]


class NodeSetup(CallbackBase):
    """What a replica does on its nodes before its engine starts."""

    async def on_before_node_init(self) -> None:
        # vLLM reads folders and hub ids by itself; Ray would start a process just to find that out
        self.ctx.run_init_node = "://" in self.llm_config.model_loading_config.model_source
        for name in HUB_TOKENS:  # Ray put the values there, for all who see the dashboard; each process has its own
            self.ctx.runtime_env["env_vars"].pop(name, None)


class ApiKey:
    """ASGI middleware that demands SERVE_API_KEY as bearer token on every route but /health.

    Each replica reads the key as it starts, so that it is in no deployment's config, log or status.
    """

    def __init__(self, app: ASGIApp) -> None:
        secrets.load()
        key = os.environ.get("SERVE_API_KEY")
        if not key:
            raise RuntimeError("SERVE_API_KEY did not reach the replica: name it in [secrets] of settings.toml")
        self.app = app
        self.expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope["path"] == OPEN_ROUTE or self.admits(scope):
            await self.app(scope, receive, send)
            return
        message = "a valid API key is required: send the header `Authorization: Bearer YOUR_KEY`"
        response = error_response(401, message, code="invalid_api_key")
        response.headers["WWW-Authenticate"] = "Bearer"
        await response(scope, receive, send)

    def admits(self, scope: Scope) -> bool:
        """Whether the request bears the key; the time that it takes does not tell how much of a wrong one is right."""
        given = dict(scope["headers"]).get(b"authorization", b"")
        return hmac.compare_digest(given, self.expected)


def http_app() -> FastAPI:
    """The app that carries the API's routes: closed by the key, with every error in OpenAI's shape."""
    handlers: dict[int | type[Exception], Callable[[Request, Any], Coroutine[Any, Any, Response]]] = {
        HTTPException: _http_error,
        OpenAIHTTPException: _engine_error,
        RequestValidationError: _validation_error,
        Exception: _unexpected_error,
    }
    app = FastAPI(title="OpenAI API", exception_handlers=handlers)
    app.add_middleware(ApiKey)
    app.add_api_route(OPEN_ROUTE, _health)
    return app


def error_response(status: int, message: str, *, param: str | None = None, code: str | None = None) -> JSONResponse:
    """An error as https://platform.openai.com/docs/guides/error-codes has it, so that its clients understand it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": message, "type": kind, "param": param, "code": code}}, status)


async def _health() -> dict[str, str]:
    """Says that requests arrive; tells strangers nothing else."""
    return {"status": "ok"}


async def _http_error(request: Request, error: HTTPException) -> JSONResponse:
    return error_response(error.status_code, str(error.detail), code="not_found" if error.status_code == 404 else None)


async def _engine_error(request: Request, error: OpenAIHTTPException) -> JSONResponse:
    return error_response(error.status_code, error.message)


async def _validation_error(request: Request, error: RequestValidationError) -> JSONResponse:
    first = error.errors()[0]
    param = ".".join(str(part) for part in first["loc"][1:])  # after "body"
    return error_response(400, f"{param}: {first['msg']}" if param else first["msg"], param=param or None)


async def _unexpected_error(request: Request, error: Exception) -> JSONResponse:
    return error_response(500, "the server failed on this request; its log has the reason")
