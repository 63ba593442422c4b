"""Writes a model's weights file by file, so that main memory never has to hold all of them."""

import json
import re
from collections.abc import Iterable, Iterator
from itertools import chain, groupby
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

Weight = tuple[str, torch.Tensor]
"""Name and value of a parameter."""

FULL_BYTES = 5 * 2**30
"""Once a file has this size, the next layer goes to a new file."""

INDEX = "model.safetensors.index.json"


def write(model: PreTrainedModel, weights: Iterable[Weight], folder: Path) -> None:
    """Write safetensors files as `save_pretrained` does, with the names and shapes of the published checkpoints.

    Buffers that belong to the weights are written as they are in `model`, for example the biases of DeepSeek's router.

    Args:
        weights: all parameters, in the order of `model.named_parameters()`. Each is freed once its file is written.

    Raises:
        ValueError: `weights` are not exactly the parameters of `model`.
    """
    sizes: list[dict[str, int]] = []
    written: set[str] = set()
    parameters = 0
    for part in _parts(chain(weights, saved_buffers(model))):
        written |= part.keys()
        parameters += sum(value.numel() for value in part.values())
        original = revert_weight_conversion(model, part)
        tensors = {name: value.contiguous() for name, value in original.items()}
        save_file(tensors, folder / f".part-{len(sizes)}", metadata={"format": "pt"})
        sizes.append({name: value.nbytes for name, value in original.items()})
        del part, original, tensors  # frees the weights of this file before those of the next file are collected
    expected = {name for name, _ in chain(model.named_parameters(), saved_buffers(model))}
    if written != expected:
        raise ValueError(f"the exported weights lack or add {', '.join(sorted(written ^ expected)[:8])}")
    if len(sizes) == 1:
        (folder / ".part-0").rename(folder / "model.safetensors")
        return
    weight_map = {}
    for number, names in enumerate(sizes):
        file = f"model-{number + 1:05d}-of-{len(sizes):05d}.safetensors"
        (folder / f".part-{number}").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    metadata = {"total_parameters": parameters, "total_size": sum(sum(names.values()) for names in sizes)}
    (folder / INDEX).write_text(json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2) + "\n")


def add(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Add tensors to a safetensors file."""
    save_file(load_file(file) | {name: value.contiguous() for name, value in tensors.items()}, file, {"format": "pt"})


def saved_buffers(model: PreTrainedModel) -> Iterator[Weight]:
    """Yield the buffers that checkpoints contain, unlike those that are computed from the configuration."""
    saved = model.state_dict().keys()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in saved)


def _parts(weights: Iterable[Weight]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the weights of each file. A layer is never split, because its weights may be converted together."""
    part: dict[str, torch.Tensor] = {}
    for _, layer in groupby(weights, key=lambda weight: _layer(weight[0])):
        part |= dict(layer)
        if sum(value.nbytes for value in part.values()) >= FULL_BYTES:
            yield part
            part = {}
    if part:
        yield part


def _layer(name: str) -> str:
    """Return the part of a parameter's name up to the first number, which is the number of a layer."""
    found = re.match(r".*?\.\d+\.", name)
    return found.group() if found else ""
