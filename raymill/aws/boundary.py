"""Reads [cluster.iam], which names the permissions boundary of the cluster's roles."""

from pydantic import Field

from raymill import settings


class IamSection(settings.Section):
    """[cluster.iam] of settings.toml."""

    permissions_boundary: str = Field("", pattern=r"^(arn:aws[\w-]*:iam::(\d{12}|aws):policy/[\w+=,.@/-]+)?$")
    """ARN of a policy. The roles of the stack may never do more than it allows. If empty, they have no boundary."""


def load() -> str:
    """Return the ARN of the boundary, or ""."""
    return settings.load(IamSection, "iam", profile="cluster").permissions_boundary


def stack_parameters() -> dict[str, str]:
    """Return the stack's parameter for the boundary, or {} if the settings name none."""
    return {"Boundary": arn} if (arn := load()) else {}
