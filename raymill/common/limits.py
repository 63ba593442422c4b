"""[cluster.limits] of settings.toml: the limits at which the watchdog ends the cluster."""

from pydantic import Field

from raymill import settings
from raymill.common.cluster_file import target

MAX_HOURS = 8760
"""A year."""
WARNING_HOURS = 0.5
"""An idle cluster warns this long before it shuts itself down."""


class LimitsSection(settings.Section):
    """[cluster.limits] of settings.toml."""

    hours: float = Field(gt=0, le=MAX_HOURS)
    """The cluster shuts itself down this many hours after the launch of its head."""
    dollars: float = Field(gt=0, allow_inf_nan=False)
    """The cluster shuts itself down when its instances have cost this much. Disks and traffic do not count."""
    idle_hours: float = Field(default=0, ge=0, le=MAX_HOURS)
    """The cluster shuts itself down when it has been idle for this many hours (see raymill/node/activity.py). 0: never.

    0 is the default, because the settings of older projects lack this key, and their clusters must not end by surprise.
    """

    def idle_warning(self, idle: float) -> str:
        """Return a warning if the cluster soon shuts itself down, after `idle` hours without use so far, or else ""."""
        left = self.idle_hours - idle
        if not self.idle_hours or left > min(WARNING_HOURS, self.idle_hours / 2):
            return ""
        return (
            f"no job and no request for {idle:.1f} hours, so the cluster shuts itself down in {60 * left:.0f} minutes. "
            f"To keep it, use it, or run: inv limits --idle-hours 0 --target {target()}"
        )

    def __str__(self) -> str:
        idle = f"{self.idle_hours:g}" if self.idle_hours else "unlimited"
        return f"{self.hours:g} hours, {self.dollars:g} dollars and {idle} idle hours"


def load() -> LimitsSection:
    """Read the limits. On the head, settings.toml is a copy, which `inv limits` and `inv up` replace."""
    return settings.load(LimitsSection, "limits", profile="cluster")
