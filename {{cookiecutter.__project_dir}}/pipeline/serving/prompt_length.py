"""Limits the characters of a prompt before vLLM tokenizes it."""

from typing import Any

from vllm.renderers.params import TokenizeParams

_check = TokenizeParams._text_len_check


def install() -> None:
    """Cut a prompt before tokenizing if its request truncates it (`truncate_prompt_tokens`, `truncation` of Responses).

    vLLM refuses a prompt with more characters than the model's tokens can have, but not if the request asks to truncate
    it on the tokenizer's own side. Other requests wait for the tokenizer: 15 s for a word of 3.9 MB.

    Relies on `_text_len_check` of vllm.renderers.params.TokenizeParams, through which each text passes (vLLM 0.29).
    """
    TokenizeParams._text_len_check = _limited  # type: ignore[method-assign]


def _limited(params: TokenizeParams, tokenizer: Any, text: str) -> str:
    text = _check(params, tokenizer, text)
    if params.max_input_tokens is None or tokenizer is None:
        return text
    characters = params.max_input_tokens * tokenizer.max_chars_per_token
    if len(text) <= characters:
        return text
    return text[-characters:] if tokenizer.truncation_side == "left" else text[:characters]
