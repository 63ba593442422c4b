"""Uses the features of LlamaIndex."""

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
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
    URL,
    check,
    get_weather,
    run,
)

model = OpenAILike(
    model=MODEL,
    api_base=URL,
    api_key=KEY,
    is_chat_model=True,
    is_function_calling_model=True,
    temperature=0,
    max_retries=0,
    max_tokens=100,
)
tool = FunctionTool.from_defaults(get_weather)


def calls(response):
    return [call.tool_kwargs for call in model.get_tool_calls_from_response(response, error_on_no_tool_call=False)]


def chat():
    check(model.chat([ChatMessage(GREETING)]).message.content, GREETED)


def stream():
    check("".join(part.delta or "" for part in model.stream_chat([ChatMessage(GREETING)])), GREETED)


def tools():
    check(calls(model.chat_with_tools([tool], user_msg=CITY)), [PARIS])


def streamed_tools():
    check(calls(list(model.stream_chat_with_tools([tool], user_msg=CITY))[-1]), [PARIS])


def parallel_tools():
    check(calls(model.chat_with_tools([tool], user_msg=CITIES, allow_parallel_tool_calls=True)), [PARIS, ROME])


def required_tool():
    check(
        [set(each) for each in calls(model.chat_with_tools([tool], user_msg=GREETING, tool_required=True))], [{"city"}]
    )


def tool_results():
    asking = model.chat_with_tools([tool], user_msg=CITY)
    [call] = model.get_tool_calls_from_response(asking)
    result = ChatMessage(RESULT, role="tool", additional_kwargs={"tool_call_id": call.tool_id})
    answer = model.chat_with_tools([tool], chat_history=[ChatMessage(CITY), asking.message, result])
    check(answer.message.content, ANSWER)


run(chat, stream, tools, streamed_tools, parallel_tools, required_tool, tool_results)
