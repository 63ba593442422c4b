"""Ray Data LLM: the stage that runs vLLM, with a hook for each row."""

import uuid
from typing import Any

from ray.llm._internal.batch.processor import Processor
from ray.llm._internal.batch.stages.vllm_engine_stage import vLLMEngineStageUDF

__all__ = ["EngineStage", "Processor", "replace_engine"]


class EngineStage(vLLMEngineStageUDF):
    """Ray's vLLM stage with a public hook for each row, which ray.data.llm lacks.

    Relies on `udf` and `_generate_with_error_handling` of vLLMEngineStageUDF in
    ray.llm._internal.batch.stages.vllm_engine_stage (Ray 2.60).
    """

    async def generate_row(self, row: dict[str, Any], batch_uuid: uuid.UUID) -> dict[str, Any]:
        """Return the answer to one row."""
        return await super()._generate_with_error_handling(row, batch_uuid)

    async def _generate_with_error_handling(self, row: dict[str, Any], batch_uuid: uuid.UUID) -> dict[str, Any]:
        return await self.generate_row(row, batch_uuid)


def replace_engine(processor: Processor, engine: type[EngineStage], **arguments: Any) -> None:
    """Make the processor run `engine`, which gets `arguments` in addition to Ray's own.

    Relies on the stage "vLLMEngineStage" of `Processor.stages`, a pydantic model with `fn` and
    `fn_constructor_kwargs` (Ray 2.60).
    """
    stage = processor.stages["vLLMEngineStage"]
    update = {"fn": engine, "fn_constructor_kwargs": stage.fn_constructor_kwargs | arguments}
    processor.stages["vLLMEngineStage"] = stage.model_copy(update=update)
