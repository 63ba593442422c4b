"""Find names of people and places with Presidio and a spaCy model, which the project's owner adds."""

import functools
import re
from importlib.metadata import version
from typing import Any

from raymill import optional

PACKAGE = "presidio-analyzer"
PLACEHOLDERS = {"PERSON": "<PERSON>", "LOCATION": "<LOCATION>"}
PIECE = re.compile(r"(?s).{1,100000}(?:(?<=\s)|$)|.{1,100000}")
"""Matches as much of a text as spaCy reads at once. It refuses texts of a million characters."""


def check(model: str) -> None:
    """Check that Presidio and the package of a spaCy model are installed: Presidio would download the model.

    Raises:
        UserError: one of them is not installed.
    """
    optional.check(("presidio_analyzer",), PACKAGE, "pii_names needs")
    optional.check((model,), model, "pii_names needs")


def versions(model: str) -> list[str]:
    """Return the versions of Presidio and of the model."""
    return [version(PACKAGE), version(model)]


def replace(text: str, model: str) -> str:
    """Return a text with <PERSON> and <LOCATION> instead of names."""
    return "".join(_replace(piece, model) for piece in PIECE.findall(text))


def _replace(piece: str, model: str) -> str:
    found = _analyzer(model).analyze(piece, language=_language(model), entities=list(PLACEHOLDERS))
    spans: list[tuple[int, int, str]] = []
    for one in sorted(found, key=lambda one: (one.start, -one.end)):
        if spans and one.start < spans[-1][1]:  # overlapping finds are one
            start, stop, name = spans.pop()
            spans.append((start, max(stop, one.end), name))
        else:
            spans.append((one.start, one.end, PLACEHOLDERS[one.entity_type]))
    for start, stop, name in reversed(spans):
        piece = f"{piece[:start]}{name}{piece[stop:]}"
    return piece


@functools.cache
def _analyzer(model: str) -> Any:
    from presidio_analyzer import AnalyzerEngine  # type: ignore[missing-import]
    from presidio_analyzer.nlp_engine import NlpEngineProvider  # type: ignore[missing-import]

    models = [{"lang_code": _language(model), "model_name": model}]
    provider = NlpEngineProvider(nlp_configuration={"nlp_engine_name": "spacy", "models": models})
    return AnalyzerEngine(nlp_engine=provider.create_engine(), supported_languages=[_language(model)])


def _language(model: str) -> str:
    """Return the language of a model, with which spaCy's names begin, as in en_core_web_lg."""
    return model[:2]
