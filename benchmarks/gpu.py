"""Measures the MFU of a Llama with a billion parameters on one CUDA device, for each of SWITCHES. Uses no Ray."""

import gc
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks import harness
from benchmarks.report import Result, at_least
from raymill import settings
from raymill.errors import UserError
from raymill.training.dataset import Batch
from raymill.training.ddp import DDP
from raymill.training.options import DDPOptions, TrainOptions
from raymill.training.runtimes.runtime import Runtime, SingleProcess
from raymill.training.schedule import BatchPlan
from raymill.training.trainer import Trainer

LENGTH, ROWS = 4096, 4
FIRST, STEPS = 3, 10  # the first FIRST steps compile and choose kernels, and do not count
LLAMA = {  # the shape of Llama 3.2 1B
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": True,
}
# changes to the plain loop, which uses SDPA, one document per row and two rows per pass
SWITCHES: dict[str, dict[str, Any]] = {
    "plain": {},
    "one row per pass": {"micro_batch_rows": 1},
    "four rows per pass": {"micro_batch_rows": 4},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "gradient checkpointing, four rows per pass": {"gradient_checkpointing": True, "micro_batch_rows": 4},
    "compiled": {"compile": True},
    "Liger's kernels": {"liger": True},
    "Liger's kernels, four rows per pass": {"liger": True, "micro_batch_rows": 4},
    "Liger's kernels, compiled": {"liger": True, "compile": True},
    "compiled, four rows per pass": {"compile": True, "micro_batch_rows": 4},
    "eight documents per row": {"documents": 8},
    "compiled, eight documents per row": {"compile": True, "documents": 8},
    "attention without a fused kernel": {"attention": "eager", "gradient_checkpointing": True, "micro_batch_rows": 1},
}


class RandomRows:
    """Rows of random tokens. All tokens are trained, and each row has `documents` documents of equal length."""

    sequence_length = LENGTH
    chat_template: str | None = None
    rows_per_epoch: int | None = None

    def __init__(self, documents: int) -> None:
        self.eos_ids: list[int] = []
        self._positions = torch.arange(LENGTH // documents).repeat(ROWS, documents)

    def rows(self, step: int) -> Batch:
        tokens = torch.randint(LLAMA["vocab_size"], (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
        return {"input_ids": tokens, "labels": tokens, "position_ids": self._positions}

    def names(self, step: int, first: int, count: int) -> list[str]:
        return []


def measure() -> Result:
    """Train for a few steps with each of SWITCHES, and compare the best MFU with its target.

    Raises:
        UserError: there is no CUDA device, or its peak FLOP/s is unknown.
    """
    if not torch.cuda.is_available():
        raise UserError(
            "there is no CUDA device, or torch is a CPU build. On a machine with a CUDA device, install "
            "build/bench/requirements/cluster.txt and run: PYTHONPATH=build/bench:. python -m benchmarks gpu"
        )
    with harness.scratch() as folder:
        LlamaForCausalLM(LlamaConfig(**LLAMA)).save_pretrained(folder / "model")
        rounds = [{"switch": name} | _measure(folder, **changes) for name, changes in SWITCHES.items()]
    best = max(made["MFU"] for made in rounds if isinstance(made["MFU"], float))
    device = torch.cuda.get_device_name()
    return {"bars": [at_least(0.55, f"highest MFU on {device}", best)], "rounds": rounds, "device": device}


def _measure(folder: Path, documents: int = 1, attention: str = "", **changes: Any) -> dict[str, Any]:
    class DDPWithAttention(DDP):
        def __init__(self, model: PreTrainedModel, options: TrainOptions, runtime: Runtime, plan: BatchPlan) -> None:
            if attention:
                model.set_attn_implementation(attention)
            super().__init__(model, options, runtime, plan)

    torch.compiler.reset()  # frees the previous model too
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    runtime = SingleProcess(folder / "runs", torch.device("cuda", 0), keep_checkpoints=1)
    try:
        trainer = Trainer(_options(folder, changes), runtime, DDPWithAttention, RandomRows(documents))
        _steps(trainer, 1, FIRST)
        row = _steps(trainer, FIRST + 1, FIRST + STEPS)
    except torch.OutOfMemoryError:
        return {"MFU": "out of memory", "tokens/s": "", "GiB": ""}
    if "mfu" not in row:
        raise UserError(f"PEAK_BF16_FLOPS has no entry for {torch.cuda.get_device_name()}: add its peak.")
    return {"MFU": row["mfu"], "tokens/s": row["tokens_per_s"], "GiB": torch.cuda.max_memory_allocated() / 2**30}


def _steps(trainer: Trainer, first: int, last: int) -> dict[str, float]:
    """Run the steps from `first` to `last`, without a final checkpoint. Return the metrics of the last step."""
    trainer.meter.restart()
    for step in range(first, last + 1):
        trainer.step(step)
    return trainer.meter.read()[-1]


def _options(folder: Path, changes: dict[str, Any]) -> DDPOptions:
    one_gpu = {
        "model": str(folder / "model"),
        "output": str(folder),
        "num_workers": 1,
        "global_batch_rows": ROWS,
        "micro_batch_rows": 2,
        "gradient_checkpointing": False,
    }
    return settings.load(DDPOptions, "train", profile="cluster").model_copy(update=one_gpu | changes)


if __name__ == "__main__":
    harness.main(measure)
