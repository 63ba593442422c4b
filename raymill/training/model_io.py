"""Loads the model to train, and exports the trained model as a Hugging Face folder."""

import copy
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import nn
from torch.distributed.tensor.experimental import implicit_replication
from transformers import AutoConfig, BitsAndBytesConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import (
    GENERATION_CONFIG_NAME,
    IMAGE_PROCESSOR_NAME,
    PROCESSOR_NAME,
    VIDEO_PROCESSOR_NAME,
    cached_file,
    logging,
)

from raymill.errors import UserError
from raymill.model_config import is_classifier, text_config
from raymill.ray_support import model_cache
from raymill.training import (
    chunked_loss,
    composite,
    lora_merge,
    packed_attention,
    reward,
    reward_config,
    weight_files,
    weights_check,
)
from raymill.training.objectives import Output
from raymill.training.options import TrainOptions
from raymill.training.token_losses import use_token_losses
from raymill.training.weight_files import Weight

PEFT_PREFIX = "base_model.model."
"""Of the names in the files of adapters."""
Options = TypeVar("Options", bound=TrainOptions)


def load_model(options: TrainOptions, output: Output = "loss") -> PreTrainedModel:
    """Return the model or, in the context of a strategy's `loading`, this rank's share of it.

    Weights that are trained are in fp32, whatever the `precision`.

    With LoRA, every linear layer that text reaches gets an adapter, except the output layer, and only the adapters are
    trained. The frozen weights have the data type of the computation, or 4 bits with `quantize_base`.

    With `output`, the model returns the loss of each token, or the score of each document, and has no dropout.
    """
    logging.disable_progress_bar()
    dtype = _compute_dtype(options) if options.lora_rank else torch.float32
    model = _load(options, dtype, options.quantize_base, as_reward_model=output == "scores")
    composite.freeze(model)
    if options.device == "cuda" and options.precision == "bf16" and packed_attention.has_varlen(model):
        packed_attention.use_varlen(model)
    if options.liger:
        _use_liger(model)
    if output == "token_losses":
        use_token_losses(model)
    elif output == "loss" and options.chunked_loss and chunked_loss.has_chunks(model):
        chunked_loss.use_chunks(model)
    if output == "scores":
        torch.manual_seed(options.seed)  # ranks of FSDP drew different numbers for a head, and adapters must be equal
    if options.lora_rank:
        _add_adapters(model, options)
    if output == "scores":
        reward.use_scores(model, weights_check.stored_weight(options.model, reward_config.HEAD))
    if output != "loss":
        _remove_dropout(model)
    if options.gradient_checkpointing:
        model.activation_checkpointing_enable(every_n_layers=options.gradient_checkpointing_interval)
    if options.compile:
        for layer in decoder_layers(model):  # layer by layer, because equal layers share one compilation
            layer.compile()
    return model.train()


def _remove_dropout(model: PreTrainedModel) -> None:
    """Remove dropout and noise, under all names that models give them. The trainer checks that none is left."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and re.search("dropout|layerdrop|jitter", name):
                setattr(module, name, 0.0)


def _use_liger(model: PreTrainedModel) -> None:
    """Replace the model's layers and its loss with Liger's fused kernels.

    Raises:
        UserError: Liger has no kernels for this architecture. Liger itself would raise no error.
    """
    # imported late: it takes seconds; local environments do not have it
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN  # type: ignore[missing-import]
    from transformers.integrations.liger import apply_liger_kernel

    if model.config.model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise UserError(f"Liger has no kernels for {model.config.model_type}. Set liger = false in [train].")
    apply_liger_kernel(model, None)


def _add_adapters(model: PreTrainedModel, options: TrainOptions) -> None:
    from peft import LoraConfig  # imported late: it takes seconds
    from peft.tuners.tuners_utils import cast_adapter_dtype

    lora = LoraConfig(
        r=options.lora_rank,
        lora_alpha=options.lora_alpha,
        lora_dropout=options.lora_dropout,
        target_modules=_targets(model, options) or "all-linear",
        exclude_modules=_not_adapted(model),
        use_rslora=options.rslora,
        use_dora=options.dora,
        task_type="CAUSAL_LM",
    )
    try:
        with implicit_replication():  # DoRA adds full adapters to weights of which FSDP has loaded this rank's rows
            model.add_adapter(lora)
    except ValueError as error:
        if not (options.lora_dropout or options.dora):
            raise
        setting = "--lora-dropout 0" if options.lora_dropout else "--no-dora"
        raise UserError(
            f"{options.model} cannot have such adapters ({error}). Add {setting}, which mixtures of experts need."
        ) from None
    cast_adapter_dtype(model, "default")  # peft gave the adapters the data type of the frozen weights
    model.enable_input_require_grads()  # otherwise checkpointed layers with frozen inputs get no gradient


def _targets(model: PreTrainedModel, options: TrainOptions) -> list[str]:
    """Return the names in `lora_targets`. peft would ignore an unknown one among others.

    Raises:
        UserError: no linear layer has one of the names.
    """
    linear = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    linear -= {"score"}  # the head of a reward model, which is trained as a whole
    if unknown := [name for name in options.lora_targets if name not in linear]:
        raise UserError(
            f"no linear layer of {options.model} is named {unknown[0]}. Set lora_targets to some of: "
            f"{', '.join(sorted(linear))}."
        )
    return list(options.lora_targets)


def _not_adapted(model: PreTrainedModel) -> str | None:
    """Return a regular expression for the names of linear layers that get no adapter, or None if all get one.

    These are the layers that text does not reach, routers that return several tensors, such as Llama 4's, and the head
    of a reward model, which is trained as a whole.
    """
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    routers = [re.escape(name) for name, module in linear.items() if type(module).__name__.endswith("Router")]
    heads = ["score"] if is_classifier(model.config) else []
    outside = composite.outside(model)
    return "|".join([*([outside] if outside else []), *routers, *heads]) or None


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the decoder layers: the modules that transformers never splits between devices."""
    return [module for module in model.modules() if type(module).__name__ in (model._no_split_modules or [])]


def _compute_dtype(options: TrainOptions) -> torch.dtype:
    return torch.bfloat16 if options.precision == "bf16" else torch.float32


def _load(
    options: TrainOptions, dtype: torch.dtype | str, quantized: bool = False, *, as_reward_model: bool
) -> PreTrainedModel:
    """Load the model. With `quantized`, quantize its weights.

    Raises:
        UserError: the checkpoint is quantized, and transformers does not dequantize it on this device.
    """
    nf4 = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=_compute_dtype(options),
        # FSDP gathers parameters in the format of the computation, and would convert packed bytes of another format
        bnb_4bit_quant_storage=_compute_dtype(options) if options.strategy == "fsdp" else torch.uint8,
    )
    folder = model_cache.on_this_node(options.model)
    refusal = UserError(
        f"the weights of {options.model} are quantized, so a model that is trained on them could not be exported. "
        "Pass the --model that they were made from. To train adapters on 4-bit weights, add --quantize-base."
    )
    is_packed = getattr(AutoConfig.from_pretrained(folder), "quantization_config", None) is not None
    if is_packed and quantized:
        raise refusal
    model = composite.from_pretrained(
        folder,
        as_reward_model=as_reward_model,
        dtype=dtype,
        attn_implementation=None,  # the fastest one that the model supports
        # with None, transformers would load the packed numbers of a quantized checkpoint as if they were weights
        **({"quantization_config": nf4} if quantized else {}),
    )
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            # in an evaluation on a CPU, bitsandbytes would round the weights again, and training would go on with them
            module.support_avx512bf16_for_cpu = False
    if is_packed and getattr(model, "hf_quantizer", None):
        raise refusal
    if is_packed:
        model._weight_conversions = None  # otherwise the export would quantize the weights again
    return model


def with_supported_precision(options: Options, device: torch.device) -> Options:
    """Return `options`, with fp32 instead of bf16 if the device would only emulate bf16."""
    if options.precision == "fp32" or _computes_in_bf16(device):
        return options
    print(f"{device} does not compute in bf16: training in fp32", flush=True)
    return options.model_copy(update={"precision": "fp32"})


def _computes_in_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "sve_bf16"))


def try_export(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, eos_ids: list[int], options: TrainOptions
) -> None:
    """Export a model without its weights to a temporary folder: what fails here would fail after the last step."""
    with tempfile.TemporaryDirectory() as folder:
        if options.lora_rank:
            _write_adapter(model, {}, Path(folder, "adapter"), options)
            lora_merge.refuse_tied_weights(model, lora_merge.adapter_layers(model))
        _write_settings(model, tokenizer, eos_ids, Path(folder, "model"), options)


class Trained(Protocol):
    """A trained model, for example a `Strategy`."""

    @property
    def model(self) -> PreTrainedModel: ...

    def gather(self) -> Iterator[Weight]:
        """Yield the full trained parameters on rank 0, in the order of the model, and nothing on the other ranks."""
        ...


def export(
    strategy: Trained, tokenizer: PreTrainedTokenizerFast, eos_ids: list[int], run_folder: Path, options: TrainOptions
) -> None:
    """Write the model and its tokenizer to `model/` in the run's folder, and LoRA adapters also to `adapter/`.

    An existing folder is replaced only when the new one is complete. All ranks must call this.
    """
    gathered = strategy.gather()
    try:
        if (first := next(gathered, None)) is None:
            return  # only rank 0 gets weights and writes them
        model, weights = strategy.model, chain([first], gathered)
        if options.lora_rank:
            trained = dict(weights)
            with _replaced(run_folder / "adapter") as folder:
                _write_adapter(model, trained, folder, options)
            # takes little main memory: weights of this data type are memory-mapped
            model = _load(options, "auto", as_reward_model=is_classifier(model.config))
            weights = lora_merge.merge(model, run_folder / "adapter", trained)
        else:
            model, weights = _with_untrained(options, model, weights)
        dtype, unchanged = _compute_dtype(options), {*composite.without_text(model), reward_config.HEAD}
        with _replaced(run_folder / "model") as folder:
            _write_settings(model, tokenizer, eos_ids, folder, options)
            converted = ((name, value if name in unchanged else value.to(dtype)) for name, value in weights)
            weight_files.write(model, converted, folder)
    finally:
        for _ in gathered:
            pass  # after an error, the other ranks still wait for rank 0 in the collectives of `gather`


def _with_untrained(
    options: TrainOptions, model: PreTrainedModel, trained: Iterator[Weight]
) -> tuple[PreTrainedModel, Iterator[Weight]]:
    """Add to the trained weights those that are not trained, as they are in the files of the base model.

    Return them with a model that has them: `model` if it is trained as a whole, otherwise the base model.
    """
    frozen = composite.without_text(model)
    if not frozen and not any(weight_files.saved_buffers(model)):
        return model, trained
    base = _load(options, "auto", as_reward_model=is_classifier(model.config))

    def weights() -> Iterator[Weight]:
        for name, parameter in base.named_parameters():
            yield (name, parameter.detach()) if name in frozen else next(trained)
        yield from trained  # lets the strategy finish its collectives

    return base, weights()


def _copy_processor(location: str, folder: Path) -> None:
    """Copy the files of the base model that say how to prepare images, which vLLM needs to serve a vision tower."""
    for name in (PROCESSOR_NAME, IMAGE_PROCESSOR_NAME, VIDEO_PROCESSOR_NAME):
        if file := cached_file(location, name, _raise_exceptions_for_missing_entries=False):
            shutil.copy(file, folder)


def _write_adapter(
    model: PreTrainedModel, trained: dict[str, torch.Tensor], folder: Path, options: TrainOptions
) -> None:
    # a quantized model would replace the state by its own, of which a rank of FSDP has a part
    quantizer, model.hf_quantizer = getattr(model, "hf_quantizer", None), None
    model.save_pretrained(folder, state_dict=trained)
    model.hf_quantizer = quantizer
    adapters = model.peft_config["default"]
    adapters.base_model_name_or_path = options.model  # save_pretrained wrote the path of this node's copy
    if is_classifier(model.config):
        adapters.task_type, adapters.modules_to_save = "SEQ_CLS", ["score"]
        if (head := trained.get(reward_config.HEAD)) is not None:
            weight_files.add(folder / weights_check.ADAPTER_WEIGHTS[0], {f"{PEFT_PREFIX}{reward_config.HEAD}": head})
    adapters.save_pretrained(folder)


def _write_settings(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    eos_ids: list[int],
    folder: Path,
    options: TrainOptions,
) -> None:
    """Write everything but the weights."""
    config, generation = copy.deepcopy(model.config), copy.deepcopy(getattr(model, "generation_config", None))
    if is_classifier(config):
        config.pad_token_id = reward_config.set_padding(tokenizer, eos_ids, config.vocab_size)
    config.architectures = [type(model).__name__.removeprefix("FSDP")]  # `fully_shard` renames the class
    config.dtype = text_config(config).dtype = _compute_dtype(options)
    config.save_pretrained(folder)
    if generation and eos_ids:
        generation.eos_token_id = eos_ids
    if generation:
        # save_pretrained would refuse many published files, such as those with a temperature but without do_sample
        generation.to_json_file(folder / GENERATION_CONFIG_NAME, keys_to_pop=["compile_config"])
    tokenizer.save_pretrained(folder)
    _copy_processor(model_cache.on_this_node(options.model), folder)


@contextmanager
def _replaced(folder: Path) -> Iterator[Path]:
    """Yield the path of a temporary folder. If the block succeeds, the temporary folder replaces `folder`."""
    partial = folder.with_name(f".{folder.name}-partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        yield partial
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
