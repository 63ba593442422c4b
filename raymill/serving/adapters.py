"""Serves the LoRA adapter of each run under the run's name. Picks up new and retrained adapters without a restart.

vLLM evicts adapters, and loads them again in the middle of a batch. If a file is then missing or damaged, the engine
dies. So vLLM gets private copies, which are checked, and stay until no request can need them.
"""

import asyncio
import contextlib
import json
import logging
import re
import shutil
import time
from pathlib import Path
from typing import Any, NamedTuple

from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.lora.request import LoRARequest

from raymill import settings
from raymill.ray_support import model_cache
from raymill.ray_support.private_folder import PrivateFolder
from raymill.training import storage, weights_check

REFRESH_S = 10
MARGIN_S = 60  # a request may take this much longer than its timeout to stop
MAX_PROBLEM = 500  # maximum characters of what is wrong with an adapter

CONFIG = "adapter_config.json"
IGNORED_BY_VLLM = (
    "alpha_pattern",
    "rank_pattern",
    "layer_replication",
    "alora_invocation_tokens",
    "use_qalora",
    "use_bdlora",
    "use_dora",
    "arrow_config",
    "kasa_config",
)
"""Options of peft that change an adapter's output. Most of them, vLLM ignores: it would answer wrongly."""

log = logging.getLogger("ray.serve")


class AdapterCheck(NamedTuple):
    """What the engine expects of an adapter."""

    model: str
    """Folder, URI or hub id of the base model. Empty: do not compare names and shapes."""
    max_rank: int
    dtype: str
    """Data type to which the engine converts the weights, by its name in torch."""

    def problem(self, folder: Path) -> str:
        """Return what is wrong with the adapter in a folder, or ""."""
        try:
            config: Any = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        except ValueError:
            config = None
        if not isinstance(config, dict) or not isinstance(config.get("base_model_name_or_path"), str):
            return f"{CONFIG} is damaged; train it again"
        if ignored := [name for name in IGNORED_BY_VLLM if config.get(name)]:
            return f"vLLM does not support its {ignored[0]}; serve the model into which it is merged, model/ of its run"
        rank = config.get("r")
        if isinstance(rank, int) and rank > self.max_rank:
            return f"its rank {rank} is more than max_lora_rank = {self.max_rank} in [serve]"
        return weights_check.problem_of_adapter(self.model, folder, self.dtype)


class Adapters:
    """The adapters for the model. https://docs.vllm.ai/en/stable/features/lora.html"""

    def __init__(self, runs: str, model: str, check: AdapterCheck, keep_s: float) -> None:
        """Find adapters, but touch no files yet.

        Args:
            runs: the folder or URI of the runs.
            model: the base model, as settings.toml names it.
            check: finds what is wrong with an adapter.
            keep_s: seconds for which a request may use an adapter that is no longer offered.
        """
        self._runs = runs
        self._models = {model, settings.resolve(model)}
        self._check = check
        self._keep_s = keep_s + MARGIN_S
        self._copies: PrivateFolder | None = None
        self._versions: dict[str, str] = {}  # of each adapter for the model, whether it can be used or not
        self._retired: dict[str, tuple[LoRARequest, float]] = {}  # adapters by vLLM's name, and when to delete them
        self.names: list[str] = []
        """Names of the runs whose adapters clients can use."""
        self.problems: dict[str, str] = {}
        """What is wrong with the last version of other runs' adapters, by the name of the run."""

    async def refresh_forever(self, serving: OpenAIServingModels) -> None:
        """Check for new, retrained and deleted adapters every REFRESH_S seconds."""
        while True:
            await asyncio.sleep(REFRESH_S)
            await self.refresh(serving)

    async def refresh(self, serving: OpenAIServingModels) -> None:
        """Load new and retrained adapters into the engine, and offer no deleted ones any more."""
        with contextlib.suppress(OSError):  # the bucket may be unreachable for a moment
            for name in {*await asyncio.to_thread(storage.list_names, self._runs), *self._versions}:
                try:
                    await self._update(serving, name)
                except OSError as error:  # a run may be writing or deleting its adapter
                    log.warning(f"the adapter of {name} cannot be read ({error}); trying again in {REFRESH_S} s")
                self.names = sorted(serving.lora_requests)
        await asyncio.to_thread(self._delete_retired, _paths_in_use(serving))

    async def _update(self, serving: OpenAIServingModels, name: str) -> None:
        # vLLM would answer with the adapter instead of a base model of the same name
        version = None if serving.is_base_model(name) else await asyncio.to_thread(self._version, name)
        if version == self._versions.get(name):
            return
        if version is None:
            self._offer(serving, name, None)
            del self._versions[name]
            return
        # the version is part of the name, because vLLM's prefix cache identifies adapters by name
        versioned = f"{name}@{version}"
        if versioned in self._retired:  # requests may still use it, and vLLM cannot have one adapter twice in a batch
            self._offer(serving, name, self._retired.pop(versioned)[0])
        else:
            folder = await asyncio.to_thread(self._copy, name, version)
            found = LoRARequest(versioned, serving.lora_id_counter.inc(1), str(folder))
            if problem := await asyncio.to_thread(self._check.problem, folder) or await _load(serving, found):
                stays = "; the old one stays in use" if name in serving.lora_requests else ""
                log.warning(f"the adapter of {name} cannot be used: {problem}{stays}")
                shutil.rmtree(folder, ignore_errors=True)
                self.problems[name] = problem[:MAX_PROBLEM]
            else:
                self._offer(serving, name, found)
        self._versions[name] = version

    def _version(self, name: str) -> str | None:
        """Return the version of the run's adapter, or None if it has none for this model."""
        if not re.fullmatch(r"\w[\w.-]*", name):  # a folder that no run has made, such as .trash
            return None
        config = storage.read_text(f"{self._runs}/{name}/adapter/adapter_config.json")
        if config is None:
            return None
        with contextlib.suppress(ValueError, LookupError, TypeError):  # then `check` finds that the file is damaged
            base = json.loads(config)["base_model_name_or_path"]
            if isinstance(base, str) and not {base, settings.resolve(base)} & self._models:
                return None
        return model_cache.version(f"{self._runs}/{name}/adapter")

    def _copy(self, name: str, version: str) -> Path:
        """Copy an adapter to a folder that only this process uses.

        Raises:
            OSError: the files cannot be read, or have changed in the meantime.
        """
        self._copies = self._copies or PrivateFolder(model_cache.node_folder() / "adapters")
        folder = self._copies.path / f"{name}@{version}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        model_cache.copy_folder(f"{self._runs}/{name}/adapter", folder)
        if self._version(name) != version:
            raise OSError(f"the adapter of {name} has changed while it was copied")
        return folder

    def _offer(self, serving: OpenAIServingModels, name: str, found: LoRARequest | None) -> None:
        """Use `found` for the next requests for this name. None: reject them."""
        self.problems.pop(name, None)
        if old := serving.lora_requests.pop(name, None):
            self._retired[old.lora_name] = (old, time.monotonic() + self._keep_s)
        if found:
            serving.lora_requests[name] = found

    def _delete_retired(self, in_use: set[str]) -> None:
        for name, (adapter, until) in list(self._retired.items()):
            if time.monotonic() >= until and adapter.lora_path not in in_use:
                shutil.rmtree(adapter.lora_path, ignore_errors=True)
                del self._retired[name]


async def _load(serving: OpenAIServingModels, found: LoRARequest) -> str:
    """Load an adapter into the engine. Return why that fails, or ""."""
    engine: Any = serving.engine_client
    try:
        await engine.add_lora(found)
    except Exception as error:  # the engine raises errors of many types for files that others wrote
        if engine.errored:
            raise
        with contextlib.suppress(Exception):  # the engine may have kept a part of it
            await engine.remove_lora(found.lora_int_id)
        return f"vLLM cannot load it ({error})"
    return ""


def _paths_in_use(serving: OpenAIServingModels) -> set[str]:
    """Return the folders of the adapters that the engine's requests use.

    Relies on `output_processor` of vllm.v1.engine.async_llm.AsyncLLM, as `follow_sequences` does (vLLM 0.29).
    """
    engine: Any = serving.engine_client
    states = engine.output_processor.request_states.values()
    return {state.lora_request.lora_path for state in states if state.lora_request}
