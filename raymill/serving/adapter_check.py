"""Finds what is wrong with a LoRA adapter before the engine loads it."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from raymill.training import weights_check

CONFIG = "adapter_config.json"
IGNORED_BY_VLLM = (
    "alpha_pattern",
    "rank_pattern",
    "layer_replication",
    "alora_invocation_tokens",
    "use_qalora",
    "use_bdlora",
    "arrow_config",
    "kasa_config",
)
"""Options of peft that change an adapter's output. vLLM loads the adapter without an error, and answers wrongly."""


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
            return f"vLLM does not support its {ignored[0]}; merge it into the model, and serve that"
        rank = config.get("r")
        if isinstance(rank, int) and rank > self.max_rank:
            return f"its rank {rank} is more than max_lora_rank = {self.max_rank} in [serve]"
        return weights_check.problem_of_adapter(self.model, folder, self.dtype)
