"""Uses the features of Pydantic AI."""

import asyncio

from pydantic import BaseModel
from pydantic_ai import Agent, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from report import ANSWER, CITY, GREETED, GREETING, KEY, MODEL, PARIS, URL, check, get_weather, run

model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=URL, api_key=KEY))
settings = {"temperature": 0.0}
agent = Agent(model, tools=[get_weather], model_settings=settings)


class Weather(BaseModel):
    """Temperature in a city."""

    city: str


def chat():
    check(Agent(model, model_settings=settings).run_sync(GREETING).output, GREETED)


def stream():
    async def read():
        async with Agent(model, model_settings=settings).run_stream(GREETING) as result:
            return [part async for part in result.stream_text(delta=True)]

    check("".join(asyncio.run(read())), GREETED)


def tool_results():
    check(agent.run_sync(CITY).output, ANSWER)


def streamed_tools():
    async def read():
        async with agent.run_stream(CITY) as result:
            return await result.get_output()

    check(asyncio.run(read()), ANSWER)


def structured_output():
    output = ToolOutput(Weather, name="get_weather")
    check(Agent(model, output_type=output, model_settings=settings).run_sync(CITY).output, Weather(**PARIS))


run(chat, stream, tool_results, streamed_tools, structured_output)
