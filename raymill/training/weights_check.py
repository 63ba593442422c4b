"""Checks, before workers start, that a model's files hold the weights that its configuration describes.

On its own, transformers gives missing weights random values, and ignores weights that it does not expect.
"""

import hashlib
import json
import os
import pickle
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from pyarrow.fs import FileSelector, FileSystem, FileType
from safetensors import safe_open
from safetensors.torch import _TYPES as DTYPES
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import LoadStateDictInfo
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, logging

from raymill.errors import UserError
from raymill.model_config import is_classifier, refuse_classifier, text_config
from raymill.ray_support import model_cache
from raymill.training import composite, reward_config

LFS_POINTER = b"version https://git-lfs"
PICKLED = "pytorch_model*.bin"
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
MAX_ADAPTER_WEIGHT = 100
"""Largest element of an adapter. Trained ones are below 10. With 1e12, activations became NaN in fp32, and spoiled the
engine's KV cache for other requests."""
POOLER = "pooler."
SAMPLES = 256
"""Number of places in each file that `fingerprint` reads."""
SAMPLE_BYTES = 4096
"""Bytes that `fingerprint` reads at each place."""

Weights = dict[str, torch.Tensor]
"""Weights by name, on the meta device."""


class BrokenFiles(Exception):
    """The files of a model are missing or incomplete. The message says which."""


def check(model: str, auto_class: Any = None, *, is_encoder: bool = False, as_reward_model: bool = False) -> None:
    """Refuse a model whose files are incomplete or do not match its configuration.

    transformers decides, because it renames and merges weights while it loads them. It gets the names and shapes in the
    headers of the files, so that neither memory nor time depend on the size of the model.

    Args:
        model: A folder, URI or hub id.
        auto_class: The class that loads the model later. None: that of a causal language model with all its parts.
        is_encoder: Whether only the model's last hidden states are used. Then its files may lack the pooler, and may
            hold the heads with which it was trained.
        as_reward_model: Whether the model is a reward model, or becomes one. Other models must write text.

    Raises:
        UserError: files or weights are missing, incomplete or unexpected.
    """
    location = _location(model)
    try:
        stored, config = _stored_weights(location), _config(location)
        if not (auto_class or as_reward_model):
            refuse_classifier(model, config)
        if as_reward_model and not is_classifier(config):
            stored = _with_head(stored, config)
        if as_reward_model:
            config = reward_config.from_config(model, config)
        problem = _problem_of_weights(config, stored, auto_class, is_encoder)
    except BrokenFiles as error:
        problem = str(error)
    if problem:
        raise UserError(f"{model} cannot be used: {problem}. Download the model again, or pass another one.")


def check_adapter(model: str, adapter: str) -> None:
    """Refuse LoRA adapters that do not match the base model, because peft ignores what is missing or does not fit.

    Args:
        model: A folder, URI or hub id of the base model that `check` has accepted.
        adapter: A folder or URI.

    Raises:
        UserError: weights of the adapters are missing, incomplete or unexpected.
    """
    if problem := problem_of_adapter(model, Path(model_cache.on_this_node(adapter))):
        raise UserError(f"{adapter} cannot be used: {problem}. Pass adapters that were trained on this base model.")


def problem_of_adapter(model: str, folder: Path, dtype: str = "float32") -> str:
    """Return what is wrong with the weights of the LoRA adapters in a folder, or "".

    Args:
        model: A folder, URI or hub id of the base model. Empty: do not compare names and shapes.
        folder: The folder of the adapters.
        dtype: The data type in which all weights must be finite.
    """
    from peft import PeftConfig, get_peft_model  # imported late, because it takes seconds
    from peft.utils.save_and_load import load_peft_weights, set_peft_model_state_dict

    if not any((folder / name).is_file() for name in ADAPTER_WEIGHTS):
        return f"it has no {ADAPTER_WEIGHTS[0]}"
    try:
        weights = load_peft_weights(str(folder), device="cpu")
        for name, value in weights.items():
            converted = value.to(getattr(torch, dtype))
            if not _is_finite(converted):
                return f"{name} has elements that are not finite in {dtype}"
            if (largest := converted.abs().max().item()) > MAX_ADAPTER_WEIGHT:
                return f"{name} has an element of size {largest:.0e}, with which activations overflow"
        if PeftConfig.from_pretrained(str(folder)).task_type == "SEQ_CLS":
            return "it belongs to a reward model, which does not write text; use its merged model to score answers"
        if not model:
            return ""
        config = AutoConfig.from_pretrained(model_cache.on_this_node(model, weights=False))
        with torch.device("meta"):
            adapted = get_peft_model(
                composite.auto_class(config).from_config(config), PeftConfig.from_pretrained(str(folder))
            )
        result = set_peft_model_state_dict(adapted, weights, low_cpu_mem_usage=True)
    except Exception as error:  # peft raises errors of many types for files that others wrote
        return f"peft cannot load it ({_first_line(error)})"
    if missing := [name for name in result.missing_keys if ".lora_" in name]:
        return f"its files lack {_some(missing)}"
    return f"{model} has no place for {_some(result.unexpected_keys)}" if result.unexpected_keys else ""


def fingerprint(model: str) -> str:
    """Return a hash of the names, the sizes and samples of the content of a model's weight files.

    Another training of the same base model changes the hash. A change of a few rows of one matrix may not.

    Args:
        model: A folder, URI or hub id that `check` has accepted.
    """
    filesystem, path = FileSystem.from_uri(_location(model))
    files = [file for file in filesystem.get_file_info(FileSelector(path)) if file.type == FileType.File]
    weights = [file for file in files if file.base_name.endswith(model_cache.WEIGHTS)]
    digest = hashlib.sha256()
    with ThreadPoolExecutor(model_cache.REQUESTS) as pool:
        for file in sorted(weights, key=lambda file: file.base_name):
            digest.update(f"{file.base_name} {file.size}\n".encode())
            with filesystem.open_input_file(file.path) as source:
                places = sorted({file.size * number // SAMPLES for number in range(SAMPLES)})
                for sample in pool.map(lambda place: source.read_at(SAMPLE_BYTES, place), places):
                    digest.update(sample)
    return digest.hexdigest()[:12]


def stored_weight(model: str, name: str) -> torch.Tensor | None:
    """Return a weight in the model's files, or None if they do not have it."""
    folder = Path(_location(model_cache.on_this_node(model)))
    tensors = (tensor for file in sorted(folder.iterdir()) for tensor in _tensors(file))
    return next((value for key, value in tensors if key == name), None)


def first_not_finite(model: str) -> str | None:
    """Return the name of a weight in the model's files that has an infinite or undefined element, or None."""
    folder = Path(_location(model_cache.on_this_node(model)))
    tensors = (tensor for file in sorted(folder.iterdir()) for tensor in _tensors(file))
    return next((name for name, value in tensors if value.is_floating_point() and not _is_finite(value)), None)


def _location(model: str) -> str:
    """Return a folder or URI with the model's files. A model of the hub is downloaded first."""
    if "://" in model or os.path.isdir(model):
        return model
    return model_cache.download(model)


def _tensors(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and memory-mapped values of a weight file's tensors, and nothing for other files."""
    if file.suffix == ".safetensors":
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 -- not a dict
                yield name, opened.get_tensor(name)
    elif file.match(PICKLED):
        yield from torch.load(file, weights_only=True, mmap=True).items()


def _is_finite(value: torch.Tensor) -> bool:
    return bool((value.float() if value.itemsize == 1 else value).isfinite().all())  # no isfinite for 8 bits


# ---------------------------------------------------------------- files


def _stored_weights(location: str) -> Weights:
    """Return the weights in the files that transformers would load. Of safetensors files, only the headers are read.

    Raises:
        BrokenFiles: a file is missing or incomplete, or it is not clear which files to load.
    """
    filesystem, path = FileSystem.from_uri(location)
    names = {file.base_name for file in filesystem.get_file_info(FileSelector(path))}
    files = {SAFE_WEIGHTS_NAME} & names
    if SAFE_WEIGHTS_INDEX_NAME in names:
        listed = _listed_files(filesystem, f"{path}/{SAFE_WEIGHTS_INDEX_NAME}")
        if files and not files <= listed:  # transformers would load the single file, and vLLM the others
            raise BrokenFiles(
                f"it has both {SAFE_WEIGHTS_NAME} and {SAFE_WEIGHTS_INDEX_NAME}, which lists other files; delete the "
                "wrong ones"
            )
        files = listed
    if not files:
        return _pickled_weights(Path(model_cache.on_this_node(location)))
    if missing := sorted(files - names):
        raise BrokenFiles(f"{missing[0]}, which its index lists, is missing")
    return {name: value for file in sorted(files) for name, value in _header(filesystem, f"{path}/{file}").items()}


def _listed_files(filesystem: FileSystem, index: str) -> set[str]:
    try:
        with filesystem.open_input_stream(index) as file:
            return set(json.load(file)["weight_map"].values())
    except (ValueError, TypeError, LookupError, AttributeError):
        raise BrokenFiles(f"{os.path.basename(index)} is not a valid index") from None


def _header(filesystem: FileSystem, path: str) -> Weights:
    """Return the weights in a safetensors file. The format is described in the README of safetensors."""
    name = os.path.basename(path)
    with filesystem.open_input_file(path) as file:
        if file.read_at(len(LFS_POINTER), 0) == LFS_POINTER:
            raise BrokenFiles(f"{name} is a pointer of Git LFS, not the weights; run git lfs pull in its folder")
        try:
            length = int.from_bytes(file.read_at(8, 0), "little")
            tensors = json.loads(file.read_at(min(length, file.size()), 8))
            tensors.pop("__metadata__", None)
            size = 8 + length + max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
            weights = {
                key: torch.empty(tensor["shape"], dtype=DTYPES.get(tensor["dtype"], torch.uint8), device="meta")
                for key, tensor in tensors.items()
            }
        except (ValueError, TypeError, LookupError, AttributeError):
            raise BrokenFiles(f"{name} is not a safetensors file") from None
        if file.size() != size:
            raise BrokenFiles(f"{name} has {file.size():,} bytes instead of {size:,}")
    return weights


def _pickled_weights(folder: Path) -> Weights:
    """Return the weights in pytorch_model*.bin.

    Raises:
        BrokenFiles: there are no weights, or a file cannot be read.
    """
    files = sorted(folder.glob(PICKLED))
    if not files:
        raise BrokenFiles("it has neither safetensors files nor pytorch_model.bin")
    weights: Weights = {}
    for file in files:
        try:
            weights |= torch.load(file, map_location="meta", mmap=True, weights_only=True)
        except (RuntimeError, OSError, ValueError, pickle.UnpicklingError) as error:
            raise BrokenFiles(f"{file.name} cannot be read ({_first_line(error)})") from None
    return weights


# ---------------------------------------------------------------- weights


def _config(location: str) -> PreTrainedConfig:
    try:
        return AutoConfig.from_pretrained(model_cache.on_this_node(location, weights=False))
    except Exception as error:  # of many types, for files that others wrote
        raise BrokenFiles(f"transformers cannot load it ({_first_line(error)})") from None


def _with_head(weights: Weights, config: PreTrainedConfig) -> Weights:
    """Return the weights of a language model with a new head instead of the output layer."""
    head = torch.empty((1, text_config(config).hidden_size), device="meta")
    return {reward_config.HEAD: head} | {
        name: value for name, value in weights.items() if not name.startswith("lm_head.")
    }


def _problem_of_weights(config: PreTrainedConfig, weights: Weights, auto_class: Any, is_encoder: bool) -> str:
    """Load `weights` into a model, and describe what transformers finds wrong. Return "" if nothing is."""
    failure = ""
    with _recorded_loading() as loaded:
        try:
            config, is_packed = _without_bitsandbytes(config)
            with torch.device("meta"):
                model = (auto_class or composite.auto_class(config)).from_config(config)
            options = {"state_dict": weights, "device_map": "meta", "ignore_mismatched_sizes": True}
            type(model).from_pretrained(None, config=model.config, **options)
        except Exception as error:  # transformers raises errors of many types for files that others wrote
            failure = f"transformers cannot load it ({_first_line(error)})"
    if loaded and is_encoder:
        loaded[0].missing_keys = {name for name in loaded[0].missing_keys if not name.startswith(POOLER)}
        loaded[0].unexpected_keys.clear()
    return (_describe(loaded[0], is_packed) if loaded else "") or failure


def _without_bitsandbytes(config: PreTrainedConfig) -> tuple[PreTrainedConfig, bool]:
    """Return a configuration that loads on the meta device, and whether the files pack weights for bitsandbytes.

    bitsandbytes reads the content of its files, which the meta device does not have.
    """
    is_packed = getattr(config, "quantization_config", {}).get("quant_method") == "bitsandbytes"
    if is_packed:
        del config.quantization_config
    return config, is_packed


@contextmanager
def _recorded_loading() -> Iterator[list[LoadStateDictInfo]]:
    """Record what transformers finds while it loads a model, and keep it from logging a table of it."""
    load, loaded, verbosity = PreTrainedModel._load_pretrained_model, [], logging.get_verbosity()

    def record(*arguments: Any, **options: Any) -> Any:
        result = load(*arguments, **options)
        loaded.append(result[0])
        return result

    PreTrainedModel._load_pretrained_model = staticmethod(record)
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield loaded
    finally:
        PreTrainedModel._load_pretrained_model = staticmethod(load)
        logging.set_verbosity(verbosity)


def _describe(info: LoadStateDictInfo, is_packed: bool) -> str:
    """Describe the weights that are missing, have another shape, or are not expected. Return "" if all are right.

    Packed weights have other shapes and additional tensors.
    """
    if info.conversion_errors:
        return f"its files do not hold all parts of {_some(info.conversion_errors)}, or parts of different shapes"
    missing, unexpected = set(info.missing_keys), set(info.unexpected_keys)
    if missing:
        renamed = next((key for key in sorted(unexpected) if key.endswith(tuple(missing))), None)
        hint = f"; its files have {renamed} instead" if renamed else ""
        return f"its files lack {_some(missing)}{hint}"
    if info.mismatched_keys and not is_packed:
        name, stored, expected = min(info.mismatched_keys)
        return f"{name} has the shape {tuple(stored)} in its files, but {tuple(expected)} in config.json"
    if unexpected and not is_packed:
        return f"config.json describes a model without {_some(unexpected)}, which its files hold"
    return ""


def _some(names: Iterable[str]) -> str:
    first, *others = sorted(names)
    return f"{first} and {len(others)} other weights" if others else first


def _first_line(error: Exception) -> str:
    """Return the first line of a message that says something. PyTorch's begin with a heading."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    return next((line for line in lines if not line.endswith(":")), "".join(lines[:1]) or type(error).__name__)
