"""Uses the features of OpenAI's client."""

import json

import openai
from report import (
    ANSWER,
    CITIES,
    CITY,
    GREETED,
    GREETING,
    KEY,
    MODEL,
    PARIS,
    RESULT,
    ROME,
    TOOL,
    TOOLS,
    URL,
    check,
    run,
)

client = openai.OpenAI(base_url=URL, api_key=KEY, max_retries=0)
user = {"role": "user", "content": CITY}


def create(text, **options):
    messages = [{"role": "user", "content": text}]
    return client.chat.completions.create(model=MODEL, messages=messages, temperature=0, **options)


def calls(message):
    return [json.loads(call.function.arguments) for call in message.tool_calls or []]


def chat():
    check(create(GREETING).choices[0].message.content, GREETED)


def stream():
    check("".join(chunk.choices[0].delta.content or "" for chunk in create(GREETING, stream=True)), GREETED)


def tools():
    check(calls(create(CITY, tools=TOOLS).choices[0].message), [PARIS])


def streamed_tools():
    with client.chat.completions.stream(
        model=MODEL, messages=[user], temperature=0, tools=[{**TOOLS[0], "function": TOOL}]
    ) as events:
        check(calls(events.get_final_completion().choices[0].message), [PARIS])


def parallel_tools():
    check(calls(create(CITIES, tools=TOOLS).choices[0].message), [PARIS, ROME])


def required_tool():
    message = create(GREETING, tools=TOOLS, tool_choice="required", parallel_tool_calls=False).choices[0].message
    check([set(each) for each in calls(message)], [{"city"}])


def tool_results():
    asking = create(CITY, tools=TOOLS).choices[0].message
    messages = [user, asking, {"role": "tool", "tool_call_id": asking.tool_calls[0].id, "content": RESULT}]
    answer = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS, temperature=0)
    check(answer.choices[0].message.content, ANSWER)


def responses():
    tool = {"type": "function", "name": TOOL["name"], "parameters": TOOL["parameters"], "strict": False}
    answer = client.responses.create(model=MODEL, input=CITY, tools=[tool], temperature=0)
    check([json.loads(each.arguments) for each in answer.output if each.type == "function_call"], [PARIS])


run(chat, stream, tools, streamed_tools, parallel_tools, required_tool, tool_results, responses)
