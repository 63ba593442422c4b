"""Test which parsers of vLLM are chosen for the chat templates of published models."""

import pytest
import tool_model
from families import FAMILIES, Family, template_of

from raymill.serving import parsers, vllm_arguments

TOKENS = {token for each in parsers.REASONING for token in each.tokens}
CHOSEN = {
    "Qwen 2.5": ("hermes", ""),
    "Qwen 3": ("hermes", "qwen3"),
    "Qwen 3 Thinking": ("hermes", "deepseek_r1"),
    "Qwen 3.5": ("qwen3_coder", "qwen3"),
    "Llama 3": ("", ""),
    "Llama 3.1, 3.3": ("llama3_json", ""),
    "Llama 3.2": ("llama3_json", ""),
    "Mistral 7B v0.3": ("xlam", ""),
    "Mistral Nemo": ("xlam", ""),
    "Mistral Small 3": ("", ""),
    "Ministral 3": ("mistral", ""),
    "Gemma 2": ("", ""),
    "Gemma 3": ("", ""),
    "Gemma 4": ("gemma4", "gemma4"),
    "Phi 3.5": ("", ""),
    "Phi 4": ("", ""),
    "Phi 4 mini": ("", ""),
    "gpt-oss": ("openai", "openai_gptoss"),
    "DeepSeek V3": ("deepseek_v3", ""),
    "DeepSeek V3.1": ("deepseek_v31", "deepseek_v3"),
    "DeepSeek R1": ("deepseek_v3", "deepseek_r1"),
    "DeepSeek R1 Distill": ("deepseek_v3", "deepseek_r1"),
    "GLM 4": ("", ""),
    "GLM 4.5, 4.6": ("glm45", "glm45"),
    "GLM 4.7": ("glm45", "glm45"),
    "LFM2": ("lfm2", ""),
    "SmolLM2": ("", ""),
    "SmolLM3": ("hermes", "qwen3"),
    "OLMo 2": ("", ""),
    "OLMo 3": ("olmo3", ""),
    "OLMo 3 Think": ("olmo3", "olmo3"),
    "Granite 3.3": ("granite", ""),
    "Granite 4": ("granite4", ""),
    "Kimi K2": ("kimi_k2", ""),
    "MiniMax M2": ("minimax_m2", "minimax_m2"),
}
"""Parsers for tool calls and for reasoning. "": the template has none, or one that no parser reads."""


@pytest.mark.parametrize(("name", "family"), FAMILIES.items())
def test_the_parsers_fit_the_template(name: str, family: Family) -> None:
    template = template_of(family)
    assert (parsers.tool_parser(template), parsers.reasoning_parser(template, TOKENS)) == CHOSEN[name]


def test_the_parsers_fit_the_template_of_the_tests() -> None:
    assert parsers.tool_parser(tool_model.TEMPLATE) == "hermes"
    assert parsers.reasoning_parser(tool_model.TEMPLATE, TOKENS) == "qwen3"


def test_a_tokenizer_without_the_tokens_gets_no_reasoning_parser() -> None:
    """The engine would not start with such a parser."""
    assert parsers.reasoning_parser(template_of(FAMILIES["Qwen 3 Thinking"]), ()) == ""


def test_vllm_has_all_parsers_of_the_tables() -> None:
    stored = vllm_arguments.stored()
    assert {each.parser for each in parsers.TOOL_CALLS} - {""} <= set(stored.tool_parsers)
    assert {each.parser for each in parsers.REASONING} - {""} <= set(stored.reasoning_parsers)
