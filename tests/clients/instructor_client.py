"""Uses the features of Instructor."""

from collections.abc import Iterable

import instructor
import openai
from pydantic import BaseModel
from report import CITIES, CITY, KEY, MODEL, PARIS, ROME, URL, check, run

plain = openai.OpenAI(base_url=URL, api_key=KEY, max_retries=0)
messages = [{"role": "user", "content": CITY}]


class get_weather(BaseModel):
    """Temperature in a city."""

    city: str


def structured_output():
    client = instructor.from_openai(plain)
    found = client.create(model=MODEL, messages=messages, response_model=get_weather, temperature=0, max_retries=0)
    check(found.model_dump(), PARIS)


def streamed_tools():
    client = instructor.from_openai(plain)
    parts = client.create_partial(model=MODEL, messages=messages, response_model=get_weather, temperature=0)
    check(type(list(parts)[-1].city), str)  # Instructor changes the tool's name, so the model does not know the answer


def parallel_tools():
    client = instructor.from_openai(plain, mode=instructor.Mode.PARALLEL_TOOLS)
    asked = [{"role": "user", "content": CITIES}]
    found = client.create(model=MODEL, messages=asked, response_model=Iterable[get_weather], temperature=0)
    check([each.model_dump() for each in found], [PARIS, ROME])


run(structured_output, streamed_tools, parallel_tools)
