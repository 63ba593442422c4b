"""The optimizers by name, and the check of how much an optimizer keeps for each parameter."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from raymill import optional
from raymill.errors import UserError
from raymill.training import composite
from raymill.training.options import OptimizerName, TrainOptions
from raymill.training.parameters import numel, shape_of

BETAS = (0.9, 0.95)  # usual for language models: 0.95 averages squared gradients over about 20 steps
ADAMW_VALUES = 2
"""Numbers that AdamW keeps for each parameter: the averages of the gradient and of its square."""
MATRIX_VALUES = {"adamw": ADAMW_VALUES, "muon": 1, "adamw_8bit": 2 * (1 / 4 + 1 / 256)}
"""Numbers in fp32 for each element of a hidden matrix. In 8 bits, each block of 256 elements also has a scale."""
TOLERANCE = 0.1  # for counters, one of each parameter


def make(model: PreTrainedModel, name: OptimizerName, weight_decay: float) -> torch.optim.Optimizer:
    """Return an optimizer of the trained parameters.

    `muon` (Jordan et al. 2024; torch's) updates the hidden matrices, and `adamw_8bit` (Dettmers et al. 2021,
    arXiv:2110.02861; bitsandbytes', and torchao's for shards) keeps their averages in 8 bits. The others have AdamW:
    embeddings, the output layer and all that is no matrix. Muon's updates have the size of AdamW's (Liu et al. 2025,
    arXiv:2502.16982), so that one learning rate fits both.
    """
    if name == "adamw":
        return adamw(trained(model), weight_decay)
    matrices = hidden_matrices(model)
    chosen = {id(parameter) for parameter in matrices}
    if name == "muon":
        first = torch.optim.Muon(matrices, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
    elif any(isinstance(matrix, DTensor) for matrix in matrices):
        first = _sharded_adamw_8bit(matrices, weight_decay)
    else:
        from bitsandbytes.optim import AdamW8bit  # imported late: it takes seconds

        first = AdamW8bit(matrices, betas=BETAS, weight_decay=weight_decay, min_8bit_size=1)  # without exceptions
    others = [parameter for parameter in trained(model) if id(parameter) not in chosen]
    return Combined([first, adamw(others, weight_decay)]) if others else first


def adamw(parameters: Iterable[nn.Parameter], weight_decay: float) -> torch.optim.AdamW:
    """Return AdamW. Weight decay applies only to matrices, not to biases and norms."""
    found = list(parameters)
    matrices = [parameter for parameter in found if len(shape_of(parameter)) >= 2]
    vectors = [parameter for parameter in found if len(shape_of(parameter)) < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], betas=BETAS, fused=True)


def _sharded_adamw_8bit(matrices: list[nn.Parameter], weight_decay: float) -> torch.optim.Optimizer:
    """Return torchao's optimizer. Shards whose size is no multiple of 256 keep averages in fp32."""
    from torchao.optim import AdamW8bit  # type: ignore[missing-import]  # few projects have it

    optimizer = AdamW8bit(matrices, betas=BETAS, weight_decay=weight_decay)
    if matrices[0].device.type == "cpu":  # where compilation needs a C++ compiler
        optimizer.step = torch.compiler.set_stance("force_eager")(optimizer.step)
    return optimizer


def check_installed(options: TrainOptions) -> None:
    """Raise UserError if the optimizer needs a package that is not installed."""
    if options.optimizer == "adamw_8bit" and options.strategy == "fsdp":
        optional.check(("torchao",), "torchao", "adamw_8bit with finetune_fsdp needs")


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def hidden_matrices(model: PreTrainedModel) -> list[nn.Parameter]:
    """Return the trained matrices, without those of embeddings and of the output layer."""
    outer = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    outer += [output] if (output := composite.output_layer(model)) else []
    excluded = {id(module.weight) for module in outer}
    return [one for one in trained(model) if len(shape_of(one)) == 2 and id(one) not in excluded]


class Combined(torch.optim.Optimizer):
    """Several optimizers, each with parameters of its own, as one."""

    def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
        self._parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Let the parts use the groups and the state of this optimizer, which its callers read and change."""
        self.param_groups = [group for part in self._parts for group in part.param_groups]
        for part in self._parts:
            self.state.update(part.state)
            part.state = self.state

    def step(self, closure: Any = None) -> Any:
        for part in self._parts:
            part.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned. Each part keeps the data types of its own state."""
        groups = iter(state_dict["param_groups"])
        self.state.clear()
        for part in self._parts:
            own = [next(groups) for _ in part.param_groups]
            ids = {number for group in own for number in group["params"]}
            state = {number: value for number, value in state_dict["state"].items() if number in ids}
            part.state = type(self.state)(dict)
            part.load_state_dict({"state": state, "param_groups": own})
        self._share()


def kept_values(name: OptimizerName, matrices: float) -> float:
    """Return how many numbers in fp32 an optimizer keeps for each trained parameter.

    `matrices` is the share of the trained parameters that is in hidden matrices.
    """
    return MATRIX_VALUES[name] * matrices + ADAMW_VALUES * (1 - matrices)


def matrix_share(model: PreTrainedModel) -> float:
    """Return the share of the trained parameters that is in hidden matrices."""
    return sum(map(numel, hidden_matrices(model))) / max(1, sum(map(numel, trained(model))))


def note(model: PreTrainedModel, name: OptimizerName) -> str:
    """Return which parameters have which optimizer, or an empty string if all have AdamW."""
    if name == "adamw":
        return ""
    return f"{name} updates the hidden matrices, {matrix_share(model):.1%} of the trained parameters; AdamW the others"


def check_values(optimizer: torch.optim.Optimizer, declared: float, strategy: str) -> None:
    """Check that an optimizer keeps no more for each parameter than its strategy declares. Call it after a step.

    Raises:
        UserError: it keeps more, so memory and checkpoints are larger than `inv plan` and the check of the disk assume.
    """
    states = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    users = Counter(map(id, states))  # bitsandbytes' tables of values belong to all parameters
    kept = sum(_bytes(_own(value)) for value in states if value.dim() and users[id(value)] == 1) / 4
    # not those in param_groups, from which ZeRO-3 takes them after each step
    values = kept / max(1, sum(_own(parameter).numel() for parameter in optimizer.state))
    if values > declared + TOLERANCE:
        raise UserError(
            f"the optimizer of {strategy} keeps {values:.2g} numbers for each parameter, not {declared:g}. Set "
            f"optimizer_values = {values:.2g} in the class."
        )


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _bytes(tensor: torch.Tensor) -> int:
    """Return the size of a tensor, or of the codes and scales that torchao stores instead."""
    parts = [getattr(tensor, name) for name in ("codes", "scale")] if hasattr(tensor, "codes") else [tensor]
    return sum(part.numel() * part.element_size() for part in parts)
