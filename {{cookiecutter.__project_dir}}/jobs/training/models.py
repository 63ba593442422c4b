"""Loads what is trained, and writes what was trained, as Hugging Face folders."""

import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging

from jobs import weights
from jobs.training.options import TrainOptions
from jobs.training.strategies import Strategy


def load_model(options: TrainOptions) -> PreTrainedModel:
    """The model in fp32 in main memory: master weights, whatever the precision of the computation."""
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(weights.on_this_node(options.model), dtype=torch.float32)
    if options.gradient_checkpointing:
        model.activation_checkpointing_enable()
    return model.train()


def with_supported_precision(options: TrainOptions, device: torch.device) -> TrainOptions:
    """`options` with fp32 in place of bf16 where the device would only emulate it."""
    if options.precision == "fp32" or _computes_in_bf16(device):
        return options
    print(f"{device} does not compute in bf16: training in fp32", flush=True)
    return options.model_copy(update={"precision": "fp32"})


def _computes_in_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "sve_bf16"))


def export(strategy: Strategy, tokenizer: PreTrainedTokenizerFast, folder: Path, *, is_writer: bool) -> None:
    """Write model and tokenizer to `folder`, which holds a whole model at any time. All ranks call it."""
    partial = folder.with_name(f".{folder.name}-partial")
    strategy.save_model(partial)
    if is_writer:
        tokenizer.save_pretrained(partial)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
