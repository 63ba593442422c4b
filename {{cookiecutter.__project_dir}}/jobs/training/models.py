"""Loads what is trained, and writes what was trained, as Hugging Face folders."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging

from jobs import weights
from jobs.training.options import TrainOptions
from jobs.training.strategies import Strategy


def load_model(options: TrainOptions) -> PreTrainedModel:
    """The model in fp32 in main memory: master weights, whatever the precision of the computation.

    With LoRA every linear layer but the last has an adapter, and nothing else is trained.
    """
    logging.disable_progress_bar()
    model = _load(options)
    if options.lora_rank:
        model.add_adapter(
            LoraConfig(
                r=options.lora_rank,
                lora_alpha=options.lora_alpha,
                lora_dropout=options.lora_dropout,
                target_modules="all-linear",
                task_type="CAUSAL_LM",
            )
        )
        model.enable_input_require_grads()  # or checkpointed layers below frozen ones would get no gradient
    if options.gradient_checkpointing:
        model.activation_checkpointing_enable()
    return model.train()


def _load(options: TrainOptions) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(weights.on_this_node(options.model), dtype=torch.float32)


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


def export(strategy: Strategy, tokenizer: PreTrainedTokenizerFast, run: Path, options: TrainOptions) -> None:
    """Write model and tokenizer to the folder `model` of the run, which holds a whole one at any time; of a training of
    adapters also these, alone, to `adapter`. All ranks call it."""
    state = strategy.gather()
    if not state:
        return  # another rank writes
    model = strategy.model
    if options.lora_rank:
        with _replaced(run / "adapter") as folder:
            model.save_pretrained(folder, state_dict=state)
        model, state = _merged(options, run / "adapter")
    with _replaced(run / "model") as folder:
        _write(model, state, folder, torch.bfloat16 if options.precision == "bf16" else torch.float32)
        tokenizer.save_pretrained(folder)


def _merged(options: TrainOptions, adapter: Path) -> tuple[PreTrainedModel, dict[str, torch.Tensor]]:
    """The base model with the adapters added to its weights."""
    merged = PeftModel.from_pretrained(_load(options), str(adapter)).merge_and_unload()
    return merged, merged.state_dict()


def _write(model: PreTrainedModel, state: dict[str, torch.Tensor], folder: Path, dtype: torch.dtype) -> None:
    every_name = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    tied = every_name - {name for name, _ in model.named_parameters()}  # loading ties them again
    model.save_pretrained(
        folder, state_dict={name: value.to(dtype) for name, value in state.items() if name not in tied}
    )
    model.config.dtype = dtype  # it has written that of the parameters in memory
    model.config.save_pretrained(folder)


@contextmanager
def _replaced(folder: Path) -> Iterator[Path]:
    """A folder to write to, which takes the place of `folder` when it is whole."""
    partial = folder.with_name(f".{folder.name}-partial")
    shutil.rmtree(partial, ignore_errors=True)
    yield partial
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
