"""Inspects the nesting, size, text, media, schemas and prompts of a request's body before anything else parses it.

Each limit rejects requests that would kill an engine, or block all other requests for seconds.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from pydantic_core import from_json

from raymill.serving.errors import ApiError

# Maximum levels of lists and objects. At 300 levels, the engine's serializer overflows its stack and the engine dies.
MAX_DEPTH = 64
# Maximum characters of a schema, which every step of the request handles
MAX_SCHEMA = 64 * 1024
# Maximum characters of a regex, a grammar, a schema in a string, or all bad_words. Other requests wait while vLLM
# tokenizes bad_words.
MAX_TEXT = 16 * 1024
# Maximum entries of lists at the top of a body. vLLM compares each stop string with the answer at each token.
MAX_ENTRIES = {
    "messages": 4096,
    "input": 4096,
    "tools": 512,
    "stop": 64,
    "stop_sequences": 64,
    "stop_token_ids": 1024,
    "bad_words": 1024,
}
MAX_FIELDS = 1024  # maximum fields of the body, and of each object of the conversation and at the top of the body
# Maximum lists and objects of a conversation. Other requests wait while pydantic validates them.
MAX_PARTS = 32_768
CONVERSATION_FIELDS = ("messages", "input", "system")
# vLLM would fetch media from any address, decode images of any size, and take a `uuid` for the key of its cache, where
# it finds the images of other clients. It also reads parts without a type.
MEDIA_FIELDS = frozenset(
    f"{kind}{suffix}" for kind in ("image", "video", "audio", "file") for suffix in ("", "_url", "_embeds", "_data")
) | {"image_pil", "input_image", "input_audio", "input_file", "prompt_embeds", "source", "uuid"}
MEDIA_TYPES = MEDIA_FIELDS | {"input_video", "document", "computer_screenshot", "image_generation_call"}
MEDIA_OPTIONS = ("mm_processor_kwargs", "media_io_kwargs", "multi_modal_data", "multi_modal_uuids")
DATA_FIELDS = frozenset({"arguments", "input", "function"})  # of a tool call; any JSON, which no API reads as parts
HUGE = 10**9  # replaces all larger numbers, so that they can be multiplied and printed
MAX_INTEGER = 2**63 - 1  # the engine's serializer fails at larger numbers, when a stream has already started
# null means the default to OpenAI, but is an error to vLLM
NULLABLE = ("background", "service_tier", "tool_choice", "tools", "truncation")
INTERNAL_FIELDS = frozenset({"kv_transfer_params", "ec_transfer_params"})  # vLLM servers send these to each other
SCHEMA_FIELDS = ("response_format", "tools", "text", "output_config")  # of the APIs of OpenAI and Anthropic
STORED_FIELDS = ("previous_response_id", "conversation")  # refer to earlier turns, which the server does not store
NOT_AN_OBJECT = "the body must be a JSON object"
MAX_PATH_SHOWN = 200  # maximum characters of a path in an error message


class InvalidBody(ApiError):
    """The body is rejected."""

    def __init__(self, message: str, param: str | None = None, code: str | None = "invalid_json") -> None:
        super().__init__(400, message, param=param, code=code)


class Body(NamedTuple):
    """A body that passed the inspection."""

    raw: bytes
    """The body as received, without fields that only another vLLM server may send, and without some that mean nothing:
    nulls, `tools` without a tool, and encrypted reasoning."""
    model: str | None
    """Name of the requested model. None if the body has no valid name; `ApiMiddleware` then inserts the app's own."""
    sequences: int
    """Sequences that the engine generates: prompts times answers per prompt."""


def inspect(raw: bytes) -> Body:
    """Parse and check the body of a request.

    Raises:
        InvalidBody: the body is not a JSON object, is nested too deeply, or contains a lone surrogate, too many
            messages, parts, tools or other entries, images or other media, a schema or `bad_words` that are too large,
            a reference to a stored conversation, beam search, a number that is too large, or an `n` that is not an
            integer.
    """
    body = _parse(raw)
    if not isinstance(body, dict):
        raise InvalidBody(NOT_AN_OBJECT)
    _check_entries(body)
    _check_parts(body)
    _check_media(body)
    for param, text in _arguments(body):
        _parse_inner(param, text)
    _check_schemas(body)
    _check_bad_words(body.get("bad_words"))
    _check_stored(body)
    _check_beam_search(body)
    _check_integers(body)
    removed = [name for name in NULLABLE if body.get(name, "") is None]
    removed += INTERNAL_FIELDS & body.keys()
    removed += _absent_tools(body)
    changed = _without_encrypted_reasoning(body)
    if removed or changed:
        kept = {name: value for name, value in body.items() if name not in removed}
        raw = json.dumps(kept | changed).encode()
    model = body.get("model")
    return Body(raw, model if isinstance(model, str) else None, _sequences(body))


def _parse(raw: bytes | str) -> Any:
    try:
        value = from_json(raw, allow_inf_nan=False)  # refuses more than 200 levels of nesting
    except ValueError as error:
        raise _unreadable(raw, str(error)) from None
    brackets = (b"[", b"{") if isinstance(raw, bytes) else ("[", "{")
    if sum(map(raw.count, brackets)) > MAX_DEPTH and _is_deep(value):
        raise _too_deep()
    return value


def _unreadable(raw: bytes | str, reason: str) -> InvalidBody:
    if "recursion limit" in reason:
        return _too_deep()
    try:  # json accepts lone surrogates, so its result shows where they are
        param = next(_surrogates(json.loads(raw)), None)
    except RecursionError:
        return _too_deep()
    except ValueError:
        param = None
    if param is None:
        return InvalidBody(f"{NOT_AN_OBJECT}: {reason}")
    message = f"{param} contains half of a surrogate pair, which is not a character; send both halves"
    return InvalidBody(message, param, "invalid_unicode")


def _too_deep() -> InvalidBody:
    message = f"the body is nested deeper than {MAX_DEPTH} levels; send flatter lists and objects"
    return InvalidBody(message, code="nested_too_deep")


def _is_deep(value: Any) -> bool:
    """Return whether lists and objects are nested deeper than MAX_DEPTH. No recursion, so any depth is safe."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _values(outer) if type(inner) in (dict, list)]
        if not level:
            return False
    return True


def _values(outer: Any) -> Iterable[Any]:
    return outer.values() if isinstance(outer, dict) else outer


def _items(outer: Any) -> Iterable[tuple[Any, Any]]:
    return outer.items() if isinstance(outer, dict) else enumerate(outer)


def _surrogates(body: Any) -> Iterator[str]:
    """Yield the path of each string that contains a lone surrogate; for a key, the path of its object."""
    waiting: list[tuple[Any, Any]] = [(None, body if isinstance(body, dict | list) else [body])]
    while waiting:
        path, value = waiting.pop()
        for name, inner in _items(value):
            if isinstance(name, str) and not _is_text(name):
                yield _dotted(path) or "a field's name"
            elif isinstance(inner, dict | list):
                waiting.append(((path, name), inner))
            elif isinstance(inner, str) and not _is_text(inner):
                yield _dotted((path, name))


def _dotted(path: Any) -> str:
    """Format a path for an error message. A path is a nested pair: (path of the parent, name).

    Names can be megabytes long, so only their beginning is shown.
    """
    names: list[str] = []
    while path:
        path, name = path
        names.append(str(name)[:MAX_PATH_SHOWN])
    return ".".join(reversed(names))[:MAX_PATH_SHOWN]


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_entries(body: dict[str, Any]) -> None:
    """Limit the number of fields, messages, tools, stop strings and similar entries."""
    _check_count("the body", len(body), MAX_FIELDS, "fields", None)
    for name, value in body.items():
        if type(value) is dict and name not in SCHEMA_FIELDS:
            _check_count(name, len(value), MAX_FIELDS, "fields", name)
        elif type(value) is list and name in MAX_ENTRIES:
            if name == "input" and value and type(value[0]) is int:
                continue  # the token ids of a prompt for embeddings
            _check_count(name, len(value), MAX_ENTRIES[name], "entries", name)


def _check_parts(body: dict[str, Any]) -> None:
    """Limit the number of lists and objects of a conversation, and the fields of each object."""
    for name in CONVERSATION_FIELDS:
        waiting, count = [body.get(name)], 0
        while waiting:
            part = waiting.pop()
            if type(part) is dict:
                _check_count(f"an object in {name}", len(part), MAX_FIELDS, "fields", name)
                part = part.values()
            elif type(part) is not list:
                continue
            inner = [each for each in part if type(each) in (dict, list)]
            count += len(inner)
            waiting += inner
        _check_count(name, count, MAX_PARTS, "lists and objects", name)


def _check_media(body: dict[str, Any]) -> None:
    """Reject images, audio, video and files, wherever a conversation has them."""
    for name in MEDIA_OPTIONS:
        if body.get(name) is not None:
            raise _media(name, name)
    for name in CONVERSATION_FIELDS:
        waiting = [body.get(name)]
        while waiting:
            part = waiting.pop()
            if type(part) is dict:
                kind = part.get("type")
                if isinstance(kind, str) and kind in MEDIA_TYPES:
                    raise _media(kind, name)
                for field in MEDIA_FIELDS & part.keys():
                    if part[field] is not None:
                        raise _media(field, name)
                waiting += [inner for field, inner in part.items() if field not in DATA_FIELDS]
            elif type(part) is list:
                waiting += [inner for inner in part if type(inner) in (dict, list)]


def _media(kind: str, param: str) -> InvalidBody:
    message = f"{kind} is not supported, because the server reads only text; send parts of type text"
    return InvalidBody(message, param, "media_not_supported")


def _check_count(place: str, count: int, limit: int, unit: str, param: str | None) -> None:
    if count > limit:
        message = f"{place[:MAX_PATH_SHOWN]} has {count:,} {unit}, more than {limit:,}; send fewer"
        raise InvalidBody(message, param and param[:MAX_PATH_SHOWN], "too_many")


def _arguments(body: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the path and the text of each earlier tool call's arguments, which vLLM parses as JSON."""
    for position, message in _objects(body.get("messages")):
        for number, call in _objects(message.get("tool_calls")):
            function = call.get("function")
            if isinstance(function, dict) and isinstance(function.get("arguments"), str):
                yield f"messages.{position}.tool_calls.{number}.function.arguments", function["arguments"]
    for position, item in _objects(body.get("input")):
        if isinstance(item.get("arguments"), str):
            yield f"input.{position}.arguments", item["arguments"]


def _objects(value: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    if isinstance(value, list):
        yield from ((number, each) for number, each in enumerate(value) if isinstance(each, dict))


def _parse_inner(param: str, text: str) -> Any:
    """Return the value of a JSON text, or None if `text` is not JSON."""
    try:
        return _parse(text)
    except InvalidBody as error:
        if error.code == "invalid_json":
            return None
        raise InvalidBody(f"in the JSON of {param}: {error.message}", param, error.code) from None


def _check_schemas(body: dict[str, Any]) -> None:
    """Check the size of each schema, grammar and regular expression that the answer must match."""
    for param, schema in _schemas(body):
        is_text = isinstance(schema, str)
        size = len(schema if is_text else json.dumps(schema, ensure_ascii=False))
        if size > (limit := MAX_TEXT if is_text else MAX_SCHEMA):
            message = f"{param} has {size:,} characters, more than {limit:,}; send a smaller schema"
            raise InvalidBody(message, param, "schema_too_large")
        if is_text:
            _parse_inner(param, schema)


def _schemas(body: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield each schema, grammar and regular expression with its path."""
    outputs = body.get("structured_outputs")
    if isinstance(outputs, dict):
        for name, value in outputs.items():
            yield f"structured_outputs.{name}", value
    for name in SCHEMA_FIELDS:
        if name in body:
            yield name, body[name]


def _check_bad_words(words: Any) -> None:
    size = sum(len(word) for word in words if isinstance(word, str)) if isinstance(words, list) else 0
    if size > MAX_TEXT:
        message = f"bad_words has {size:,} characters, more than {MAX_TEXT:,}; send fewer words"
        raise InvalidBody(message, "bad_words", "too_large")


def _check_stored(body: dict[str, Any]) -> None:
    """Reject references to stored conversations. vLLM ignores `conversation`, and would answer without its turns."""
    for name in STORED_FIELDS:
        if body.get(name) is not None:
            message = f"{name} is not supported, because the server stores no conversations; send all turns in input"
            raise InvalidBody(message, name, "not_supported")


def _check_beam_search(body: dict[str, Any]) -> None:
    """Reject beam search. vLLM sends the whole prompt to the engine again for each token and beam."""
    if body.get("use_beam_search"):
        message = "use_beam_search is not supported; leave it out, and use n for several answers"
        raise InvalidBody(message, "use_beam_search", "not_supported")


def _absent_tools(body: dict[str, Any]) -> list[str]:
    """Return the fields that say that there are no tools. Clients send them, but vLLM refuses them."""
    if body.get("tools") != []:
        return []
    choice = body.get("tool_choice")
    kind = choice.get("type") if isinstance(choice, dict) else choice
    return ["tools", "tool_choice"] if kind in (None, "auto", "none") else ["tools"]


def _without_encrypted_reasoning(body: dict[str, Any]) -> dict[str, Any]:
    """Return `input` without encrypted reasoning, which only its author can read, or nothing if it has none.

    Clients that ask for `reasoning.encrypted_content` send it back, also from another server.
    """
    items = body.get("input")
    if not isinstance(items, list) or not any("encrypted_content" in item for _, item in _objects(items)):
        return {}
    kept = []
    for item in items:
        if isinstance(item, dict) and item.get("type") == "reasoning":
            item = {name: value for name, value in item.items() if name != "encrypted_content"}
            if not (item.get("content") or item.get("summary")):
                continue
        kept.append(item)
    return {"input": kept}


def _check_integers(body: dict[str, Any]) -> None:
    for name, value in body.items():
        if type(value) is int and abs(value) > MAX_INTEGER and name != "n":  # _sequences counts a huge n
            raise InvalidBody(f"{name[:MAX_PATH_SHOWN]} is too large a number", name[:MAX_PATH_SHOWN], "invalid_value")


def _sequences(body: dict[str, Any]) -> int:
    """Return the number of prompts times the number of answers per prompt."""
    answers = body.get("n")
    if answers is None:
        answers = 1
    if type(answers) is not int:  # stricter than vLLM, which reads "8" and 8.0 as 8
        raise InvalidBody("n must be an integer", "n", "invalid_type")
    return _prompts(body) * min(max(answers, 1), HUGE)


def _prompts(body: dict[str, Any]) -> int:
    """Return the number of prompts: in `prompt` or `prompt_embeds`, or for embeddings in `input` or `messages`."""
    return max(_length(body.get(name)) for name in ("prompt", "prompt_embeds", "input", "messages"))


def _length(value: Any) -> int:
    """Return the number of prompts in a value: a string, token ids, a conversation, or a list of these."""
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        return len(value)
    return 1
