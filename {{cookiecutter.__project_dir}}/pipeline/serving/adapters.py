"""Serves the LoRA adapter of each run under the run's name. Picks up new and retrained adapters without a restart."""

import asyncio
import contextlib
import json
import logging
import os
import re

from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.lora.request import LoRARequest
from vllm.lora.resolver import LoRAResolver, LoRAResolverRegistry

import settings
from pipeline.ray_support import model_cache
from pipeline.training import storage

REFRESH_S = 10

log = logging.getLogger("ray.serve")


class Adapters(LoRAResolver):
    """Resolves adapter names for vLLM, which loads the adapters.

    https://docs.vllm.ai/en/stable/features/lora.html
    """

    def __init__(self, runs: str, model: str) -> None:
        """`runs` is the folder or URI of the runs; `model` is the base model, as settings.toml names it."""
        self._runs = runs
        self._models = {model, settings.resolve(model)}
        self.names: list[str] = []
        """Names of the runs that had an adapter for the model at the last refresh."""

    def register(self) -> None:
        """Make vLLM ask this resolver about unknown models. Call this method before the engine starts."""
        os.environ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"  # otherwise vLLM ignores all resolvers
        LoRAResolverRegistry.register_resolver("runs", self)

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        """Return the adapter of the run `lora_name` on local disk, or None if the run has no adapter for this model."""
        return await asyncio.to_thread(self._find, lora_name)

    async def refresh_forever(self, serving: OpenAIServingModels) -> None:
        """Check for new, retrained and deleted adapters every REFRESH_S seconds."""
        while True:
            with contextlib.suppress(OSError):  # the bucket may be unreachable for a moment
                self.names = await asyncio.to_thread(self._list)
                for name, loaded in list(serving.lora_requests.items()):
                    found = await asyncio.to_thread(self._find, name)
                    if found is None:
                        serving.lora_requests.pop(name, None)
                    elif found.lora_name != loaded.lora_name:
                        await _replace(serving, name, found)
            await asyncio.sleep(REFRESH_S)

    def _find(self, name: str) -> LoRARequest | None:
        if not self._matches(name):
            return None
        folder = self._folder(name)
        # the version is part of the name, because vLLM's prefix cache identifies adapters by name
        versioned = f"{name}@{model_cache.version(folder)}"
        return LoRARequest(lora_name=versioned, lora_int_id=1, lora_path=model_cache.on_this_node(folder))

    def _list(self) -> list[str]:
        return [name for name in storage.list_names(self._runs) if self._matches(name)]

    def _matches(self, name: str) -> bool:
        if not re.fullmatch(r"\w[\w.-]*", name):  # a client sends the name, and it becomes part of a path
            return False
        config = storage.read_text(f"{self._folder(name)}/adapter_config.json")
        try:
            return config is not None and self._is_base(json.loads(config)["base_model_name_or_path"])
        except (ValueError, LookupError, TypeError):
            return False  # the file is incomplete, or not an adapter's configuration

    def _is_base(self, model: str) -> bool:
        return model in self._models or settings.resolve(model) in self._models

    def _folder(self, name: str) -> str:
        return f"{self._runs}/{name}/adapter"


async def _replace(serving: OpenAIServingModels, name: str, found: LoRARequest) -> None:
    """Load a retrained adapter, then switch to it. Requests use the old adapter until the new one is loaded."""
    found.lora_int_id = serving.lora_id_counter.inc(1)
    try:
        await serving.engine_client.add_lora(found)
    except Exception as error:  # the adapter may be incomplete; the next refresh tries again
        log.warning(f"adapter {name} could not be loaded ({error}); the old one stays in use")
        return
    serving.lora_requests[name] = found
