"""The Serve application of `serve_llm`: replicas that serve OpenAI's HTTP API.

HAProxy connects clients directly to a replica, which runs vLLM's own app behind our middleware. This module removes
what vLLM leaves open: routes that nobody needs, and CORS for every origin. All routes need a key, except /health, the
web page at /, and two of Serve's own routes: /-/healthz returns `success`, and /-/routes lists the applications.
"""

import asyncio
import logging
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import ray
from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from prometheus_fastapi_instrumentator.middleware import PrometheusInstrumentatorMiddleware
from ray import serve
from ray.serve.config import BackpressureConfig, RequestRouterConfig
from ray.serve.deployment import Application
from ray.serve.llm import LLMConfig, build_llm_deployment
from ray.serve.llm.request_router import PrefixCacheAffinityRouter
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp
from vllm import envs, platforms
from vllm.entrypoints.serve.engine.protocol import ModelCard, ModelList, ModelPermission
from vllm.entrypoints.serve.exception_handling import error_response, utils
from vllm.entrypoints.serve.exception_handling.handlers.vllm_error import vllm_error_handler
from vllm.v1.engine.exceptions import EngineGenerateError

from raymill import settings
from raymill.ray_support import compile_cache
from raymill.ray_support.private import engine_metrics, http
from raymill.ray_support.private import serve as private_serve
from raymill.ray_support.private.serve_llm import EngineServer, NodeCallback, with_request_router
from raymill.serving import (
    accounting,
    api_handlers,
    bounded_parsing,
    cpu_engine,
    engine_arguments,
    fair_scheduler,
    grammars,
    hooks,
    model_corrections,
    prompt_length,
    replica_exit,
    routing,
    validation,
)
from raymill.serving.accounting import AccessLog, KeyMetrics, MetricsMiddleware, RequestRecord, current
from raymill.serving.adapters import AdapterCheck, Adapters
from raymill.serving.api_middleware import HEALTH_ROUTE, ApiMiddleware
from raymill.serving.errors import ENGINE_RETRY_S, engine_dead, shortened
from raymill.serving.hooks import Hooks
from raymill.serving.keys import ApiKeys
from raymill.serving.model_router import KnownModels, ModelRouter, unknown_model
from raymill.serving.options import ServeOptions
from raymill.serving.page import ChatPage
from raymill.serving.rate_limits import RequestLimits
from raymill.serving.request_queue import NO_RAY_LIMIT, QueueMiddleware
from raymill.serving.routing_state import ROOT, Reporter

ROUTES = {
    HEALTH_ROUTE,
    "/openapi.json",
    "/docs",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
}
# CORS would let every website read answers. The metrics of requests were served at /metrics, which is not in ROUTES.
REMOVED_MIDDLEWARE = (CORSMiddleware, PrometheusInstrumentatorMiddleware)
PARSE_ERRORS = (AttributeError, LookupError)  # vLLM raises these for malformed messages
CPU_LORA = "raymill.ray_support.private.cpu_lora.SkipTokensWithoutAdapter"
"""Extension of vLLM's workers on CPUs. A name, because only vLLM's own processes import it."""
DEPLOYMENT = "Server"  # the same for every model, so that a new model replaces the old one in place
log = logging.getLogger("ray.serve")
# a second barrier behind the checks of bodies: vLLM accepts no media, and fetches none
NO_MEDIA = {
    "limit_mm_per_prompt": {"image": 0, "video": 0, "audio": 0},
    "allowed_media_domains": ["nothing.invalid"],
}
NO_REDIRECTS = {"VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0"}  # a redirect from an allowed domain leads to any address
ENGINE_CHECK_S = 0.25
DRAIN_TIMEOUT_S = 2  # time for sending error responses to the requests that a dead engine was processing
MAX_SANITIZED = 1000  # maximum bytes of an error of vLLM; its search for paths takes 10 ms for these, 17 s for 16,000
HUB_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")


class AppLocation(NamedTuple):
    """Address, path and model of an app."""

    address: str
    """URL of Serve's HTTP server, which every machine of the cluster can reach."""
    path: str
    """Path of this app. The app at the root path forwards requests to the others."""
    model: str
    """Name that clients use for this app's model."""


def build(options: ServeOptions, functions: Hooks, address: str, zone: dict[str, str] | None = None) -> Application:
    """Return the Serve application for these options, without starting it.

    Args:
        functions: the user's own checks and loggers of requests.
        address: the URL of Serve's HTTP server.
        zone: labels that all machines of all replicas have. None: replicas run on any machine.
    """
    config = llm_config(options)
    serve_options: dict[str, Any] = {"name": DEPLOYMENT}
    if zone:
        serve_options["placement_group_bundle_label_selector"] = [zone]  # one entry applies to all bundles
    app = build_llm_deployment(
        config,
        deployment_cls=serve.ingress()(Server),
        bind_kwargs={
            "limits": options.limits,
            "adapters": _adapters(options),
            "location": AppLocation(address, options.path, options.served_name),
            "share_prefix_cache": options.share_prefix_cache,
            "functions": functions,
        },
        override_serve_options=serve_options,
    )
    if not options.prefix_routing:
        return app
    return with_request_router(app, config)


def engine_args(options: ServeOptions) -> dict[str, Any]:
    """Return vLLM's engine arguments."""
    return {
        **NO_MEDIA,
        **grammars.ENGINE_ARGS,
        "dtype": options.dtype,
        "max_model_len": options.max_model_len,
        "max_num_seqs": options.max_num_seqs,
        "enforce_eager": options.enforce_eager,
        "tensor_parallel_size": options.tensor_parallel_size,
        "pipeline_parallel_size": options.pipeline_parallel_size,
        "kv_cache_memory_bytes": options.kv_cache_gib and int(options.kv_cache_gib * 2**30),
        **engine_arguments.of_engine(options.engine),
        **model_corrections.arguments(options.engine),
        **({"distributed_executor_backend": cpu_engine.EXECUTOR} if options.is_one_cpu else {}),
    } | (_lora(options) if options.adapters else {})


def api_args(options: ServeOptions) -> dict[str, Any]:
    """Return the arguments of vLLM's HTTP API."""
    tools = {"enable_auto_tool_choice": True, "tool_call_parser": options.tool_parser} if options.tool_parser else {}
    return tools | {"reasoning_parser": options.reasoning_parser} | engine_arguments.of_api(options.engine)


def _lora(options: ServeOptions) -> dict[str, Any]:
    lora = {"enable_lora": True, "max_loras": options.max_loras, "max_lora_rank": options.max_lora_rank}
    return lora | ({"worker_extension_cls": CPU_LORA} if options.accelerator == "cpu" else {})


def _adapters(options: ServeOptions) -> Adapters | None:
    if not options.adapters:
        return None
    # transformers cannot describe a model that brings its own code without running it here, too
    source = "" if options.trust_remote_code else options.source
    check = AdapterCheck(source, options.max_lora_rank, options.dtype)
    return Adapters(settings.resolve(options.adapters), options.model, check, options.request_timeout_s)


def llm_config(options: ServeOptions) -> LLMConfig:
    """Return Ray's configuration for a model and its replicas."""
    deployment: dict[str, Any] = {
        "autoscaling_config": {
            "min_replicas": options.min_replicas,
            "max_replicas": options.max_replicas,
            "target_ongoing_requests": options.target_ongoing_requests,
            "upscale_delay_s": options.upscale_delay_s,
            "downscale_delay_s": options.downscale_delay_s,
        },
        "max_ongoing_requests": NO_RAY_LIMIT,
        # requests that Serve's proxy holds while an app without replicas starts one; further requests get 503
        "max_queued_requests": options.max_ongoing_requests + options.max_queued_requests,
        "backpressure_config": BackpressureConfig(retry_after_s=ENGINE_RETRY_S),
        "graceful_shutdown_timeout_s": options.limits.shutdown_s,  # Serve's 20 s would cut answers off
        "health_check_period_s": 1,  # Serve replaces a dead replica at the next check
        "max_surge_percent": options.max_surge_percent,
        "max_constructor_retry_count": 1,  # do not retry a model that cannot be loaded
        "ray_actor_options": {"num_cpus": options.num_cpus},
        "logging_config": {"enable_access_log": False},  # two lines per request, which the metrics replace
    }
    if options.prefix_routing:
        deployment["request_router_config"] = RequestRouterConfig(
            request_router_class=routing.PrefixRouter if options.min_replicas else PrefixCacheAffinityRouter,
            # the defaults overload one replica, and never forget a prefix
            request_router_kwargs={"imbalanced_threshold": options.target_ongoing_requests, "do_eviction": True},
        )
    elif options.min_replicas:
        deployment["request_router_config"] = routing.behind_haproxy(routing.LeastLoadedRouter)
    cpu = options.accelerator == "cpu"
    return LLMConfig(
        model_loading_config={"model_id": options.served_name, "model_source": options.source},
        # a safeguard: QueueMiddleware admits half as many sequences, so no request should reach this limit
        engine_kwargs={"scheduler_cls": fair_scheduler.PATH}
        | engine_args(options)
        | {"max_num_queued_reqs": 2 * options.max_ongoing_requests}
        | api_args(options),
        deployment_config=deployment,
        accelerator_config={"kind": "cpu"} if cpu else None,  # without this, Ray asks for a GPU
        accelerator_type=options.accelerator_type,
        callback_config={"callback_class": NodeSetup},
        server_cls=Server,
    )


class Server(EngineServer):
    """A replica: one engine and its HTTP API."""

    async def __init__(
        self,
        llm_config: LLMConfig,
        limits: RequestLimits,
        adapters: Adapters | None,
        location: AppLocation,
        share_prefix_cache: bool,
        functions: Hooks,
    ) -> None:
        self._limits = limits
        self._functions = functions
        self._share_prefix_cache = share_prefix_cache
        self._location = location
        self._keys = ApiKeys()  # raises an error if there is no key, before the slow start of the engine
        self._adapters = adapters
        await super().__init__(llm_config)

    async def build_asgi_app(self, app: FastAPI) -> ASGIApp:
        """Return vLLM's app behind the middleware, and start the background tasks."""
        http.support_http_1_0()
        restrict(app)
        app.add_api_route("/v1/models", self._list_models)
        app.add_api_route("/v1/models/{model:path}", self._retrieve_model)
        self._serving = app.state.openai_serving_models
        self._engine_client = app.state.engine_client
        accounting.follow_sequences(self._engine_client, share_prefix_cache=self._share_prefix_cache)
        checker = grammars.GrammarChecker(self._engine_client.vllm_config, self._engine_client.get_tokenizer())
        await checker.start()
        grammars.install(self._engine_client, checker)
        api_handlers.install(app.state, lambda: None if self._alive() else engine_dead())
        self._access_log = AccessLog(private_serve.logs_folder())
        self._key_metrics = KeyMetrics()
        self._reporter = Reporter(self._location.path)
        tasks = [
            self._keys.refresh_forever(),
            self._reporter.report_forever(self._model_names),
            self._exit_with_engine(),
        ]
        if self._adapters:
            await self._adapters.refresh(self._serving)  # before the first request, which may name one
            tasks.append(self._adapters.refresh_forever(self._serving))
        queue = QueueMiddleware(MetricsMiddleware(app, self._reporter.record), self._limits, self._alive)
        known = KnownModels(queue, self._model_names, self._adapters.problems if self._adapters else {})
        model = self._location.model  # vLLM's default, too
        is_root = self._location.path == ROOT
        router = ModelRouter(known, model, self._location.address, lambda: self._reporter.routes) if is_root else known
        api = ApiMiddleware(
            router, self._keys, self._limits, self._alive, self._record, model=model, checks=self._functions.checks
        )
        tasks.append(replica_exit.leave_in_time(api.end_requests))
        self._tasks = [asyncio.create_task(task) for task in tasks]  # asyncio itself keeps only weak references
        return ChatPage(api) if is_root else api

    def _record(self, record: RequestRecord) -> None:
        """Record a request that has ended."""
        self._access_log.write(record)
        self._key_metrics.count(record)
        hooks.record(record, self._functions.loggers)

    def _alive(self) -> bool:
        """Return whether the engine is alive."""
        return not self._engine_client.errored

    async def _exit_with_engine(self) -> None:
        """Exit soon after the engine dies, so that Serve replaces this replica at once.

        Serve itself waits for three failed health checks, and requests fail in the meantime. Engine workers on other
        machines end with this process.
        """
        while self._alive():
            await asyncio.sleep(ENGINE_CHECK_S)
        log.error("the engine died, so this replica exits; Serve starts another")
        await replica_exit.stop_listening(DRAIN_TIMEOUT_S)
        os._exit(1)

    def _model_names(self) -> list[str]:
        """Return the names that clients may request: that of the model, and those of its adapters."""
        return [self._location.model, *(self._adapters.names if self._adapters else [])]

    async def _list_models(self) -> ModelList:
        """Return the model, its adapters (loaded or not), and the models of other apps, if the key may use them."""
        models: ModelList = await self._serving.registry.show_available_models()
        models.data[0].root = self._location.model  # vLLM would show the node's local folder
        for name in self._model_names()[1:]:
            models.data.append(ModelCard(id=name, root=self._location.model, permission=[ModelPermission()]))
        for name in self._reporter.routes.others:
            models.data.append(ModelCard(id=name, root=name, permission=[ModelPermission()]))
        record = current.get()
        models.data = [card for card in models.data if record and self._keys.may_use(record.key, card.id)]
        return models

    async def _retrieve_model(self, model: str) -> ModelCard:
        for card in (await self._list_models()).data:
            if card.id == model:
                return card
        raise HTTPException(404, unknown_model(model).message)

    async def start_engine(self) -> None:
        """Start the engine.

        Raises:
            RuntimeError: the engine does not start. The message is the first error in the log, if there is one, unless
                vLLM finds no GPU, which it does not say clearly.
        """
        compile_cache.remove_truncated()
        engine_metrics.install()
        prompt_length.install()
        os.environ |= NO_REDIRECTS
        cpu_engine.set_threads(self._llm_config.engine_kwargs)
        bounded_parsing.install()
        try:
            await super().start_engine()
        except Exception as error:
            raise RuntimeError(missing_gpu(self._llm_config) or _first_error_in_log() or str(error)) from error
        envs.enable_envs_cache()  # vLLM reads environment variables for each token; its engine caches them, too


def restrict(app: FastAPI) -> None:
    """Restrict vLLM's app to the API: remove its admin routes and CORS, and turn its parse errors into status 400.

    Errors are short. If they quote a long text such as `/a/a/a`, vLLM's take hours to write, because it searches them
    for paths with a pattern of cubic time.
    """
    app.router.routes = [route for route in app.router.routes if getattr(route, "path", None) in ROUTES]
    app.user_middleware = [each for each in app.user_middleware if each.cls not in REMOVED_MIDDLEWARE]
    for kind in PARSE_ERRORS:
        app.add_exception_handler(kind, _answer_parse_error)
    app.exception_handler(EngineGenerateError)(_answer_engine_error)
    app.add_exception_handler(RequestValidationError, _answer_validation_error)
    validation.stop_at_first_errors(app)
    error_response.sanitize_message = _sanitize_beginning
    app.middleware_stack = None  # rebuilt at the next request


def _sanitize_beginning(message: str) -> str:
    return utils.sanitize_message(shortened(message, MAX_SANITIZED))


async def _answer_validation_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return JSONResponse(validation.first_error(error).body, 400)


async def _answer_parse_error(_: Request, error: Exception) -> JSONResponse:
    log.warning("vLLM could not read a request", exc_info=error)  # the traceback shows whether vLLM is at fault
    message = "the request could not be read, because a field has another form; compare it with /docs"
    return JSONResponse({"error": message}, 400)


async def _answer_engine_error(request: Request, error: EngineGenerateError) -> JSONResponse:
    cause = error.__cause__
    if isinstance(cause, OverflowError):  # a number in the request is too large for the engine
        return await _answer_parse_error(request, cause)
    return await vllm_error_handler(request, error)


def missing_gpu(config: LLMConfig) -> str | None:
    """Return a sentence if the engine needs GPUs and vLLM finds none on this node."""
    accelerator = config.accelerator_config
    if platforms.current_platform.is_cuda() or (accelerator and accelerator.kind == "cpu"):
        return None
    return f"vLLM finds no GPU on {ray.util.get_node_ip_address()}, although Ray reserved GPUs there"


def _first_error_in_log() -> str | None:
    """Return the first error in the log of this replica's processes. vLLM's exception only says that a process died."""
    log = Path("/proc/self/fd/1").read_text(errors="replace")
    found = re.search(r"ERROR .*?\] (\w+(?:Error|Exception): .+)", log)
    return found and found[1]


class NodeSetup(NodeCallback):
    """Changes how Ray prepares a replica's nodes before its engine starts."""

    async def on_before_node_init(self) -> None:
        # vLLM reads folders and hub ids itself; only a URI needs Ray's extra process
        self.ctx.run_init_node = "://" in self.llm_config.model_loading_config.model_source
        # Ray copies the tokens into the runtime_env, which the dashboard shows; each process reads them itself
        for name in HUB_TOKENS:
            self.ctx.runtime_env["env_vars"].pop(name, None)
