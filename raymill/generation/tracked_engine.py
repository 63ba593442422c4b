"""Stops ray.data.llm from restarting a crashing engine endlessly. crash_tracker.py finds the rows that crash it."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from typing import Any

import ray
from ray.actor import ActorHandle

from raymill.errors import UserError
from raymill.ray_support import compile_cache
from raymill.ray_support.private.data_llm import EngineStage, Processor, replace_engine
from raymill.serving import cpu_engine

SUSPECTS_AT_ONCE = 8  # few, so that a second crash leaves few candidates; one at a time would take hours


class TrackedEngine(EngineStage):
    """An engine that reports its rows in flight, runs few suspects at once, and stays down if it keeps crashing."""

    def __init__(self, *arguments: Any, tracker: ActorHandle, **options: Any) -> None:
        self._tracker = tracker
        self._name = ray.get_runtime_context().get_actor_id()  # a restarted actor keeps its id
        self._suspects = ray.get(tracker.start.remote(self._name))
        if ray.get(tracker.culprits.remote()):
            raise UserError("an engine crashed twice with the same rows in flight")
        if ray.get(tracker.is_crash_looping.remote(self._name)):
            raise UserError("the engine died twice without answering a row, for example because memory ran out")
        self._limit = asyncio.Semaphore(SUSPECTS_AT_ONCE)
        compile_cache.remove_truncated()
        cpu_engine.set_threads(options["engine_kwargs"])
        super().__init__(*arguments, **options)

    async def udf(self, batch: list[dict[str, Any]]) -> AsyncIterator[dict[str, Any]]:
        ids = [row["id"] for row in batch if row["id"] not in self._suspects]
        await self._tracker.begin.remote(self._name, ids)
        async for answer in super().udf(batch):
            yield answer
        await self._tracker.end.remote(self._name, ids)

    async def generate_row(self, row: dict[str, Any], batch_uuid: uuid.UUID) -> dict[str, Any]:
        if row["id"] not in self._suspects:
            return await super().generate_row(row, batch_uuid)
        async with self._limit:
            await self._tracker.begin.remote(self._name, [row["id"]])
            answer = await super().generate_row(row, batch_uuid)
            await self._tracker.end.remote(self._name, [row["id"]])
            return answer


def track(processor: Processor, tracker: ActorHandle) -> None:
    """Make the processor's engines report their rows to `tracker`."""
    replace_engine(processor, TrackedEngine, tracker=tracker)
