"""Ray Serve LLM: replicas that answer HTTP themselves, a callback before their engines start, and a request router."""

from fastapi import FastAPI
from ray.llm._internal.common.callbacks.base import CallbackBase
from ray.llm._internal.serve.core.ingress.builder import _build_openai_ingress_request_router
from ray.serve.deployment import Application
from ray.serve.llm import LLMConfig
from ray.serve.llm.deployment import LLMServer
from starlette.types import ASGIApp


class EngineServer(LLMServer):
    """An LLMServer with two hooks: `build_asgi_app` and `start_engine`.

    Relies on `__serve_build_asgi_app__`, `_start_engine` and `_llm_config` of ray.serve.llm.deployment.LLMServer, and
    on `EXECUTOR_BACKEND_MP` of ray.llm._internal.serve.engines.vllm.vllm_models (Ray 2.60).
    """

    async def build_asgi_app(self, app: FastAPI) -> ASGIApp:
        """Return the app that the replica serves. `app` is vLLM's own app."""
        return app

    async def start_engine(self) -> None:
        """Start the engine, but not Ray's usage report, which would import vLLM in another process.

        On a CPU, Ray would replace the executor that the engine's arguments name.
        """
        from ray.llm._internal.serve.engines.vllm import vllm_models  # imported late, because it imports vLLM

        arguments = self._llm_config.engine_kwargs
        vllm_models.EXECUTOR_BACKEND_MP = arguments.get("distributed_executor_backend", "mp")
        await self.engine.start()

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        return await self.build_asgi_app(await super().__serve_build_asgi_app__())

    async def _start_engine(self) -> None:
        await self.start_engine()


class NodeCallback(CallbackBase):
    """Each replica runs this before Ray prepares its nodes. `callback_config` of LLMConfig names the subclass to use.

    Relies on `on_before_node_init`, `ctx` (`run_init_node`, `runtime_env`) and `llm_config` of
    ray.llm._internal.common.callbacks.base.CallbackBase (Ray 2.60).
    """


def with_request_router(app: Application, config: LLMConfig) -> Application:
    """Return `app` with Ray's own request router, which HAProxy asks to choose a replica for each request.

    Relies on `Application._with_ingress_request_router` and on `_build_openai_ingress_request_router` of
    ray.llm._internal.serve.core.ingress.builder (Ray 2.60).
    """
    return app._with_ingress_request_router(_build_openai_ingress_request_router(server=app, llm_config=config))
