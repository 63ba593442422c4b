"""Parse the command lines of verbs as invoke does."""

from types import ModuleType, SimpleNamespace
from typing import Any

from invoke import Collection
from invoke.parser import Parser

from raymill import command_line


def parsed(tasks: ModuleType, words: list[str]) -> dict[str, Any]:
    """Return the arguments with which invoke would call the verb."""
    verbs = Collection.from_module(tasks)
    program: Any = SimpleNamespace(core=SimpleNamespace(unparsed=words))
    command_line.normalize(program, verbs)
    (found,) = Parser(contexts=verbs.to_contexts()).parse_argv(words)
    return {argument.name: argument.value for argument in found.args.values()}
