"""Searches for the best fine-tuning settings with short runs. Ray Tune stops unpromising runs early (with ASHA)."""

from raymill.job import Job, connect
from raymill.tuning.options import TuneOptions

JOB = Job(TuneOptions, "train", "tune")  # reads the options, before the slow imports below

from rich.console import Console

from raymill import settings
from raymill.errors import UserError
from raymill.ray_support import job_lease
from raymill.training import preflight
from raymill.tuning import search, trials

CONSOLE = Console(highlight=False, width=120)


def main(options: TuneOptions) -> None:
    """Search for the learning rate, batch size and LoRA rank that give the lowest evaluation loss."""
    options = preflight.with_absolute_paths(options)
    identity = search.check(options)
    connect(log_to_driver=False)  # workers' logs would hide the driver's one line per trial
    search.check_cluster(options)
    with job_lease.hold(options.folder, "--name"):
        preflight.claim(options, identity)
        searched = trials.load(options.folder, search.draw(options))
        failures = search.run(options, searched)
        outcomes = trials.ranked(options.folder, searched)
        CONSOLE.print(trials.table(outcomes))
        if outcomes[0].curve:
            print(f"curves: {trials.plot(options.folder, outcomes)}")
            print(f"best settings, for settings.toml:\n{trials.snippet(outcomes[0].trial, settings.active_profile())}")
        trials.delete_weights(options.folder, searched)
    if failures:
        raise UserError(
            f"{len(failures)} of {len(searched)} trials failed ({failures[0]}). Fix the cause, then run the same "
            "command again to resume them."
        )


JOB.run(main)
