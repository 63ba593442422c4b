"""AdamW, and the check of how much an optimizer keeps for each parameter."""

import torch
from torch import nn

from raymill.errors import UserError
from raymill.training.parameters import shape_of

BETAS = (0.9, 0.95)  # usual for language models: 0.95 averages squared gradients over about 20 steps
ADAMW_VALUES = 2
"""Numbers that AdamW keeps for each parameter: the averages of the gradient and of its square."""
TOLERANCE = 0.1  # for counters, one of each parameter


def adamw(model: nn.Module, weight_decay: float) -> torch.optim.AdamW:
    """Return AdamW. Weight decay applies only to matrices, not to biases and norms."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if len(shape_of(parameter)) >= 2]
    vectors = [parameter for parameter in trained if len(shape_of(parameter)) < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], betas=BETAS, fused=True)


def check_values(optimizer: torch.optim.Optimizer, declared: float, strategy: str) -> None:
    """Check that an optimizer keeps no more for each parameter than its strategy declares. Call it after a step.

    Raises:
        UserError: it keeps more, so memory and checkpoints are larger than `inv plan` and the check of the disk assume.
    """
    states = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    kept = sum(value.numel() * value.element_size() for value in states if value.dim()) / 4
    # not those in param_groups, from which ZeRO-3 takes them after each step
    values = kept / max(1, sum(parameter.numel() for parameter in optimizer.state))
    if values > declared + TOLERANCE:
        raise UserError(
            f"the optimizer of {strategy} keeps {values:.2g} numbers for each parameter, not {declared:g}. Set "
            f"optimizer_values = {values:.2g} in the class."
        )
