"""LoRA adapters beside the model that they adapt: those of each run, by the run's name, without a restart."""

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
    """Finds the adapters that a request names, for vLLM, which then loads them.

    https://docs.vllm.ai/en/stable/features/lora.html
    """

    def __init__(self, runs: str, model: str) -> None:
        """Of the runs in the folder `runs`, a path or URI, those that adapt `model`, as the settings name it."""
        self._runs = runs
        self._models = {model, settings.resolve(model)}
        self.names: list[str] = []
        """Runs that have some, as of the last look."""

    def register(self) -> None:
        """Let vLLM, whose engine is not started yet, ask here for models that it does not know."""
        os.environ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"  # or it would not ask
        LoRAResolverRegistry.register_resolver("runs", self)

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        """The adapters of the run `lora_name`, on this machine's disk; None where it has none for this model."""
        return await asyncio.to_thread(self._find, lora_name)

    async def keep_up(self, serving: OpenAIServingModels) -> None:
        """Look for new, retrained and deleted adapters, again and again."""
        while True:
            with contextlib.suppress(OSError):  # the bucket does not answer now
                self.names = await asyncio.to_thread(self._look)
                for name, loaded in list(serving.lora_requests.items()):
                    found = await asyncio.to_thread(self._find, name)
                    if found is None:
                        serving.lora_requests.pop(name, None)
                    elif found.lora_name != loaded.lora_name:
                        await _replace(serving, name, found)
            await asyncio.sleep(REFRESH_S)

    def _find(self, name: str) -> LoRARequest | None:
        if not self._fits(name):
            return None
        folder = self._folder(name)
        # the version is part of the name, as vLLM's prefix cache knows adapters by it
        versioned = f"{name}@{model_cache.version(folder)}"
        return LoRARequest(lora_name=versioned, lora_int_id=1, lora_path=model_cache.on_this_node(folder))

    def _look(self) -> list[str]:
        return [name for name in storage.list_names(self._runs) if self._fits(name)]

    def _fits(self, name: str) -> bool:
        if not re.fullmatch(r"\w[\w.-]*", name):  # it comes from a client, and becomes a path
            return False
        config = storage.read_text(f"{self._folder(name)}/adapter_config.json")
        return config is not None and self._adapts(json.loads(config)["base_model_name_or_path"])

    def _adapts(self, model: str) -> bool:
        return model in self._models or settings.resolve(model) in self._models

    def _folder(self, name: str) -> str:
        return f"{self._runs}/{name}/adapter"


async def _replace(serving: OpenAIServingModels, name: str, found: LoRARequest) -> None:
    """Load a retrained adapter, then use it. A request that comes meanwhile gets the old one, and not status 404."""
    found.lora_int_id = serving.lora_id_counter.inc(1)
    try:
        await serving.engine_client.add_lora(found)
    except Exception as error:  # it may still be written: the next look tries again
        log.warning(f"adapter {name} could not be loaded ({error}); the old one stays in use")
        return
    serving.lora_requests[name] = found
