"""Options of the training jobs and `check_network`, from settings.toml and the command line."""

from typing import Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from raymill.ray_support.workers import WorkerOptions
from raymill.settings import inv
from raymill.training.schedule import Schedule

ObjectiveName = Literal["supervised", "dpo", "ipo", "robust", "simpo", "orpo", "kto", "reward"]
OptimizerName = Literal["adamw", "muon", "adamw_8bit"]
OPTIMIZER_JOBS = {"muon": ("finetune_ddp", "finetune_fsdp"), "adamw_8bit": ("finetune_ddp", "finetune_fsdp")}
"""The only jobs that have these optimizers: ZeRO's parts of flattened parameters are no matrices."""
NOT_IN_TRAIN_HF = (
    *("lora_rank", "quantize_base", "stream", "stop_after", "patience"),
    *("objective", "optimizer", "schedule"),
)
OF_ADAPTERS = ("lora_targets", "rslora", "dora")
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"  # the name of a folder, not a path


class TrainOptions(WorkerOptions):
    """Options of all fine-tuning jobs."""

    name: str = Field(pattern=NAME)
    """Name of the run. The same name resumes it."""
    model: str
    """Base model: a Hugging Face folder, hub id or s3:// URI."""
    data: str
    """Folder or URI that `preprocess` wrote to."""
    output: str
    """Folder or URI for the runs. Each run gets a subfolder."""
    shared_paths: tuple[str, ...] = ()
    """Folders that every node mounts. If the cluster has several nodes, other local paths are refused."""
    fresh: bool = False
    """Delete an existing run with this name, and start over."""
    stream: bool = False
    """Tokenize and pack the raw rows of [preprocess] while training, instead of reading `data`. Nothing is held out for
    evaluation, and a resumed run reads the rows from the start."""

    max_failures: int = Field(ge=0)
    """Number of times that dead workers are replaced before the run fails. A spot machine that AWS takes back after a
    notice does not count."""

    global_batch_rows: PositiveInt
    """Rows per optimizer step over all workers. The number does not depend on num_workers."""
    micro_batch_rows: PositiveInt
    """Rows per forward pass of one worker."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass. Saves memory, but needs about a third more computation."""
    gradient_checkpointing_interval: PositiveInt = 1
    """With gradient_checkpointing, recompute only one in this many layers, which takes more memory and less time."""
    compile: bool = False
    """Compile the decoder layers (torch.compile). Each start takes at least a minute longer, but steps are faster. With
    ZeRO stage 3, this gains little, because DeepSpeed's hooks split the layers into small pieces."""
    chunked_loss: bool = False
    """Compute the loss in chunks of 1024 tokens. Saves 12 bytes per token and element of the vocabulary. Models that
    scale or cap their logits compute it at once, whatever this option."""
    liger: bool = False
    """Use Liger's fused kernels (Hsu et al. 2024, arXiv:2410.10989), which need less memory. CUDA only."""
    precision: Literal["fp32", "bf16"]
    """Number format of the computation. On a device without bf16, fp32 is used."""

    lora_rank: int = Field(0, ge=0)
    """Rank of the LoRA adapters (Hu et al. 2021, arXiv:2106.09685). Only the adapters are trained. 0: no adapters; all
    parameters are trained."""
    lora_targets: tuple[str, ...] = ()
    """Linear layers that get adapters, by the last part of their names, such as q_proj. Empty: all but the output
    layer."""
    lora_alpha: PositiveInt = 32
    """The output of an adapter is scaled by lora_alpha / lora_rank."""
    rslora: bool = False
    """Scale it by lora_alpha / sqrt(lora_rank) instead, for high ranks (Kalajdzievski 2023, arXiv:2312.03732)."""
    dora: bool = False
    """Also train the length of each row of the adapted weights (DoRA, Liu et al. 2024, arXiv:2402.09353). Slower. vLLM
    cannot serve such adapters, but the model into which they are merged."""
    lora_dropout: float = Field(0, ge=0, lt=1)
    """Dropout probability for the inputs of the adapters."""

    quantize_base: bool = False
    """Quantize the frozen weights to 4 bits in the NF4 format (QLoRA, Dettmers et al. 2023, arXiv:2305.14314)."""

    objective: ObjectiveName = "supervised"
    """What to minimize. supervised: the cross-entropy of answers. For pairs that `preprocess --task preference` packed:
    dpo, ipo, robust, simpo, orpo, and reward, which trains a reward model. For answers that `preprocess --task
    unpaired_preference` packed: kto."""
    beta: PositiveFloat = 0.1
    """The larger, the closer the model stays to the base model. In simpo, the scale of the rewards; in orpo, the weight
    of the odds ratio."""
    label_smoothing: float = Field(0, ge=0, lt=0.5)
    """Share of the pairs that are the wrong way round, for robust."""
    simpo_gamma: float = Field(0.5, ge=0)
    """By how much the reward of the chosen answer should exceed the other, for simpo."""

    desirable_weight: PositiveFloat = 1.0
    """Weight of the losses of good answers, for kto."""
    undesirable_weight: PositiveFloat = 1.0
    """Weight of the losses of bad answers, for kto."""

    optimizer: OptimizerName = "adamw"
    """muon (Jordan et al. 2024) updates hidden matrices by orthogonal steps. adamw_8bit (Dettmers et al. 2021,
    arXiv:2110.02861) keeps 8 bits per number for them; in finetune_fsdp, it needs the package torchao. Other parameters
    have AdamW."""
    learning_rate: PositiveFloat
    """Peak learning rate. Muon's steps are scaled so that a rate for AdamW fits."""
    reference_batch_rows: PositiveInt | None = None
    """Global batch size that learning_rate was tuned for. For other sizes, the rate is scaled linearly. None: never."""
    schedule: Schedule = "cosine"
    """How the learning rate changes after the warmup. cosine and linear fall to the last step; constant stays at the
    peak; wsd stays there, and falls linearly at the end (warmup-stable-decay, Hu et al. 2024, arXiv:2404.06395)."""
    warmup_steps: int = Field(ge=0)
    """Optimizer steps until the learning rate reaches its peak."""
    decay_share: float = Field(0.1, gt=0, le=1)
    """Share of the steps in which wsd falls."""
    min_lr_ratio: float = Field(ge=0, le=1)
    """Final learning rate, as a fraction of the peak."""
    weight_decay: float = Field(ge=0)
    """Decoupled weight decay, on matrices only."""
    max_grad_norm: PositiveFloat
    """Global L2 norm at which gradients are clipped."""

    steps: int = Field(0, ge=0)
    """Number of optimizer steps in the schedule. 0: as many as `epochs` need."""
    epochs: float = Field(0, ge=0)
    """Passes over the packed rows, instead of `steps`."""
    stop_after: PositiveInt | None = None
    """Save a checkpoint, export the model and stop after this step, before the end of the schedule. To continue, run
    the job again without this option."""
    eval_every: PositiveInt
    """Optimizer steps between evaluations. There is also an evaluation before each regular checkpoint."""
    checkpoint_every: PositiveInt
    """Optimizer steps between checkpoints."""
    keep_checkpoints: PositiveInt
    """How many checkpoints to keep: those with the best evaluation. The last one is always kept, too."""
    patience: int = Field(0, ge=0)
    """Stop after so many checkpoints in a row that are not better than the best one, and export the best one. Only the
    regular ones count. 0: never; the last one is exported."""
    log_every: PositiveInt
    """Maximum number of optimizer steps between progress lines. If steps are slow, a line appears about every 10 s."""
    mlflow: str = ""
    """Tracking URI of an MLflow server or folder to send the metrics to. Empty: none."""
    wandb: str = ""
    """Weights & Biases project to send the metrics to. Empty: none."""
    seed: int
    """Random seed for the row order, dropout and the initial adapters."""

    ALTERNATIVES = ("steps", "epochs")

    @model_validator(mode="after")
    def _has_one_length(self) -> Self:
        if bool(self.steps) == bool(self.epochs):
            raise ValueError("a run needs either steps or epochs; set one of them")
        return self

    @model_validator(mode="after")
    def _adapters_are_above_quantized_weights(self) -> Self:
        if self.quantize_base and (not self.lora_rank or self.strategy not in ("ddp", "fsdp")):
            needed = f"adapters, and DDP or FSDP: {inv('submit finetune_fsdp -- --lora-rank 16 --quantize-base')}"
            raise ValueError(f"quantize_base needs {needed}")
        return self

    @model_validator(mode="after")
    def _has_adapters(self) -> Self:
        if not self.lora_rank and (set_ := [name for name in OF_ADAPTERS if getattr(self, name)]):
            raise ValueError(f"{set_[0]} needs adapters; set lora_rank = 16")
        return self

    @model_validator(mode="after")
    def _has_pairs(self) -> Self:
        if bool(self.label_smoothing) != (self.objective == "robust"):
            raise ValueError("objective = robust, and no other one, needs label_smoothing; set both")
        if self.objective != "supervised" and self.lora_dropout:
            raise ValueError(f"objective = {self.objective} compares models without dropout; set lora_dropout = 0")
        if self.objective != "supervised" and self.stream:
            raise ValueError(f"objective = {self.objective} needs packed rows; set stream = false")
        if self.objective == "reward" and self.liger:
            raise ValueError("liger = true has no kernels for reward models; set liger = false")
        if self.objective != "kto" and (self.desirable_weight, self.undesirable_weight) != (1, 1):
            raise ValueError("desirable_weight and undesirable_weight need objective = kto; set both to 1")
        return self

    @model_validator(mode="after")
    def _patience_has_evaluations(self) -> Self:
        if self.patience and self.stream:
            raise ValueError("patience needs held-out rows, which a stream does not have; set patience = 0")
        return self

    @model_validator(mode="after")
    def _has_an_optimizer(self) -> Self:
        jobs = OPTIMIZER_JOBS.get(self.optimizer, ())
        if jobs and f"finetune_{self.strategy}" not in jobs:
            commands = [inv(f"submit {job} -- --optimizer {self.optimizer}") for job in jobs]
            raise ValueError(f"optimizer = {self.optimizer} needs another job: {' or '.join(commands)}")
        return self

    @model_validator(mode="after")
    def _liger_has_a_gpu(self) -> Self:
        if self.liger and self.device != "cuda":
            raise ValueError("liger = true needs device = cuda, because its kernels use Triton; set liger = false")
        return self

    @model_validator(mode="after")
    def _a_stream_has_steps(self) -> Self:
        if self.stream and self.epochs:
            raise ValueError("stream = true needs steps: it is not known how many rows a stream packs; set steps")
        return self

    @model_validator(mode="after")
    def _a_stream_has_fixed_workers(self) -> Self:
        if self.stream and self.min_workers < self.max_workers:
            raise ValueError("stream = true needs a fixed number of workers, not a range; set num_workers = N")
        return self

    @property
    def strategy(self) -> str:
        """How the model is distributed over the workers."""
        return "ddp"

    @property
    def last_step(self) -> int:
        """The step after which the run ends or pauses."""
        return min(self.steps, self.stop_after or self.steps)


class DDPOptions(TrainOptions):
    """Options of finetune_ddp."""

    name: str = Field("finetune_ddp", pattern=NAME)
    """Name of the run. The same name resumes it."""


class DeepSpeedOptions(TrainOptions):
    """Options of finetune_deepspeed."""

    name: str = Field("finetune_deepspeed", pattern=NAME)
    """Name of the run. The same name resumes it."""
    zero_stage: Literal[1, 2, 3]
    """What to shard over the workers. 1: optimizer states; 2: also gradients; 3: also parameters."""
    offload_optimizer: bool
    """Keep optimizer states in main memory, and run the optimizer on the CPU."""
    offload_parameters: bool
    """Keep parameters in main memory. Needs stage 3."""
    hpz: bool
    """Keep a second copy of the parameters that is sharded within each machine (hpZ of ZeRO++, Wang et al. 2023,
    arXiv:2306.10209). The network carries the parameters once per optimizer step. Needs stage 3."""

    @property
    def strategy(self) -> str:
        return f"zero{self.zero_stage}"

    @model_validator(mode="after")
    def _only_sharded_parameters_are_offloaded(self) -> Self:
        if self.offload_parameters and self.zero_stage != 3:
            raise ValueError("offload_parameters needs zero_stage = 3; add --zero-stage 3")
        return self

    @model_validator(mode="after")
    def _only_sharded_parameters_have_a_second_copy(self) -> Self:
        if self.hpz and self.zero_stage != 3:
            raise ValueError("hpz needs zero_stage = 3; add --zero-stage 3")
        return self


class FSDPOptions(TrainOptions):
    """Options of finetune_fsdp."""

    name: str = Field("finetune_fsdp", pattern=NAME)
    """Name of the run. The same name resumes it."""
    reshard_after_forward: bool
    """Free a layer's gathered parameters after the forward pass. Saves memory, but needs another all-gather."""
    hybrid_shard: bool
    """Shard within each machine, and replicate over machines (HSDP, Zhao et al. 2023, arXiv:2304.11277). The network
    carries only gradients, once per optimizer step, but each machine holds the whole training state."""

    @property
    def strategy(self) -> str:
        return "fsdp"


class NetworkOptions(WorkerOptions):
    """Options of check_network: the workers of [train], and message sizes. The job uses NCCL on `cuda`, else gloo."""

    message_mib: tuple[PositiveInt, ...] = (1, 16, 256)
    """Message sizes to measure. Gradient buckets hold 25 MiB in DDP, and up to 500 million values in ZeRO."""


class ClassifierOptions(WorkerOptions):
    """Options of train_classifier, from [classifier] and from those keys of [train] that it has too."""

    name: str = Field("train_classifier", pattern=NAME)
    """Name of the run. The same name resumes it."""
    output: str
    """Folder or URI for the runs. Each run gets a subfolder."""
    shared_paths: tuple[str, ...] = ()
    """Folders that every node mounts. If the cluster has several nodes, other local paths are refused."""
    max_failures: int = Field(ge=0)
    """Number of times that dead workers are replaced before the run fails. A spot machine that AWS takes back after a
    notice does not count."""
    seed: int
    """Random seed for the initial weights, the images and their order."""

    images: PositiveInt
    """Number of training images. The job also draws a quarter as many test images."""
    epochs: PositiveInt
    """Total passes over the images, including those before a resume."""
    batch_size: PositiveInt
    """Images per optimizer step over all workers, rounded up to a multiple of the number of workers."""
    learning_rate: PositiveFloat
    """Learning rate of AdamW."""


class HFOptions(TrainOptions):
    """Options of train_hf, from [hf] and [train]."""

    name: str = Field("train_hf", pattern=NAME)
    """Name of the run. The same name resumes it."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Arguments of transformers' TrainingArguments by name, in addition to those that the job sets."""

    @property
    def strategy(self) -> str:
        wrappers = [name for name in ("deepspeed", "fsdp") if self.arguments.get(name)]
        return f"transformers, {(*wrappers, 'ddp')[0]}"

    @model_validator(mode="after")
    def _train_hf_can_do_it(self) -> Self:
        for name in NOT_IN_TRAIN_HF:
            if (value := getattr(self, name)) != type(self).model_fields[name].default:
                raise ValueError(f"train_hf cannot use {name} = {str(value).lower()}; remove it, or use finetune_ddp")
        if self.arguments.get("fsdp") and self.device == "cpu":
            raise ValueError("fsdp in arguments needs device = cuda: on CPUs, Accelerate would train without FSDP")
        return self
