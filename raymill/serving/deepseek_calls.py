"""Makes vLLM's parsers of DeepSeek's tool calls linear. They run in the event loop, where all requests would wait.

vLLM's patterns take cubic time for an answer that repeats a marker: 3 s for 400 of them. Names have no `<` here.

Relies on the patterns that the constructors of DeepSeekV3ToolParser and DeepSeekV31ToolParser set (vLLM 0.29).
"""

import functools
from typing import Any

import regex

BEGIN, SEPARATOR, END = (f"<\uff5ctool\u2581{name}\uff5c>" for name in ("call\u2581begin", "sep", "call\u2581end"))
TYPE, NAME = r"(?P<type>[^<\n]*+)", r"(?P<function_name>[^<\n]*+)"
# up to the next marker, so that no part of an answer is read twice
ARGUMENTS = rf"(?P<function_arguments>(?:(?!{BEGIN}|{END}).)*+)"
V3 = {
    "tool_call_regex": rf"{BEGIN}{TYPE}{SEPARATOR}{NAME}\n```json\n(?P<function_arguments>[^\n]*+)\n```{END}",
    "stream_tool_call_portion_regex": rf"{TYPE}{SEPARATOR}{NAME}\n```json\n(?P<function_arguments>.*[^\n`])",
    "stream_tool_call_name_regex": rf"{TYPE}{SEPARATOR}{NAME}\n",
}
V31 = {
    "tool_call_regex": f"{BEGIN}{NAME}{SEPARATOR}{ARGUMENTS}{END}",
    "stream_tool_call_portion_regex": f"{NAME}{SEPARATOR}(?P<function_arguments>.*)",
    "stream_tool_call_name_regex": f"{NAME}{SEPARATOR}",
}


def install() -> None:
    """Replace the patterns of all parsers that are made from now on in this process."""
    from vllm.tool_parsers.deepseekv3_tool_parser import DeepSeekV3ToolParser
    from vllm.tool_parsers.deepseekv31_tool_parser import DeepSeekV31ToolParser

    for kind, patterns in ((DeepSeekV3ToolParser, V3), (DeepSeekV31ToolParser, V31)):
        _replace(kind, {name: regex.compile(pattern) for name, pattern in patterns.items()})


def _replace(kind: Any, patterns: dict[str, Any]) -> None:
    make = kind.__init__

    @functools.wraps(make)
    def make_linear(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        vars(self).update(patterns)

    kind.__init__ = make_linear
