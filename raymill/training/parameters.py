"""Returns sizes of a model's parameters, even if ZeRO-3 has replaced each parameter with an empty tensor."""

import torch
from torch import nn
from transformers import PreTrainedModel


def shape_of(parameter: nn.Parameter) -> torch.Size:
    return getattr(parameter, "ds_shape", parameter.shape)


def numel(parameter: nn.Parameter) -> int:
    return getattr(parameter, "ds_numel", parameter.numel())


def count(model: PreTrainedModel, only_trained: bool = False) -> int:
    """Return the number of parameters. In a quantized model, each weight counts, even if several share a byte."""
    partitioned = [
        parameter
        for parameter in model.parameters()
        if hasattr(parameter, "ds_numel") and (parameter.requires_grad or not only_trained)
    ]
    return model.num_parameters(only_trained) + sum(numel(one) - one.numel() for one in partitioned)
