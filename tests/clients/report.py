"""Runs a client's features and prints the outcome of each as JSON. Each client runs in an environment of its own."""

import json
import os
from collections.abc import Callable

ROOT = os.environ["SERVER"]
URL = f"{ROOT}/v1"
KEY = os.environ["SERVE_API_KEY"]
MODEL = "tools"
CITY, CITIES, GREETING = "How warm is Paris?", "How warm are Paris and Rome?", "Hello!"
GREETED, RESULT, ANSWER = "Good day.", "18", "18 degrees."
PARIS, ROME = {"city": "Paris"}, {"city": "Rome"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"name": "get_weather", "description": "Temperature in a city.", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": TOOL}]


def get_weather(city: str) -> str:
    """Temperature in a city."""
    return RESULT


def check(found: object, expected: object) -> None:
    assert found == expected, f"{found!r} is not {expected!r}"


def run(*features: Callable[[], None]) -> None:
    """Run each feature, and print "ok" or its error."""
    outcomes = {}
    for feature in features:
        name = feature.__name__.replace("_", " ")
        try:
            feature()
            outcomes[name] = "ok"
        except Exception as error:  # any error of a client is an outcome
            outcomes[name] = f"{type(error).__name__}: {error}"[:300]
    print(json.dumps(outcomes))
