"""The engine of ray.data.llm, which restarts a dead engine without end, with a limit: see suspects.py."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.llm._internal.batch.processor import Processor  # as ray.data.llm has no hook for a row
from ray.llm._internal.batch.stages.vllm_engine_stage import vLLMEngineStageUDF

from settings import Refusal

SUSPECTS_AT_ONCE = 8  # few, so that a second death names few; more than one, so that innocent rows do not take hours


class Engine(vLLMEngineStageUDF):
    """Reports its rows, gets those that were in an engine at a death a few at a time, and does not start in vain."""

    def __init__(self, *arguments: Any, suspects: ActorHandle, **options: Any) -> None:
        self._books = suspects
        self._name = ray.get_runtime_context().get_actor_id()  # a restarted actor keeps it
        self._suspects = ray.get(suspects.start.remote(self._name))
        if ray.get(suspects.convicted.remote()):
            raise Refusal("this engine died twice with the same rows")
        self._few = asyncio.Semaphore(SUSPECTS_AT_ONCE)
        super().__init__(*arguments, **options)

    async def udf(self, batch: list[dict[str, Any]]) -> AsyncIterator[dict[str, Any]]:
        ids = [row["id"] for row in batch if row["id"] not in self._suspects]
        await self._books.begin.remote(self._name, ids)
        async for answer in super().udf(batch):
            yield answer
        await self._books.end.remote(self._name, ids)

    async def _generate_with_error_handling(self, row: dict[str, Any], batch_uuid: uuid.UUID) -> dict[str, Any]:
        if row["id"] not in self._suspects:
            return await super()._generate_with_error_handling(row, batch_uuid)
        async with self._few:
            await self._books.begin.remote(self._name, [row["id"]])
            answer = await super()._generate_with_error_handling(row, batch_uuid)
            await self._books.end.remote(self._name, [row["id"]])
            return answer


def watch(processor: Processor, suspects: ActorHandle) -> None:
    """Let `suspects` know of the processor's engines."""
    stage = processor.stages["vLLMEngineStage"]
    words = stage.fn_constructor_kwargs | {"suspects": suspects}
    processor.stages["vLLMEngineStage"] = stage.model_copy(update={"fn": Engine, "fn_constructor_kwargs": words})
