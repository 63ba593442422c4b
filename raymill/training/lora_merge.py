"""Merges trained LoRA adapters into the weights of their base model, one module at a time."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from raymill.errors import UserError
from raymill.training.weight_files import Weight

Layers = dict[str, list[Any]]
"""The adapter layers around each adapted module, by the module's name. peft nests one layer per adapted parameter."""


def merge(base: PreTrainedModel, adapter: Path, trained: dict[str, torch.Tensor]) -> Iterator[Weight]:
    """Yield the weights of `base`, in the order of its `named_parameters`, with adapters merged into them.

    peft merges each kind of layer in its own way, here in fp32. A merged weight is freed after it was yielded. The
    other weights may be memory-mapped.

    Args:
        adapter: the folder with the adapters.
        trained: the trained parameters, by the names that they have in the adapted model.

    Raises:
        UserError: a trained parameter would be lost, or would change another module, too.
    """
    from peft import PeftModel  # imported late: it takes seconds

    names = [name for name, _ in base.named_parameters()]
    PeftModel.from_pretrained(base, str(adapter))
    _unwrap_whole_modules(base)
    layers = adapter_layers(base)
    _refuse_lost_parameters(base, set(names), layers, trained)
    refuse_tied_weights(base, layers)
    merged = set()
    for name in names:
        module = name.rpartition(".")[0]
        if module in layers:
            base.set_submodule(module, _merge(layers.pop(module)))
            merged.add(module)
        parameter = base.get_parameter(name)
        yield name, trained.get(name, parameter.detach())
        if module in merged:
            parameter.data = parameter.new_empty(0)


def _unwrap_whole_modules(base: nn.Module) -> None:
    """Replace modules by those that were trained as a whole, such as the head of a reward model."""
    from peft.utils import ModulesToSaveWrapper

    for name, module in list(base.named_modules()):
        if isinstance(module, ModulesToSaveWrapper):
            base.set_submodule(name, module.modules_to_save["default"])


def adapter_layers(model: nn.Module) -> Layers:
    """Return the layers that hold adapters."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = defaultdict(list)
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):
            layers[plain_name(name)].append(module)
    return layers


def plain_name(name: str) -> str:
    """Return the name that a module or parameter has without adapters."""
    return name.replace(".base_layer", "")


def refuse_tied_weights(model: nn.Module, layers: Layers) -> None:
    """Refuse adapters on a weight that another module shares: merging would change both modules."""
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    for name, (layer, *_) in layers.items():
        if any(uses[id(parameter)] > 1 for parameter in layer.get_base_layer().parameters(recurse=False)):
            raise UserError(f"the adapter of {name} cannot be merged, because another module shares its weight")


def _refuse_lost_parameters(base: nn.Module, names: set[str], layers: Layers, trained: dict[str, torch.Tensor]) -> None:
    """Refuse unless the adapter layers hold exactly the trained parameters. peft would only warn."""
    in_layers = {id(parameter) for nested in layers.values() for layer in nested for parameter in layer.parameters()}
    parameters = dict(base.named_parameters())
    in_layers |= {id(parameters[name]) for name in names & trained.keys()}  # trained as a whole
    loaded = {name: value for name, value in parameters.items() if plain_name(name) not in names or name in trained}
    lost = loaded.keys() ^ trained.keys() | {
        name
        for name, value in loaded.items()
        if id(value) not in in_layers or (name in trained and not torch.equal(value, trained[name].to(value)))
    }
    if lost:
        raise UserError(f"the trained parameter {min(lost)} is not in the merged model (one of {len(lost)})")


def _merge(layers: list[Any]) -> nn.Module:
    """Return the module within nested adapter layers, with all of them merged into it."""
    module = layers[0].get_base_layer().float()
    for layer in layers:
        layer.merge(safe_merge=True)  # into a copy, because the weights may be memory-mapped
    return module
