"""The dataset and the model of jobs/train_classifier.py: images of digits on a seven-segment display."""

import math

import numpy as np
import torch
from torch import nn

SIDE = 28  # width and height of an image, in pixels
SEGMENTS = ("abcdef", "bc", "abdeg", "abcdg", "bcfg", "acdfg", "acdefg", "abc", "abcdefg", "abcdfg")
"""Segments of each digit: a to f clockwise from the top, g in the middle."""


def make_model() -> nn.Module:
    """Return a small convolutional network that maps images to a score for each digit."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * math.ceil(SIDE / 8) ** 2, len(SEGMENTS)),
    )


def draw_digits(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return noisy images of random digits, shape (count, 1, SIDE, SIDE), and the digits, shape (count,)."""
    random = np.random.default_rng(seed)
    digits = random.integers(len(SEGMENTS), size=count)
    images = random.normal(0, 0.3, (count, SIDE, SIDE)).astype(np.float32)
    for image, digit in zip(images, digits, strict=True):
        _draw(image, SEGMENTS[digit], random)
    return torch.from_numpy(images).unsqueeze(1), torch.from_numpy(digits)


@torch.no_grad()
def count_correct(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the number of images that the model classifies correctly."""
    model.eval()
    return (model(images).argmax(1) == labels).sum()


def _draw(image: np.ndarray, segments: str, random: np.random.Generator) -> None:
    """Draw one digit with a random position and size. Its segments are two pixels wide."""
    half, width = random.integers(5, 11), random.integers(6, 16)
    top, left = random.integers(SIDE - 2 * half - 1), random.integers(SIDE - width - 1)
    middle, bottom, right = top + half, top + 2 * half, left + width
    ends = {
        "a": (top, top, left, right),
        "b": (top, middle, right, right),
        "c": (middle, bottom, right, right),
        "d": (bottom, bottom, left, right),
        "e": (middle, bottom, left, left),
        "f": (top, middle, left, left),
        "g": (middle, middle, left, right),
    }
    for segment in segments:
        first_row, last_row, first_column, last_column = ends[segment]
        image[first_row : last_row + 2, first_column : last_column + 2] = 1
