"""The Serve application behind `serve_llm`: replicas that answer OpenAI's HTTP API themselves, behind a door of ours.

HAProxy hands each connection straight to a replica, whose app is vLLM's own: nothing that speaks Python lies between
a client and the engine. What vLLM leaves open is closed here: routes that nobody needs, CORS for every origin, no key.
Without a key there are /health and, of the app at `/`, the page at `/`. Two routes more are Serve's and answer all who
reach the port: /-/healthz says `success`, /-/routes that `llm` is at `/`.
"""

import asyncio
import logging
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fastapi import FastAPI, HTTPException, Request
from ray import serve
from ray.serve.config import BackpressureConfig, RequestRouterConfig
from ray.serve.deployment import Application
from ray.serve.llm import LLMConfig, build_llm_deployment
from ray.serve.llm.request_router import PrefixCacheAffinityRouter
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp
from vllm.entrypoints.serve.engine.protocol import ModelCard, ModelList, ModelPermission
from vllm.entrypoints.serve.exception_handling.handlers.vllm_error import vllm_error_handler
from vllm.v1.engine.exceptions import EngineGenerateError

import settings
from pipeline.ray_support.private import serve as private_serve
from pipeline.ray_support.private.serve_llm import EngineServer, NodeCallback, with_request_router
from pipeline.serving import routing
from pipeline.serving.adapters import Adapters
from pipeline.serving.api_middleware import DEAD_RETRY_S, NO_BOUND, OPEN_ROUTE, ApiMiddleware, Queued, RequestLimits
from pipeline.serving.canary import ROOT, Reporter
from pipeline.serving.keys import Keys
from pipeline.serving.model_router import MetricsMiddleware, ModelRouter
from pipeline.serving.page import Page

if TYPE_CHECKING:
    from pipeline.serving.options import ServeOptions

ROUTES = {
    OPEN_ROUTE,
    "/openapi.json",
    "/docs",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
}  # not /v1/responses: vLLM 0.29 fails with status 500 on many of the items that its own description names
MISREAD = (AttributeError, LookupError)  # what vLLM stumbles over in messages that are not as OpenAI describes them
DEPLOYMENT = "Server"  # the same whatever the model, so that another one replaces it in place
log = logging.getLogger("ray.serve")
ENGINE_CHECK_S = 0.25
LAST_WORDS_S = 2  # maximum wait for the error responses to requests that a dead engine was working on
HUB_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")


class Place(NamedTuple):
    """Where an app is among those that are served."""

    address: str
    """Of all of them, as this cluster's machines reach it."""
    path: str
    """Of this one; the one at the root hands on what is for others."""
    model: str
    """Name by which clients ask for its model."""


def build(options: "ServeOptions", address: str) -> Application:
    """The whole application for these options, to be reached at the address; nothing is started."""
    config = llm_config(options)
    app = build_llm_deployment(
        config,
        deployment_cls=serve.ingress()(Server),
        bind_kwargs={
            "rules": options.rules,
            "adapters": _adapters(options),
            "place": Place(address, options.path, options.served_name),
        },
        override_serve_options={"name": DEPLOYMENT},
    )
    if not options.prefix_routing:
        return app
    return with_request_router(app, config)


def engine(options: "ServeOptions") -> dict[str, Any]:
    """What vLLM is told, by the names of its own engine arguments."""
    return {
        "dtype": options.dtype,
        "max_model_len": options.max_model_len,
        "max_num_seqs": options.max_num_seqs,
        "enforce_eager": options.enforce_eager,
        "tensor_parallel_size": options.tensor_parallel_size,
        "pipeline_parallel_size": options.pipeline_parallel_size,
        "kv_cache_memory_bytes": options.kv_cache_gib and int(options.kv_cache_gib * 2**30),
    } | (_lora(options) if options.adapters else {})


def _lora(options: "ServeOptions") -> dict[str, Any]:
    return {"enable_lora": True, "max_loras": options.max_loras, "max_lora_rank": options.max_lora_rank}


def _adapters(options: "ServeOptions") -> Adapters | None:
    return Adapters(settings.resolve(options.adapters), options.model) if options.adapters else None


def llm_config(options: "ServeOptions") -> LLMConfig:
    """Ray's description of one model and of the replicas that serve it."""
    deployment: dict[str, Any] = {
        "autoscaling_config": {
            "min_replicas": options.min_replicas,
            "max_replicas": options.max_replicas,
            "target_ongoing_requests": options.target_ongoing_requests,
            "upscale_delay_s": options.upscale_delay_s,
            "downscale_delay_s": options.downscale_delay_s,
        },
        "max_ongoing_requests": NO_BOUND,
        # requests that Serve's proxy holds while an app that is scaled to zero starts a replica; more get 503
        "max_queued_requests": options.max_ongoing_requests + options.max_queued_requests,
        "backpressure_config": BackpressureConfig(retry_after_s=DEAD_RETRY_S),
        "health_check_period_s": 1,  # Serve replaces a dead replica at the next check
        "max_surge_percent": options.max_surge_percent,
        "max_constructor_retry_count": 1,  # a model that cannot be loaded is not tried again for minutes
        "ray_actor_options": {"num_cpus": options.num_cpus},
        "logging_config": {"enable_access_log": False},  # two lines written for each request; the metrics count them
    }
    if options.prefix_routing:
        deployment["request_router_config"] = RequestRouterConfig(
            request_router_class=routing.SamePrefix if options.min_replicas else PrefixCacheAffinityRouter,
            # by itself it would pile requests up on one replica, and remember all that was ever asked
            request_router_kwargs={"imbalanced_threshold": options.target_ongoing_requests, "do_eviction": True},
        )
    elif options.min_replicas:
        deployment["request_router_config"] = routing.behind_haproxy(routing.LeastLoaded)
    cpu = options.accelerator == "cpu"
    return LLMConfig(
        model_loading_config={"model_id": options.served_name, "model_source": options.source},
        # a backstop: our own queue limit applies first
        engine_kwargs=engine(options) | {"max_num_queued_reqs": 2 * options.max_ongoing_requests},
        deployment_config=deployment,
        accelerator_config={"kind": "cpu"} if cpu else None,  # without it, Ray asks for a GPU
        accelerator_type=None if cpu else options.accelerator,
        callback_config={"callback_class": NodeSetup},
        server_cls=Server,
    )


class Server(EngineServer):
    """A replica: one engine, and the HTTP API that it answers."""

    async def __init__(
        self, llm_config: LLMConfig, rules: RequestLimits, adapters: Adapters | None, place: Place
    ) -> None:
        self._rules = rules
        self._place = place
        self._keys = Keys()  # before the engine starts: without a key, nothing does
        self._adapters = adapters
        if adapters:
            adapters.register()
        await super().__init__(llm_config)

    async def build_asgi_app(self, app: FastAPI) -> ASGIApp:
        """Return vLLM's app behind the middleware, and start the background tasks."""
        close(app)
        app.add_api_route("/v1/models", self._list_models)
        app.add_api_route("/v1/models/{model:path}", self._retrieve_model)
        self._serving = app.state.openai_serving_models
        self._engine_client = app.state.engine_client
        self._reporter = Reporter(self._place.path)
        tasks = [self._keys.keep_up(), self._reporter.keep_up(self._names), self._end_with_engine()]
        if self._adapters:
            tasks.append(self._adapters.keep_up(self._serving))
        self._tasks = [asyncio.create_task(task) for task in tasks]  # kept: a task that nobody holds may vanish
        answering = Queued(MetricsMiddleware(app, self._reporter.note), self._rules, self._alive)
        if self._place.path != ROOT:
            return ApiMiddleware(answering, self._keys, self._rules, self._alive)
        fork = ModelRouter(answering, self._place.model, self._place.address, lambda: self._reporter.routes)
        return Page(ApiMiddleware(fork, self._keys, self._rules, self._alive))

    def _alive(self) -> bool:
        """Return whether the engine is alive."""
        return not self._engine_client.errored

    async def _end_with_engine(self) -> None:
        """Exit soon after the engine dies, so that Serve replaces this replica at once.

        Serve itself waits for three failed health checks, and requests fail meanwhile. Engine workers on other
        machines end with this process.
        """
        while self._alive():
            await asyncio.sleep(ENGINE_CHECK_S)
        log.error("the engine died, so this replica exits; Serve starts another")
        await _stop_listening(LAST_WORDS_S)
        os._exit(1)

    def _names(self) -> list[str]:
        return [self._place.model, *(self._adapters.names if self._adapters else [])]

    async def _list_models(self) -> ModelList:
        """The model; its adapters, whether they are loaded or not; and what is served beside it."""
        models: ModelList = await self._serving.registry.show_available_models()
        models.data[0].root = self._place.model  # vLLM puts the model's local folder there
        for name in self._names()[1:]:
            models.data.append(ModelCard(id=name, root=self._place.model, permission=[ModelPermission()]))
        for name in self._reporter.routes.others:
            models.data.append(ModelCard(id=name, root=name, permission=[ModelPermission()]))
        return models

    async def _retrieve_model(self, model: str) -> ModelCard:
        for card in (await self._list_models()).data:
            if card.id == model:
                return card
        raise HTTPException(404, f"model {model} is not served: GET /v1/models lists the models that are")

    async def start_engine(self) -> None:
        """Start the engine. Raises RuntimeError with the first error in its log."""
        try:
            await super().start_engine()
        except Exception as error:
            raise RuntimeError(_first_error_in_log() or str(error)) from error


async def _stop_listening(timeout_s: float) -> None:
    """Stop accepting connections, so that HAProxy uses other replicas, and wait until open requests are answered.

    Serve's own shutdown also closes idle connections, on which HAProxy may be sending a request at that moment.
    """
    http_server = private_serve.own_http_server()
    for server in http_server.servers:
        server.close()
    deadline = time.monotonic() + timeout_s
    await asyncio.sleep(ENGINE_CHECK_S)
    while http_server.server_state.tasks and time.monotonic() < deadline:
        await asyncio.sleep(0.01)


def close(app: FastAPI) -> None:
    """Take away what vLLM's app has beyond the API: admin routes, and leave for every web page to call it."""
    app.router.routes = [route for route in app.router.routes if getattr(route, "path", None) in ROUTES]
    app.user_middleware = [each for each in app.user_middleware if each.cls is not CORSMiddleware]
    for kind in MISREAD:
        app.add_exception_handler(kind, _say_misread)
    app.exception_handler(EngineGenerateError)(_say_failed)
    app.middleware_stack = None  # built anew, without


async def _say_misread(_: Request, error: Exception) -> JSONResponse:
    log.warning("vLLM could not read a request", exc_info=error)  # may be its fault: this is how to tell
    message = f"this request could not be read ({type(error).__name__}: {error}): compare it with /docs"
    return JSONResponse({"error": message}, 400)


async def _say_failed(request: Request, error: EngineGenerateError) -> JSONResponse:
    cause = error.__cause__
    if isinstance(cause, OverflowError):  # a number in the request is larger than an engine can be told
        return await _say_misread(request, cause)
    return await vllm_error_handler(request, error)


def _first_error_in_log() -> str | None:
    """The first error that the engine's processes logged: the exception here only says that one of them died."""
    log = Path("/proc/self/fd/1").read_text(errors="replace")
    found = re.search(r"ERROR .*?\] (\w+(?:Error|Exception): .+)", log)
    return found and found[1]


class NodeSetup(NodeCallback):
    """What a replica does on its nodes before its engine starts."""

    async def on_before_node_init(self) -> None:
        # vLLM reads folders and hub ids by itself; Ray would start a process just to find that out
        self.ctx.run_init_node = "://" in self.llm_config.model_loading_config.model_source
        for name in HUB_TOKENS:  # Ray put the values there, for all who see the dashboard; each process has its own
            self.ctx.runtime_env["env_vars"].pop(name, None)
