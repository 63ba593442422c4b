"""Floating-point operations of a training step, and the peak of the device."""


def flops_per_token(parameters: int, layers: int, hidden: int, sequence_length: int, frozen: int = 0) -> float:
    """Floating-point operations of one forward and backward pass for each token.

    6 N + 12 L H Q T, PaLM (Chowdhery et al. 2022, arXiv:2204.02311, appendix B), with H Q = `hidden`
    and N = `parameters` without the input embedding, which is looked up and not multiplied. Recomputed
    activations do not count, and neither does it count less that packed documents attend only to themselves.
    A frozen parameter has no gradient of its own, which saves 2 of its 6.
    """
    return 6 * parameters - 2 * frozen + 12 * layers * hidden * sequence_length


# dense bf16 operations a second, from NVIDIA's data sheets; the first name that the device's contains
PEAK_BF16_FLOPS = {"A100": 312e12, "H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12}


def peak_flops(device_name: str) -> float | None:
    """The device's peak in bf16, or None where it is not known."""
    return next((peak for name, peak in PEAK_BF16_FLOPS.items() if name in device_name), None)
