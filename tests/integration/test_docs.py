"""Test the documentation: the errors that it quotes are in the code, and its commands, tests and links exist."""

import ast
import re
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from itertools import product

import pytest
import torch
import torch.distributed as dist
from ray.train import Checkpoint
from ray.train.torch import TorchTrainer, get_device

import bake
from raymill import job, job_scripts, settings
from raymill.training.ddp import DDP
from raymill.training.options import DDPOptions
from raymill.training.runtimes import torchrun

PAGES = ["README.md", *(str(page.relative_to(settings.PROJECT)) for page in settings.PROJECT.glob("docs/*.md"))]
SOURCES = ["jobs/**/*.py", "raymill/**/*.py"]
FILLED = "\0"  # replaces a value in a message
MIN_LETTERS = 20  # characters outside of values; with fewer, a pattern would match almost any quote
PLACEHOLDERS = {"VERB", "JOB", "NAME", "MODEL"}  # the pages use these in place of real names


def _sections() -> dict[str, str]:
    """Return the text of each section of errors.md, keyed by heading."""
    page = (settings.PROJECT / "docs/errors.md").read_text(encoding="utf-8")
    parts = re.split(r"^### (.*)\n", page, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def _quoted(section: str) -> str:
    return " ".join(re.findall(r"^> (.*)$", section, re.MULTILINE))


# ------------------------------------------------------------------------------------------ errors


PROVOKED: dict[str, Callable[[], object]] = {
    "`resume_from_checkpoint`": lambda: TorchTrainer(print, resume_from_checkpoint=Checkpoint("/tmp")),
    "A worker's function outside of a worker": get_device,
    "Weights have other names": lambda: torch.nn.Sequential(torch.nn.Linear(1, 1)).load_state_dict(
        torch.nn.Module().state_dict() | {"module.0.weight": torch.ones(1, 1), "module.0.bias": torch.ones(1)}
    ),
    "No process group": lambda: dist.all_reduce(torch.ones(1)),
}


@pytest.mark.parametrize("heading", [heading for heading in _sections() if heading not in PROVOKED])
def test_a_quoted_error_is_in_the_code(heading: str) -> None:
    quote = re.sub("^(error:|✗) ", "", _quoted(_sections()[heading]))
    whole = any(message.fullmatch(quote) for message in _messages())
    halves = [any(message.fullmatch(half) for message in _messages()) for half in re.split("[;.] ", quote, maxsplit=1)]
    assert whole or (len(halves) == 2 and all(halves)), quote  # a finding of the doctor has two parts: text and remedy


@pytest.mark.parametrize("heading", PROVOKED)
def test_libraries_raise_the_quoted_errors(heading: str) -> None:
    with pytest.raises((RuntimeError, ValueError, DeprecationWarning)) as provoked:
        PROVOKED[heading]()
    assert _quoted(_sections()[heading]) in " ".join(str(provoked.value).split())


@pytest.mark.parametrize("heading", _sections())
def test_an_error_has_a_command_to_type_and_a_test(heading: str) -> None:
    text = " ".join(_sections()[heading].split())
    assert re.search(r"[Tt]ype `|[Tt]ype what it says|`inv \w+", text)
    is_of_the_launcher = any(
        text.fullmatch(_quoted(_sections()[heading]).removeprefix("error: "))
        for text in _patterns(_texts_of_the_launcher())
    )
    assert is_of_the_launcher or re.search(r"Tests?: `test_\w+\.py::test_\w+`", text)


def test_a_changed_message_would_be_found() -> None:
    quote = _quoted(_sections()["A key exceeds its rate limit"]).removeprefix("error: ")
    assert any(message.fullmatch(quote) for message in _messages())
    assert not any(message.fullmatch(quote.replace("exceeded", "passed")) for message in _messages())


@cache
def _messages() -> list[re.Pattern[str]]:
    """Return a pattern for each text of at least MIN_LETTERS characters in the code. Values in it match anything."""
    files = [file for pattern in SOURCES for file in settings.PROJECT.glob(pattern)]
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in files]
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.expr)]
    texts = {text for node in nodes for text in _texts(node) if len(text.replace(FILLED, "")) >= MIN_LETTERS}
    return _patterns(texts | _texts_of_the_launcher())


def _patterns(texts: set[str]) -> list[re.Pattern[str]]:
    return [re.compile(re.escape(text).replace(FILLED, ".*")) for text in texts]


def _texts_of_the_launcher() -> set[str]:
    """Return the errors of the launcher `inv`: the quoted words after `fail`."""
    shell = (settings.PROJECT / "inv").read_text(encoding="utf-8").replace("\\\n", " ")
    errors = re.findall(r'\bfail ("[^"]*"(?: +"[^"]*")*)', shell)
    joined = [" ".join(re.findall(r'"([^"]*)"', words)) for words in errors]
    texts = {re.sub(r"\$\([^)]*\)|\$\{?\w+\}?", FILLED, text) for text in joined}
    return {text for text in texts if len(text.replace(FILLED, "")) >= MIN_LETTERS}


def _texts(node: ast.expr) -> list[str]:
    """Return the texts that an expression can have, with FILLED in place of values known only at run time."""
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.JoinedStr(values=parts):
            return ["".join(chosen) for chosen in product(*map(_texts, parts))]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return [first + second for first, second in product(_texts(left), _texts(right))]
        case ast.FormattedValue(
            value=ast.Call(func=ast.Name("inv") | ast.Attribute(attr="inv"), args=[words, *values])
        ):
            verb, space, rest = _texts(words)[0].partition(" ")
            return [f"inv {verb}{FILLED}{space}{rest}{f' {FILLED}' * len(values)}"]
        case ast.IfExp(body=one, orelse=other):
            return _texts(one) + _texts(other)
    return [FILLED]


# ------------------------------------------------------------------------------------------ commands, tests, links


def _named(pattern: str) -> list[tuple[str, str]]:
    """Return (page, match) for each match of a pattern in a page's code: between backticks, or in code blocks."""
    found = []
    for page in PAGES:
        text = (settings.PROJECT / page).read_text(encoding="utf-8")
        blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        spans = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
        for line in [line for block in blocks for line in block.splitlines()] + spans:
            found += [(page, match) for match in re.findall(pattern, line.partition(" #")[0])]
    return sorted(set(found))


@pytest.mark.parametrize(("page", "command"), _named(r"\binv (?:--list|[a-z][\w-]*[^`;]*)"))
def test_a_command_exists(page: str, command: str) -> None:
    own, _, of_the_job = command.partition(" -- ")
    verb, *words = own.split()[1:]
    mine = " ".join(words)
    assert verb == "--list" or verb in _verbs()
    assert {option for option in re.findall(r"--([\w-]+)", mine)} <= _verbs().get(verb, set())
    jobs = [word for word in (verb, *mine.split()) if word in job_scripts.names()]
    if verb == "submit" and mine:
        assert jobs or PLACEHOLDERS & set(mine.split())
    if verb != "lm-eval":  # which passes them on
        assert {option for option in re.findall(r"--([\w-]+)", of_the_job)} <= _options(*jobs)


@pytest.mark.parametrize(("page", "command"), _named(r"-m jobs\.\w+.*"))
def test_a_module_can_be_started(page: str, command: str) -> None:
    job, *words = command.removeprefix("-m jobs.").split()
    assert job in {*job_scripts.names(), *PLACEHOLDERS}
    assert {option for option in re.findall(r"--([\w-]+)", " ".join(words))} <= _options(job)


@pytest.mark.parametrize(("page", "name"), _named(r"test_\w+\.py::test_\w+"))
def test_a_named_test_exists(page: str, name: str) -> None:
    file, _, function = name.partition("::")
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (bake.TEMPLATE / "tests").rglob(file)]
    assert function in [node.name for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_existing_files(page: str) -> None:
    folder = (settings.PROJECT / page).parent
    text = (settings.PROJECT / page).read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^):]+)\)", text):
        file, _, section = link.partition("#")
        assert (folder / file).exists(), link
        assert not section or section in sections((folder / file).read_text(encoding="utf-8")), link


def sections(text: str) -> list[str]:
    """Return the names that GitHub gives to the headings of a page in links."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def test_torchrun_needs_packed_rows_and_a_folder() -> None:
    options = settings.load(DDPOptions, "train", profile="local")
    for wrong in ({"stream": True}, {"output": "s3://bucket/runs"}):
        message = torchrun._prepare(options.model_copy(update=wrong), ExitStack(), DDP)
        assert message.startswith(
            "under torchrun, jobs read preprocessed rows and write to a folder that all processes share"
        )


@cache
def _verbs() -> dict[str, set[str]]:
    """Parse the verbs of the library, and return the options of each."""
    tree = ast.parse((settings.PROJECT / "raymill" / "verbs.py").read_text(encoding="utf-8"))
    return {
        node.name.replace("_", "-"): {argument.arg.rstrip("_").replace("_", "-") for argument in node.args.args}
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and "verb(" in "".join(map(ast.unparse, node.decorator_list))
    }


@cache
def _options(*jobs: str) -> set[str]:
    """Return the options of these jobs."""
    names = {"help"}
    for name in set(jobs) - PLACEHOLDERS:
        names |= {field.replace("_", "-") for field in job.load(name).JOB.options_type.model_fields}
    return names
