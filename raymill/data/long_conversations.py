"""Leave out the end of conversations that are much longer than a document.

A template renders every assistant turn with all messages before it, so the work grows with the square of the turns.
"""

from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING

from raymill.data.examples import Conversation
from raymill.data.template_renderer import TemplateFailure, TemplateRenderer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CHARACTERS_PER_TOKEN = 8  # more than in nearly all texts; the tokens are counted before anything is left out
MARGIN = 64  # tokens; the last tokens of a text may differ from those of a longer text


def shorten(
    conversation: Conversation, length: int, trained: set[int], renderer: TemplateRenderer, tokenizer: "Tokenizer"
) -> Conversation:
    """Return the conversation without trailing turns that are certain to begin after `length` tokens.

    One such turn stays, so the conversation is still too long, and has the same first `length` tokens. `trained` are
    the positions of the trained turns.
    """
    messages, tools = conversation
    enough = CHARACTERS_PER_TOKEN * (length + MARGIN)
    characters = list(accumulate(len(message["content"]) for message in messages))
    if not trained or characters[-1] < 2 * enough:
        return conversation
    first = min((turn for turn in trained if turn > bisect_left(characters, enough)), default=len(messages))
    last = max(trained)
    if first >= last:
        return conversation
    try:
        before_first, before_last = (renderer.prompt(Conversation(messages[:turn], tools)) for turn in (first, last))
    except TemplateFailure:
        return conversation  # rendering the conversation gives the reason
    start = before_first[:enough]
    if not before_last.startswith(start):  # a template may render a turn differently once a later turn follows
        return conversation
    if len(tokenizer.encode(start, add_special_tokens=False)) < length + MARGIN:
        return conversation
    return conversation._replace(messages=messages[: first + 1])
