"""Checks the accelerator in [serve]. This check is not in options.py, because that module must not import Ray."""

from ray.util.accelerators import accelerators

from raymill.errors import UserError


def check_accelerator(name: str) -> None:
    """Check that Ray knows this type of accelerator.

    Raises:
        UserError: Ray does not know this type.
    """
    known = {value for constant, value in vars(accelerators).items() if constant.isupper()}
    if name not in {"cpu", "gpu"} | known:
        raise UserError(
            f"Ray does not know the accelerator {name!r}. "
            f"Set accelerator in [serve] to one of: cpu, gpu, {', '.join(sorted(known))}."
        )
