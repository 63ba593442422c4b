"""Floating-point operations of a training step, and the peak of a device."""


def flops_per_token(parameters: int, layers: int, hidden: int, sequence_length: int, frozen: int = 0) -> float:
    """Return the floating-point operations per token of one forward and backward pass.

    6 N + 12 L H Q T, PaLM (Chowdhery et al. 2022, arXiv:2204.02311, appendix B), with H Q = `hidden` and
    N = `parameters` without the input embedding, which is a lookup. Recomputed activations do not count. That packed
    documents attend only to themselves is ignored. A frozen parameter has no gradient, which saves 2 of its 6.
    """
    return 6 * parameters - 2 * frozen + 12 * layers * hidden * sequence_length


# dense bf16 operations per second, from NVIDIA's data sheets; the first name that is part of the device's name wins
PEAK_BF16_FLOPS = {"A100": 312e12, "H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12}


def peak_flops(device_name: str) -> float | None:
    """Return the device's peak in bf16, or None if it is unknown."""
    return next((peak for name, peak in PEAK_BF16_FLOPS.items() if name in device_name), None)
