"""[cluster.limits] of settings.toml: the limits at which the watchdog ends the cluster."""

from pydantic import Field

import settings

MAX_HOURS = 8760
"""A year."""


class LimitsSection(settings.Section):
    """[cluster.limits] of settings.toml."""

    hours: float = Field(gt=0, le=MAX_HOURS)
    """The cluster shuts itself down this many hours after the launch of its head."""
    dollars: float = Field(gt=0, allow_inf_nan=False)
    """The cluster shuts itself down when its instances have cost this much. Disks and traffic do not count."""

    def __str__(self) -> str:
        return f"{self.hours:g} hours and {self.dollars:g} dollars"


def load() -> LimitsSection:
    """Read the limits. On the head, settings.toml is a copy, which `inv limits` and `inv up` replace."""
    return settings.load(LimitsSection, "limits", profile="cluster")
