"""Chooses the vLLM parsers that find tool calls and reasoning in a model's answers."""

from collections.abc import Container
from typing import NamedTuple

from raymill.data.template_probes import TOOL
from raymill.ray_support import model_cache
from raymill.serving.options import AUTO, ServeOptions


class Syntax(NamedTuple):
    """A way to write tool calls or reasoning."""

    parser: str
    """vLLM's name of the parser that reads it."""
    markers: tuple[str, ...]
    """Strings that all chat templates with this syntax contain."""
    tokens: tuple[str, ...] = ()
    """Tokens without which the parser, and so the engine, does not start."""


NONE = Syntax("", ())
DEEPSEEK_CALLS = "<\uff5ctool\u2581calls\u2581begin\uff5c>"
THINK = ("<think>", "</think>")
# The first match counts, so special cases come first. llama.cpp detects formats in the same way (common/chat.cpp).
TOOL_CALLS = (
    Syntax("openai", ("<|channel|>", "<|call|>")),
    Syntax("gemma4", ("<|tool_call>",)),
    Syntax("functiongemma", ("<start_function_call>",)),
    Syntax("deepseek_v3", (DEEPSEEK_CALLS, "```json")),
    Syntax("deepseek_v31", (DEEPSEEK_CALLS,)),
    Syntax("kimi_k2", ("<|tool_calls_section_begin|>",)),
    Syntax("minimax_m2", ("<minimax:tool_call>",)),
    Syntax("seed_oss", ("<seed:tool_call>",)),
    Syntax("longcat", ("<longcat_tool_call>",)),
    Syntax("apertus", ("<|tools_prefix|>",)),
    Syntax("qwen3_coder", ("<tool_call>", "<function=")),
    Syntax("glm45", ("<tool_call>", "<arg_key>")),
    Syntax("olmo3", ("<function_calls>",)),
    Syntax("lfm2", ("<|tool_list_start|>",)),
    Syntax("", ("[TOOL_CALLS]", "[CALL_ID]")),  # Mistral Small 3.2; the parser takes the id for a part of the name
    Syntax("mistral", ("[TOOL_CALLS]", "[ARGS]")),
    Syntax("xlam", ("[TOOL_CALLS]",)),  # Mistral's models before 2025 write a list of calls as JSON
    Syntax("granite", ("<|start_of_role|>", "<|tool_call|>")),
    Syntax("granite4", ("<|start_of_role|>", "<tool_call>")),
    Syntax("hermes", ("<tool_call>", '"arguments')),
    Syntax("llama4_json", ("<|header_start|>", '"parameters"')),
    Syntax("llama3_json", ("<|start_header_id|>", '"parameters"')),
)
REASONING = (
    Syntax("openai_gptoss", ("<|channel|>", "analysis")),
    Syntax("gemma4", ("<|channel>thought",)),
    Syntax("mistral", ("[THINK]",), ("[THINK]", "[/THINK]")),
    Syntax("seed_oss", ("<seed:think>",)),
    Syntax("minimax_m2", ("<think>", "<minimax:tool_call>"), THINK),
    Syntax("kimi_k2", ("<think>", "<|tool_calls_section_begin|>"), THINK),
    Syntax("glm45", ("<think>", "<arg_key>"), THINK),
    Syntax("deepseek_v3", ("<think>", DEEPSEEK_CALLS, "not thinking"), THINK),
    Syntax("nemotron_v3", ("<think>", "truncate_history_thinking"), THINK),
    Syntax("olmo3", ("<think>", "<function_calls>"), ("\u0120</", "</", "think", ">")),  # U+0120 stands for a space
    Syntax("", ("<think>", "<response>")),  # Granite 3.3 thinks only if a request asks for it
    Syntax("qwen3", ("<think>", "enable_thinking"), THINK),
    Syntax("deepseek_r1", ("<think>",), THINK),
)


def resolve(options: ServeOptions) -> ServeOptions:
    """Replace `auto` by the parsers for the model's chat template, and print which ones these are."""
    if AUTO not in (options.tool_parser, options.reasoning_parser):
        return options
    template, vocabulary = _read(options)
    found = {"tool_parser": tool_parser(template), "reasoning_parser": reasoning_parser(template, vocabulary)}
    chosen = {name: parser for name, parser in found.items() if getattr(options, name) == AUTO}
    shown = ", ".join(f'{name} = "{parser}"' for name, parser in chosen.items())
    print(f"serve_llm: {shown}, because of the model's chat template", flush=True)
    return options.model_copy(update=chosen)


def tool_parser(template: str) -> str:
    """Return the parser for the tool calls of a chat template, or "" if there is none."""
    return _first(TOOL_CALLS, template).parser


def reasoning_parser(template: str, vocabulary: Container[str]) -> str:
    """Return the parser for the reasoning of a chat template, or "" if there is none, or if it lacks its tokens."""
    found = _first(REASONING, template)
    return found.parser if all(token in vocabulary for token in found.tokens) else ""


def _first(table: tuple[Syntax, ...], template: str) -> Syntax:
    return next((each for each in table if all(marker in template for marker in each.markers)), NONE)


def _read(options: ServeOptions) -> tuple[str, Container[str]]:
    """Return the chat template that renders tools, and the vocabulary. Both are empty if the model has none."""
    from transformers import AutoTokenizer  # imported late, because it takes seconds

    try:
        folder = model_cache.on_this_node(options.source, weights=False)
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=options.trust_remote_code)
        return tokenizer.get_chat_template(tools=[TOOL]), tokenizer.get_vocab()
    except (OSError, ValueError, LookupError, ImportError):  # vLLM reports a model that it cannot load itself
        return "", ()
