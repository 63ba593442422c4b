"""Sections of settings.toml that only the stack reads: [cluster.iam] and [cluster.budget]."""

from pydantic import Field, model_validator

from raymill import settings


class IamSection(settings.Section):
    """[cluster.iam] of settings.toml."""

    permissions_boundary: str = Field("", pattern=r"^(arn:aws[\w-]*:iam::(\d{12}|aws):policy/[\w+=,.@/-]+)?$")
    """ARN of a policy. The roles of the stack may never do more than it allows. If empty, they have no boundary."""


def boundary() -> str:
    """Return the ARN of the boundary, or ""."""
    return settings.load(IamSection, "iam", profile="cluster").permissions_boundary


class BudgetSection(settings.Section):
    """[cluster.budget] of settings.toml."""

    dollars_per_month: float = Field(default=0, ge=0, allow_inf_nan=False)
    """What the whole account may cost in a month, including other projects. 0: no budget."""
    email: str = ""
    """Address that gets the warnings."""

    @model_validator(mode="after")
    def _check_email(self) -> "BudgetSection":
        if self.dollars_per_month and "@" not in self.email:
            raise ValueError("a budget warns by e-mail. Set email, or set dollars_per_month = 0")
        return self


def boundary_parameters() -> dict[str, str]:
    """Return the stack's parameter for the boundary, or {} if the settings name none."""
    return {"Boundary": arn} if (arn := boundary()) else {}


def budget_parameters() -> dict[str, str]:
    """Return the stack's parameters for the budget, or {} if the settings have none."""
    section = settings.load(BudgetSection, "budget", profile="cluster")
    if not section.dollars_per_month:
        return {}
    return {"BudgetDollars": f"{section.dollars_per_month:.2f}", "BudgetEmail": section.email}
