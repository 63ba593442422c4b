"""Limits how long the tokenizer works on a prompt, and how long other prompts wait for it."""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from vllm.renderers import base
from vllm.renderers.params import TokenizeParams

from raymill.serving.accounting import current

LONG_BODY = 32 * 1024
"""Bodies with more bytes are long. Their prompts are tokenized in a thread of their own."""
PIECE = 64 * 1024
"""Characters that are tokenized at once to find out how many tokens a text has: 20 ms."""
LIKELY_CHARACTERS = 4
"""Characters per token of usual texts."""
MAX_CUT_TOKENS = 16
"""Tokens that a piece can have more than its part of the whole text has."""

_check = TokenizeParams._text_len_check
_tokenize = base.BaseRenderer._tokenize_prompt


def install() -> None:
    """Bound the work of vLLM's tokenizer. A word of 3.9 MB takes up to 9 s, and other requests would wait for it.

    - Prompts are cut before tokenizing if their requests truncate them (`truncate_prompt_tokens`, `truncation` of
      Responses). vLLM refuses a prompt with more characters than the model's tokens can have, but not if the request
      asks to truncate it on the tokenizer's own side.
    - Prompts with far more tokens than the model can read are cut to somewhat more than these, so that vLLM refuses or
      truncates them soon. vLLM's limit of characters supposes the longest token of the vocabulary, often 128 spaces.
    - Long prompts are tokenized in one thread, and short ones in another.

    Relies on `_text_len_check` of vllm.renderers.params.TokenizeParams, through which each text passes, and on
    `_tokenize_prompt` and `ThreadPoolExecutor` of vllm.renderers.base (vLLM 0.29). Each executor does the work of a
    renderer, and its `submit` runs in the task of the request.
    """
    TokenizeParams._text_len_check = _limited  # type: ignore[method-assign]
    base.BaseRenderer._tokenize_prompt = _tokenize_bounded  # type: ignore[method-assign]
    base.ThreadPoolExecutor = PromptThreads  # type: ignore[misc,attr-defined]


def _limited(params: TokenizeParams, tokenizer: Any, text: str) -> str:
    text = _check(params, tokenizer, text)
    if params.max_input_tokens is None or tokenizer is None:
        return text
    characters = params.max_input_tokens * tokenizer.max_chars_per_token
    if len(text) <= characters:
        return text
    return text[-characters:] if tokenizer.truncation_side == "left" else text[:characters]


def _tokenize_bounded(renderer: Any, prompt: Any, params: TokenizeParams) -> Any:
    limit, kept = params.max_input_tokens, params.truncate_prompt_tokens
    if kept is not None and kept >= 0:  # -1: as many as the model can read
        limit = kept
    if limit is not None and len(prompt["prompt"]) > max(PIECE, limit * LIKELY_CHARACTERS):
        tokenizer = renderer.get_tokenizer()
        from_end = kept is not None and (params.truncation_side or tokenizer.truncation_side) == "left"
        prompt = {**prompt, "prompt": _enough(tokenizer, prompt["prompt"], limit, from_end=from_end)}
    return _tokenize(renderer, prompt, params)


def _enough(tokenizer: Any, text: str, tokens: int, *, from_end: bool) -> str:
    """Return the beginning or the end of a text, with more than `tokens` tokens, or the text if it has fewer."""
    used = 0
    while used < len(text) and tokens >= 0:
        start = len(text) - used - PIECE if from_end else used
        piece = text[max(start, 0) : start + PIECE]
        tokens -= len(tokenizer(piece, add_special_tokens=False)["input_ids"]) - MAX_CUT_TOKENS
        used += PIECE
    return text[-used:] if from_end else text[:used]


class PromptThreads(ThreadPoolExecutor):
    """An executor with an additional thread, in which it runs the work for long requests."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._long = ThreadPoolExecutor(1)

    def submit(self, work: Any, /, *args: Any, **options: Any) -> Future[Any]:
        """Run work for the request of the calling task."""
        record = current.get()
        if record and record.body_bytes > LONG_BODY:
            return self._long.submit(work, *args, **options)
        return super().submit(work, *args, **options)

    def shutdown(self, *args: Any, **options: Any) -> None:
        """Shut all threads down."""
        self._long.shutdown(*args, **options)
        super().shutdown(*args, **options)
