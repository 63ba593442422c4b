"""Options of `tune`, from [train] and [tune] in settings.toml and from the command line."""

from typing import Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from raymill import settings
from raymill.training.options import NAME, TrainOptions


class Range(settings.Section):
    """A range from which values are drawn log-uniformly."""

    low: PositiveFloat
    """Lower bound."""
    high: PositiveFloat
    """Upper bound."""

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> Self:
        if self.low > self.high:
            raise ValueError("low is above high")
        return self


class TuneOptions(TrainOptions):
    """The [train] section, which applies to all trials, with additions and overrides from [tune]."""

    name: str = Field("tune", pattern=NAME)
    """Name of the search. The same name resumes it."""
    script: str
    """Job that each trial runs: finetune_ddp, finetune_fsdp, finetune_deepspeed, or one of your own like these."""
    trials: PositiveInt
    """Number of trials, each with its own settings. To add trials, run the search again with a larger number."""
    trials_at_once: PositiveInt
    """Number of trials that run at the same time, each on num_workers workers."""

    learning_rates: Range
    """Range of the learning rate."""
    global_batches: tuple[PositiveInt, ...] = ()
    """Values to try for global_batch_rows. Empty: not searched."""
    lora_ranks: tuple[NonNegativeInt, ...] = ()
    """Values to try for lora_rank. Empty: not searched."""

    grace_steps: PositiveInt
    """Number of steps after which a trial is first compared with others (ASHA, Li et al. 2018, arXiv:1810.05934)."""
    reduction_factor: float = Field(gt=1)
    """Trials are compared after grace_steps, and again whenever their number of steps has grown by this factor. With
    factor 3, one in three trials continues each time."""

    @model_validator(mode="after")
    def _only_trials_stop_early(self) -> Self:
        if self.patience:
            raise ValueError("tune compares its trials to stop them early, without patience; set patience = 0")
        return self

    @model_validator(mode="after")
    def _trials_are_compared(self) -> Self:
        if not self.steps:
            raise ValueError("tune counts in steps, not in epochs; set steps")
        if self.grace_steps >= self.steps:
            raise ValueError("grace_steps must be less than steps, otherwise no trial ends early")
        return self

    @property
    def strategy(self) -> str:
        return self.script.removeprefix("finetune_")

    @property
    def folder(self) -> str:
        """Folder of the search and its trials."""
        return f"{self.output}/{self.name}"
