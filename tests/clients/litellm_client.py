"""Uses the features of LiteLLM."""

import json

import litellm
from report import ANSWER, CITIES, CITY, GREETED, GREETING, KEY, MODEL, PARIS, RESULT, ROME, TOOLS, URL, check, run


def create(messages, **options):
    messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    options = {"model": f"openai/{MODEL}", "api_base": URL, "api_key": KEY, "temperature": 0} | options
    return litellm.completion(messages=messages, **options)


def calls(message):
    return [json.loads(call.function.arguments) for call in message.tool_calls or []]


def chat():
    check(create(GREETING).choices[0].message.content, GREETED)


def stream():
    check("".join(chunk.choices[0].delta.content or "" for chunk in create(GREETING, stream=True)), GREETED)


def tools():
    check(calls(create(CITY, tools=TOOLS).choices[0].message), [PARIS])


def streamed_tools():
    whole = litellm.stream_chunk_builder(list(create(CITY, tools=TOOLS, stream=True)))
    check(calls(whole.choices[0].message), [PARIS])


def parallel_tools():
    check(calls(create(CITIES, tools=TOOLS).choices[0].message), [PARIS, ROME])


def required_tool():
    message = create(GREETING, tools=TOOLS, tool_choice="required", parallel_tool_calls=False).choices[0].message
    check([set(each) for each in calls(message)], [{"city"}])


def tool_results():
    asking = create(CITY, tools=TOOLS).choices[0].message
    result = {"role": "tool", "tool_call_id": asking.tool_calls[0].id, "content": RESULT}
    messages = [{"role": "user", "content": CITY}, asking.model_dump(), result]
    check(create(messages, tools=TOOLS).choices[0].message.content, ANSWER)


run(chat, stream, tools, streamed_tools, parallel_tools, required_tool, tool_results)
