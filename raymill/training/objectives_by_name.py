"""The objectives that `[train] objective` names."""

from collections.abc import Callable

from raymill.training.kto import KTO
from raymill.training.objectives import Objective, Supervised
from raymill.training.options import ObjectiveName, TrainOptions
from raymill.training.pairs import DPO, IPO, ORPO, RobustDPO, SimPO
from raymill.training.reward import Reward

OBJECTIVES: dict[ObjectiveName, Callable[[TrainOptions], Objective]] = {
    "supervised": lambda options: Supervised(),
    "dpo": DPO,
    "ipo": IPO,
    "robust": RobustDPO,
    "simpo": SimPO,
    "orpo": ORPO,
    "kto": KTO,
    "reward": lambda options: Reward(),
}
