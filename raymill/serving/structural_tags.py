"""Translates structural tags into Lark grammars for llguidance.

vLLM writes the calls of strict or required tools as structural tags, which only xgrammar reads. A step of xgrammar has
no time limit, so one schema could stop the engine.

Relies on the formats of xgrammar.structural_tag (xgrammar 0.2.8) that vLLM's parsers of tool calls use.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from raymill.serving import json_schemas

START = "%llguidance {}\nstart: "
ANY = "(?s:.*)"
WORD = "/[a-zA-Z_][a-zA-Z0-9_]*/"
SPACE = r"[ \n\r\t]"
NOT_AT_THE_TOP = {"$ref", "anyOf", "oneOf", "allOf", "patternProperties", "minProperties", "maxProperties"}
LARK_ESCAPES = {"\n": r"\n", "/": r"\/"}


class XmlStyle(NamedTuple):
    """How a family of models writes a parameter of a call."""

    begin: str
    """Text before the parameter's name."""
    middle: str
    """Text between name and value."""
    end: str
    """Text after the value. A string cannot contain it."""


XML_STYLES = {
    "qwen_xml": XmlStyle("<parameter=", ">", "</parameter>"),
    "minimax_xml": XmlStyle('<parameter name="', '">', "</parameter>"),
    "glm_xml": XmlStyle("<arg_key>", "</arg_key><arg_value>", "</arg_value>"),
}


def to_grammar(tag: str, special: Mapping[str, int]) -> str:
    """Return the grammar of a structural tag.

    Args:
        tag: the tag as JSON, in today's form or with `structures`.
        special: number of each special token. Texts may contain such tokens only where the tag names them.

    Raises:
        ValueError: the tag is invalid, or contains a format that cannot be translated. The message names it.
    """
    parsed = json.loads(tag)
    try:
        return _Grammar(special).of(_today(parsed))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the structural tag is invalid ({type(error).__name__}: {error})") from None


def _today(tag: Any) -> Any:
    """Return the format of a tag, also of one in the old form."""
    if "structures" not in tag:
        return tag["format"]
    tags = [
        {"begin": each["begin"], "content": {"type": "json_schema", "json_schema": each["schema"]}, "end": each["end"]}
        for each in tag["structures"]
    ]
    return {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}


class _Grammar:
    """Collects the rules of one grammar."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        names = sorted(special, key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, names))})" if names else "(?!)()")
        self._rules: list[str] = []
        self._grammars: list[dict[str, str]] = []

    def of(self, tag: Any) -> str:
        """Return the whole grammar of a format."""
        lark = START + self._format(tag) + "\n" + "".join(self._rules)
        if not self._grammars:
            return lark
        return json.dumps({"grammars": [{"name": "tags", "lark_grammar": lark}, *self._grammars]})

    def _format(self, tag: Any) -> str:
        """Return the expression of a format."""
        translate = {
            "const_string": lambda: self._text(tag["value"]),
            "json_schema": lambda: self._schema(tag),
            "regex": lambda: regex(tag["pattern"]),
            "grammar": lambda: self._other_grammar(tag["grammar"]),
            "any_text": lambda: self._free(tag.get("excludes", ())),
            "sequence": lambda: " ".join(map(self._format, tag["elements"])),
            "or": lambda: _choice(map(self._format, tag["elements"])),
            "optional": lambda: f"({self._format(tag['content'])})?",
            "star": lambda: f"({self._format(tag['content'])})*",
            "plus": lambda: f"({self._format(tag['content'])})+",
            "tag": lambda: self._tag(tag, tag["begin"]),
            "triggered_tags": lambda: self._triggered(tag),
            "tags_with_separator": lambda: self._separated(tag),
        }
        if (kind := tag["type"]) not in translate:
            raise ValueError(f"structural tags with {kind!r} are not supported")
        return self._rule(translate[kind]())

    def _rule(self, expression: str) -> str:
        """Add a rule, and return its name."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}: {expression}\n")
        return name

    def _terminal(self, expression: str) -> str:
        """Add a terminal, and return its name."""
        name = f"T{len(self._rules)}"
        self._rules.append(f"{name}: {expression}\n")
        return name

    def _lazy(self, expression: str) -> str:
        """Add a terminal that ends as early as it can, and return its name."""
        name = f"lazy{len(self._rules)}"
        self._rules.append(f"{name}[lazy]: {expression}\n")
        return name

    def _parts(self, text: str) -> list[str]:
        """Split a text before and after special tokens."""
        return [part for part in self._split.split(text) if part]

    def _text(self, text: str) -> str:
        """Return the expression of a literal text, in which special tokens are tokens."""
        parts = self._parts(text)
        return " ".join(f"<[{self._special[part]}]>" if part in self._special else json.dumps(part) for part in parts)

    def _spaced(self, text: str) -> str:
        """Return the expression of a literal text after any white space.

        The lexer takes the longest match, so the space must belong to the text, which may begin with space.
        """
        first, *rest = self._parts(text)
        if first in self._special:
            return f"/{SPACE}+/? {self._text(text)}"
        return f"/{SPACE}*{_escaped(re.escape(first))}/ {self._text(''.join(rest))}"

    def _free(self, excluded: Iterable[str]) -> str:
        """Return a terminal for any text without special tokens and without the excluded texts."""
        texts = [_escaped(re.escape(text)) for text in excluded if text and text not in self._special]
        without = f" & ~/{ANY}({'|'.join(texts)}){ANY}/" if texts else ""
        return self._terminal(f"/{ANY}/{without}")

    def _until(self, end: str, excluded: Iterable[str] = ()) -> str:
        """Return the expression of any text up to the first occurrence of `end`, which belongs to it."""
        first, *rest = self._parts(end)
        free = self._free(excluded)
        if first in self._special:
            return f"{free} {self._text(end)}"
        return f"{self._lazy(f'{free} {json.dumps(first)}')} {self._text(''.join(rest))}"

    def _tag(self, tag: Any, begin: str) -> str:
        """Return the expression of a tag after `begin`, which is all or a part of its own."""
        content, ends = tag["content"], tag["end"]
        ends = [ends] if isinstance(ends, str) else ends
        if content["type"] == "any_text":
            excluded = content.get("excludes", ())
            inner = _choice(self._until(end, excluded) if end else self._free(excluded) for end in ends)
        else:
            write = self._spaced if content.get("style", "json") in XML_STYLES else self._text
            inner = f"{self._format(content)} {_choice(map(write, ends))}"
        return f"{self._text(begin)} {inner}"

    def _triggered(self, tag: Any) -> str:
        """Return the expression of text with tags, in which each trigger begins one of the tags."""
        triggers = tag["triggers"]
        excluded = [*triggers, *tag.get("excludes", ())]
        later: list[str] = []
        first: list[str] = []
        for trigger in triggers:
            tags = [each for each in tag["tags"] if _trigger(each["begin"], triggers) == trigger]
            if tags:
                rest = self._rule(_choice(self._tag(each, each["begin"].removeprefix(trigger)) for each in tags))
                others = [each for each in excluded if each != trigger]
                first.append(f"{self._text(trigger)} {rest}")
                later.append(f"{self._until(trigger, others)} {rest}")
        if tag.get("stop_after_first"):
            return _choice(first if tag.get("at_least_one") else [*later, self._free(excluded)])
        begin = _choice(first) if tag.get("at_least_one") else ""  # then no text comes before the first tag
        return f"{begin} ({_choice(later)})* {self._free(excluded)}"

    def _separated(self, tag: Any) -> str:
        """Return the expression of tags with a separator between them."""
        one = self._rule(_choice(self._tag(each, each["begin"]) for each in tag["tags"]))
        more = "" if tag.get("stop_after_first") else f" ({self._text(tag['separator'])} {one})*"
        return f"{one}{more}" if tag.get("at_least_one") else f"({one}{more})?"

    def _other_grammar(self, text: str) -> str:
        name = f"grammar_{len(self._grammars)}"
        self._grammars.append({"name": name, "lark_grammar": any_to_lark(text)})
        return f"@{name}"

    def _schema(self, tag: Any) -> str:
        """Return the expression of a value that matches a JSON schema."""
        style, schema = tag.get("style", "json"), tag["json_schema"]
        schema = json_schemas.prepare({} if schema is True else schema)
        if style == "json":
            return f"%json {json.dumps(schema)}"
        if style not in XML_STYLES:
            raise ValueError(f"strict and required tools are not supported for models that write {style}")
        return self._parameters(XML_STYLES[style], schema)

    def _parameters(self, style: XmlStyle, schema: Any) -> str:
        """Return the expression of a call's parameters, in the schema's order."""
        if error := LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema)):
            raise ValueError(error)  # a keyword that the expressions below would ignore
        properties = schema.get("properties")
        if unknown := NOT_AT_THE_TOP & schema.keys():
            raise ValueError(f"the parameters of a strict or required tool cannot have {min(unknown)} at the top")
        if properties is None:
            return f"({self._parameter(style, WORD, {}, {})})*"
        required = schema.get("required", ())
        if missing := [name for name in required if name not in properties]:
            raise ValueError(f"the required parameter {missing[0]!r} of a tool has no schema in properties")
        return " ".join(
            f"({self._parameter(style, self._text(name), value, schema)}){'' if name in required else '?'}"
            for name, value in properties.items()
        )

    def _parameter(self, style: XmlStyle, name: str, schema: Any, root: Any) -> str:
        head = f"{self._spaced(style.begin)} {name} {self._text(style.middle)}"
        choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if choices is not None:
            texts = (choice if isinstance(choice, str) else json.dumps(choice) for choice in choices)
            value = _choice(map(self._spaced, texts))
        elif _is_text(schema, root, set()):
            return f"{head} {self._string(schema, style.end)}"
        else:
            defined = {name: root[name] for name in ("$defs", "definitions") if name in root}
            value = f"/{SPACE}+/? %json {json.dumps(schema | defined | json_schemas.OPTIONS)}"
        return f"{head} {value} {self._spaced(style.end)}"

    def _string(self, schema: Any, end: str) -> str:
        """Return the expression of a string and the text that ends it. Its `format` is only an annotation."""
        if not {"pattern", "minLength", "maxLength"} & schema.keys():
            return self._until(end)
        pattern, least, most = (schema.get(name, "") for name in ("pattern", "minLength", "maxLength"))
        sized = f"/(?s:.{{{least or 0},{most}}})/"
        matching = f" & {regex(_search(pattern))}" if pattern else ""
        return f"{self._terminal(f'{self._free([end])} & {sized}{matching}')} {self._text(end)}"


def _trigger(begin: str, triggers: list[str]) -> str:
    found = [trigger for trigger in triggers if begin.startswith(trigger)]
    if len(found) != 1:
        raise ValueError(f"a structural tag begins with {begin!r}, which fits {len(found)} triggers instead of one")
    return found[0]


def _choice(expressions: Iterable[str]) -> str:
    """Return the choice of expressions. An empty one makes it optional."""
    known = list(dict.fromkeys(each.strip() for each in expressions))
    some = [each for each in known if each]
    return f"({' | '.join(some)}){'?' if '' in known else ''}" if some else ""


def regex(pattern: str) -> str:
    """Return the terminal for a regular expression.

    Raises:
        ValueError: the expression ends with half an escape, which llguidance drops.
    """
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        raise ValueError("the regular expression ends with a backslash that escapes nothing")
    return f"/{_escaped(pattern)}/"


def _escaped(pattern: str) -> str:
    """Return a regular expression with escapes for what Lark does not allow in one."""
    return re.sub(r"\\?\n|/|\\.", lambda found: LARK_ESCAPES.get(found[0][-1], found[0]), pattern, flags=re.DOTALL)


def _search(pattern: str) -> str:
    """Return a pattern that matches whole strings in which JSON Schema's `pattern` is found."""
    begin = "" if pattern.startswith("^") else ANY
    end = "" if pattern.endswith("$") and not pattern.endswith(r"\$") else ANY
    return f"{begin}(?:{pattern.removeprefix('^').removesuffix('' if end else '$')}){end}"


def _is_text(schema: Any, root: Any, seen: set[str]) -> bool:
    """Return whether the value may be a string, which models then write without quotes."""
    if not isinstance(schema, dict):
        return True
    if reference := schema.get("$ref"):
        if reference in seen:
            return False
        seen.add(reference)
        return _is_text(_resolved(reference, root), root, seen)
    for name in ("anyOf", "oneOf", "allOf"):
        if name in schema:
            return any([_is_text(each, root, seen) for each in schema[name]])
    kinds = schema.get("type", "string")
    return "string" in ([kinds] if isinstance(kinds, str) else kinds)


def _resolved(reference: str, root: Any) -> Any:
    for part in _path(reference):
        root = root[part]
    return root


def _path(reference: str) -> Iterator[str]:
    if not reference.startswith("#/"):
        raise ValueError(f"{reference!r} in the schema is not a part of the schema")
    for part in reference.removeprefix("#/").split("/"):
        yield part.replace("~1", "/").replace("~0", "~")
