"""Sizes of a model's parameters, also while ZeRO-3 keeps an empty tensor in the place of each parameter."""

import torch
from torch import nn
from transformers import PreTrainedModel


def shape_of(parameter: nn.Parameter) -> torch.Size:
    return getattr(parameter, "ds_shape", parameter.shape)


def numel(parameter: nn.Parameter) -> int:
    return getattr(parameter, "ds_numel", parameter.numel())


def count(model: PreTrainedModel, only_trained: bool = False) -> int:
    """Return the number of parameters. Counts each number of a quantized model, even if several share a byte."""
    partitioned = [
        parameter
        for parameter in model.parameters()
        if hasattr(parameter, "ds_numel") and (parameter.requires_grad or not only_trained)
    ]
    return model.num_parameters(only_trained) + sum(numel(one) - one.numel() for one in partitioned)
