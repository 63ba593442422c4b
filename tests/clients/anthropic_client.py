"""Uses the features of Anthropic's client."""

import anthropic
from report import ANSWER, CITIES, CITY, GREETED, GREETING, KEY, MODEL, PARIS, RESULT, ROME, ROOT, SCHEMA, check, run

client = anthropic.Anthropic(base_url=ROOT, api_key=KEY, max_retries=0)
TOOLS = [{"name": "get_weather", "description": "Temperature in a city.", "input_schema": SCHEMA}]


def create(messages, **options):
    messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    return client.messages.create(model=MODEL, messages=messages, max_tokens=100, **options)


def texts(message):
    return [block.text for block in message.content if block.type == "text"]


def calls(message):
    return [block.input for block in message.content if block.type == "tool_use"]


def chat():
    check(texts(create(GREETING)), [GREETED])


def stream():
    asked = [{"role": "user", "content": GREETING}]
    with client.messages.stream(model=MODEL, messages=asked, max_tokens=100) as events:
        check("".join(events.text_stream), GREETED)


def tools():
    check(calls(create(CITY, tools=TOOLS)), [PARIS])


def streamed_tools():
    asked = [{"role": "user", "content": CITY}]
    with client.messages.stream(model=MODEL, messages=asked, max_tokens=100, tools=TOOLS) as events:
        check(calls(events.get_final_message()), [PARIS])


def parallel_tools():
    check(calls(create(CITIES, tools=TOOLS)), [PARIS, ROME])


def required_tool():
    choice = {"type": "any", "disable_parallel_tool_use": True}
    check([set(each) for each in calls(create(GREETING, tools=TOOLS, tool_choice=choice))], [{"city"}])


def tool_results():
    asking = create(CITY, tools=TOOLS)
    [call] = [block for block in asking.content if block.type == "tool_use"]
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": RESULT}]}
    messages = [{"role": "user", "content": CITY}, {"role": "assistant", "content": asking.content}, result]
    check(texts(create(messages, tools=TOOLS)), [ANSWER])


run(chat, stream, tools, streamed_tools, parallel_tools, required_tool, tool_results)
