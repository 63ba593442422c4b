"""Ray Tune: finds out whether this process runs a trial."""

from ray.tune.trainable.trainable_fn_utils import _in_tune_session


def is_in_trial() -> bool:
    """Return whether this process runs a trial.

    Relies on `_in_tune_session` of ray.tune.trainable.trainable_fn_utils (Ray 2.60).
    """
    return bool(_in_tune_session())
