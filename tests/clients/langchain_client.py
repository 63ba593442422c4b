"""Uses the features of LangChain."""

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from report import ANSWER, CITIES, CITY, GREETED, GREETING, KEY, MODEL, PARIS, RESULT, ROME, URL, check, run
from report import get_weather as tool

model = ChatOpenAI(model=MODEL, base_url=URL, api_key=KEY, temperature=0, max_retries=0)
with_tools = model.bind_tools([tool])


class get_weather(BaseModel):
    """Temperature in a city."""

    city: str


def calls(message):
    return [call["args"] for call in message.tool_calls]


def chat():
    check(model.invoke(GREETING).content, GREETED)


def stream():
    check("".join(chunk.content for chunk in model.stream(GREETING)), GREETED)


def tools():
    check(calls(with_tools.invoke(CITY)), [PARIS])


def streamed_tools():
    whole = None
    for chunk in with_tools.stream(CITY):
        whole = chunk if whole is None else whole + chunk
    check(calls(whole), [PARIS])


def parallel_tools():
    check(calls(with_tools.invoke(CITIES)), [PARIS, ROME])


def required_tool():
    required = model.bind_tools([tool], tool_choice="required", parallel_tool_calls=False)
    check([set(each) for each in calls(required.invoke(GREETING))], [{"city"}])


def tool_results():
    asking = with_tools.invoke(CITY)
    result = ToolMessage(RESULT, tool_call_id=asking.tool_calls[0]["id"])
    check(with_tools.invoke([HumanMessage(CITY), asking, result]).content, ANSWER)


def structured_output():
    structured = model.with_structured_output(get_weather, method="function_calling")
    check(structured.invoke(CITY), get_weather(**PARIS))


run(chat, stream, tools, streamed_tools, parallel_tools, required_tool, tool_results, structured_output)
