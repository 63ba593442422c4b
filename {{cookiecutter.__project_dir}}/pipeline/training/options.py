"""Options of the training jobs and `check_network`: sections of settings.toml, and the command line."""

from typing import Literal, Self

from pydantic import ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

from pipeline.ray_support.workers import WorkerOptions

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"  # a folder's name, and no path


class TrainOptions(WorkerOptions):
    """What every way of spreading the training over workers shares."""

    name: str = Field(pattern=NAME)
    """Name of the run; the same name again resumes it."""
    model: str
    """Model to start from: a Hugging Face folder or a hub id."""
    data: str
    """Folder or URI that `preprocess` wrote."""
    output: str
    """Folder or URI that holds one folder for each run."""
    shared_paths: tuple[str, ...] = ()
    """Folders that every node mounts; on several nodes, other local paths are refused."""
    fresh: bool = False
    """Delete what the run of this name left and start over."""
    stream: bool = False
    """Tokenise and pack the raw rows of [preprocess] while training, instead of reading `data`; a
    resumed run then starts over in the rows, and nothing is held out for evaluation."""

    max_failures: int = Field(ge=0)
    """How often dead workers are replaced before the run fails."""

    global_batch_rows: PositiveInt
    """Rows in one optimizer step, whatever the number of workers."""
    micro_batch_rows: PositiveInt
    """Rows in one forward pass of one worker."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more computation."""
    compile: bool = False
    """Compile the decoder layers (torch.compile): a minute or more at the start, faster steps after it."""
    liger: bool = False
    """Liger's fused kernels in place of the model's own (Hsu et al. 2024, arXiv:2410.10989): less memory on a GPU."""
    precision: Literal["fp32", "bf16"]
    """Number format of the computation; bf16 falls back to fp32 on a device without it."""

    lora_rank: int = Field(0, ge=0)
    """Rank of the LoRA adapters on all linear layers (Hu et al. 2021, arXiv:2106.09685), which are trained alone; 0
    trains every parameter."""
    lora_alpha: PositiveInt = 32
    """What an adapter adds is scaled by lora_alpha / lora_rank."""
    lora_dropout: float = Field(0, ge=0, lt=1)
    """Share of an adapter's inputs that is dropped in training."""

    quantize_base: bool = False
    """Keep the frozen weights below adapters in 4 bits, NF4 (QLoRA, Dettmers et al. 2023, arXiv:2305.14314)."""

    learning_rate: PositiveFloat
    """Peak learning rate of AdamW."""
    reference_batch_rows: PositiveInt | None = None
    """Global batch that learning_rate was found with: other batches scale it linearly; none: no scaling."""
    warmup_steps: int = Field(ge=0)
    """Optimizer steps in which the learning rate rises to its peak."""
    min_lr_ratio: float = Field(ge=0, le=1)
    """Share of the peak learning rate at which the cosine ends."""
    weight_decay: float = Field(ge=0)
    """AdamW's decoupled weight decay, on matrices only."""
    max_grad_norm: PositiveFloat
    """Global L2 norm to which gradients are clipped."""

    steps: PositiveInt
    """Optimizer steps of the whole schedule."""
    stop_after: PositiveInt | None = None
    """Stop after this step with a checkpoint, though the schedule goes on; run again to go on."""
    eval_every: PositiveInt
    """Optimizer steps between evaluations; every checkpoint is evaluated too."""
    checkpoint_every: PositiveInt
    """Optimizer steps between checkpoints."""
    keep_checkpoints: PositiveInt
    """Checkpoints kept: the best by evaluation loss, and always the last."""
    log_every: PositiveInt
    """Optimizer steps between progress lines at most; slow steps have one every ten seconds."""
    mlflow: str = ""
    """Tracking URI of an MLflow server or folder that gets the numbers too; empty: none."""
    wandb: str = ""
    """Weights & Biases project that gets the numbers too; empty: none."""
    seed: int
    """Seed of the order of the rows and of dropout."""

    @model_validator(mode="after")
    def _adapters_are_above_quantized_weights(self) -> Self:
        if self.quantize_base and (not self.lora_rank or self.strategy != "ddp"):
            needed = "adapters and DDP: inv submit finetune_ddp -- --lora-rank 16 --quantize-base"
            raise ValueError(f"quantize_base needs {needed}")
        return self

    @model_validator(mode="after")
    def _liger_has_a_gpu(self) -> Self:
        if self.liger and self.device != "cuda":
            raise ValueError("liger = true needs device = cuda: its kernels are Triton's; set liger = false")
        return self

    @model_validator(mode="after")
    def _a_stream_is_split_once(self) -> Self:
        if self.stream and self.min_workers < self.max_workers:
            raise ValueError("stream = true needs one number of workers; set num_workers = N")
        return self

    @property
    def strategy(self) -> str:
        """How the model is spread over the workers."""
        return "ddp"

    @property
    def last_step(self) -> int:
        """The step after which this start of the run ends."""
        return min(self.steps, self.stop_after or self.steps)


class DDPOptions(TrainOptions):
    """Options of finetune_ddp."""

    name: str = Field("finetune_ddp", pattern=NAME)
    """Name of the run; the same name again resumes it."""


class DeepSpeedOptions(TrainOptions):
    """Options of finetune_deepspeed."""

    name: str = Field("finetune_deepspeed", pattern=NAME)
    """Name of the run; the same name again resumes it."""
    zero_stage: Literal[1, 2, 3]
    """What is sharded over the workers: 1 optimizer states, 2 gradients too, 3 parameters too."""
    offload_optimizer: bool
    """Keep optimizer states and run the optimizer in main memory."""
    offload_parameters: bool
    """Keep parameters in main memory; needs stage 3."""

    @property
    def strategy(self) -> str:
        return f"zero{self.zero_stage}"

    @model_validator(mode="after")
    def _only_sharded_parameters_are_offloaded(self) -> Self:
        if self.offload_parameters and self.zero_stage != 3:
            raise ValueError("offload_parameters needs zero_stage = 3; add --zero-stage 3")
        return self


class FSDPOptions(TrainOptions):
    """Options of finetune_fsdp."""

    name: str = Field("finetune_fsdp", pattern=NAME)
    """Name of the run; the same name again resumes it."""
    reshard_after_forward: bool
    """Free a layer's gathered parameters between its forward and its backward pass: less memory, one more gathering."""

    @property
    def strategy(self) -> str:
        return "fsdp"


class NetworkOptions(WorkerOptions):
    """The workers of [train], and the sizes of their messages. They use NCCL on cuda, and gloo on cpu."""

    model_config = ConfigDict(extra="ignore")
    message_mib: tuple[PositiveInt, ...] = (1, 16, 256)
    """Message sizes to measure. DDP sends gradients in buckets of 25 MiB, ZeRO of 500 MB."""


class ClassifierOptions(WorkerOptions):
    """The workers of [train], and what [classifier] sets."""

    model_config = ConfigDict(extra="ignore")
    name: str = Field("train_classifier", pattern=NAME)
    """Name of the run; the same name again resumes it."""
    output: str
    """Folder or URI that holds one folder for each run."""
    shared_paths: tuple[str, ...] = ()
    """Folders that every node mounts; on several nodes, other local paths are refused."""
    max_failures: int = Field(ge=0)
    """How often dead workers are replaced before the run fails."""
    seed: int
    """Seed of the first weights and of the images."""

    images: PositiveInt
    """Number of training images. A quarter as many test images are drawn too."""
    epochs: PositiveInt
    """Total passes over the images, including those before a resume."""
    batch_size: PositiveInt
    """Images in one optimizer step, shared out over the workers; rounded up to a multiple of them."""
    learning_rate: PositiveFloat
    """Learning rate of AdamW."""
