"""Before any file is created, reject answers that would break the project or be invalid in AWS names."""

import json
import keyword
import re
import sys
import tempfile
import unicodedata
from pathlib import Path

# The only lines with Jinja. JSON escapes quotes and newlines, so the raw strings are valid Python for all answers.
ANSWERS = json.loads(r"""{{ cookiecutter | tojson }}""")
REGIONS = dict(json.loads(r"""{{ regions | tojson }}"""))  # by instance type; see template_extensions.py
SETTINGS = json.loads(
    r"""{{ template_settings | tojson }}"""
)  # such as versions, from this template's cookiecutter.json

MAX_WORKERS = 64
# `cruft update` and `cruft diff` generate the project in a temporary folder, to compare it with the other version.
IS_COMPARISON = "_commit" in ANSWERS and Path.cwd().parent.parent == Path(tempfile.gettempdir()).resolve()


def project_name(answer: str) -> str | None:
    """Accept a title, in any language, with only characters that are safe in YAML, TOML, Markdown and AWS tags."""
    if len(answer) > 60:
        return "is longer than 60 characters. Shorten it"
    if not answer[:1].isalpha():
        return "does not start with a letter. Try My LLM"
    if not all(unicodedata.category(character)[0] in "LMN" or character in " .-_" for character in answer):
        return "may have only letters, digits, spaces, dots, hyphens and underscores. Remove the others"
    return _keyword(answer)


def project_slug(answer: str) -> str | None:
    """Accept a folder name that is also valid as a prefix of names on AWS. S3's naming rules are the strictest."""
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", answer):
        return "must start with a letter, and have only lowercase letters, digits and single hyphens. Try my-llm"
    if not 3 <= len(answer) <= 30:
        return "must have 3 to 30 characters, because it is the prefix of longer names on AWS. Try my-llm"
    return _keyword(answer)


def instance_type(answer: str) -> str | None:
    """Accept an instance type of the project's instance_types.py."""
    return None if answer in REGIONS else f"is not a GPU instance type. Use one of: {', '.join(REGIONS)}"


def aws_region(answer: str) -> str | None:
    """Accept a region that offers the instance type."""
    regions = REGIONS[ANSWERS["instance_type"]]
    if answer in regions:
        return None
    problem = f"does not offer {ANSWERS['instance_type']}. Use one of: {', '.join(regions)}"
    if IS_COMPARISON:  # a project that runs in a region must remain upgradable, whatever this version knows
        print(f"warning: aws_region {answer!r:.80} {problem}", file=sys.stderr)
        return None
    return problem


def max_workers(answer: str) -> str | None:
    """Accept a whole number of instances from 1 to MAX_WORKERS."""
    if re.fullmatch(r"[1-9][0-9]?", answer) and int(answer) <= MAX_WORKERS:
        return None
    return f"must be a whole number from 1 to {MAX_WORKERS}. Try 2"


def base_model(answer: str) -> str | None:
    """Accept a Hugging Face model id, or a path on this machine or on S3."""
    name = r"[A-Za-z0-9_][A-Za-z0-9._-]*"
    if re.fullmatch(rf"{name}/{name}|(s3:/|\.)?(/{name})+", answer):
        return None
    return "must be a Hugging Face id such as Qwen/Qwen3-8B, or a path that starts with /, ./ or s3://"


def _keyword(answer: str) -> str | None:
    reserved = {word.lower() for word in keyword.kwlist}
    return f"is a Python keyword. Try {answer}-llm" if answer.lower() in reserved else None


# With --replay, cookiecutter takes these from the version of the template that the answers were given to.
if old := [name for name, value in SETTINGS.items() if ANSWERS.get(name) != value]:
    sys.exit(f"error: the answers are of another version of the template ({', '.join(old)}). Leave out --replay")
for check in (project_name, project_slug, instance_type, aws_region, max_workers, base_model):
    if problem := check(ANSWERS[check.__name__]):
        sys.exit(f"error: {check.__name__} {ANSWERS[check.__name__]!r:.80} {problem}")
