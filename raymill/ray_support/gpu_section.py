"""[cluster.gpu] of settings.toml, which decides on which GPU instance types of AWS jobs run."""

from typing import Self

from pydantic import model_validator

from raymill import settings
from raymill.instance_types import INSTANCE_TYPES


class GpuSection(settings.Section):
    """[cluster.gpu] of settings.toml. The names are those in raymill/instance_types.py."""

    instance_types: tuple[str, ...] = ()
    """Types for training, the preferred one first. If empty, that of cluster.yaml."""
    serve_instance_type: str = ""
    """Type for `serve_llm` and `generate`. If empty, those for training."""

    @model_validator(mode="after")
    def _types_are_known(self) -> Self:
        for name in (*self.instance_types, self.serve_instance_type):
            if name and name not in INSTANCE_TYPES:
                raise ValueError(f"{name} is not in raymill/instance_types.py. Use one of: {', '.join(INSTANCE_TYPES)}")
        return self


def load() -> GpuSection:
    """Return the section."""
    return settings.load(GpuSection, "gpu", profile="cluster")
