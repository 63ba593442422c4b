"""Refuses answers that would break the project, or its names on AWS, in one sentence and before a file is made."""

import json
import keyword
import re
import sys
import unicodedata

# The only line with Jinja. A raw string of JSON is Python whatever the answers hold: quotes and newlines are escaped.
ANSWERS = json.loads(r"""{{ cookiecutter | tojson }}""")

# Where AWS offers each A100 type (EC2 DescribeInstanceTypeOfferings). A new region is added here.
REGIONS = {
    "p4d.24xlarge": [
        *("us-east-1", "us-east-2", "us-west-2", "ca-central-1", "sa-east-1"),
        *("eu-central-1", "eu-north-1", "eu-west-1", "eu-west-2"),
        *("ap-northeast-1", "ap-northeast-2", "ap-south-1", "ap-southeast-2"),
    ],
    "p4de.24xlarge": ["us-east-1", "us-west-2", "eu-central-1", "ap-northeast-1", "ap-southeast-1", "il-central-1"],
}
MOST_WORKERS = 64


def project_name(answer: str) -> str | None:
    """A title in any language, safe inside quotes of YAML, TOML and Markdown and as the value of an AWS tag."""
    if len(answer) > 60:
        return "is longer than 60 characters; shorten it"
    if not answer[:1].isalpha():
        return "does not start with a letter; try My LLM"
    if not all(unicodedata.category(character)[0] in "LMN" or character in " .-_" for character in answer):
        return "holds more than letters, digits, spaces, dots, hyphens and underscores; leave the others out"
    return _keyword(answer)


def project_slug(answer: str) -> str | None:
    """A folder, and what the names of the stack, the bucket and the cluster start with: S3's rule is the strictest."""
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", answer):
        return "is not lower-case letters and digits with single hyphens between them, a letter first; try my-llm"
    if not 3 <= len(answer) <= 30:
        return "is not 3 to 30 characters long, which leaves room for AWS names; try my-llm"
    return _keyword(answer)


def instance_type(answer: str) -> str | None:
    """One of the two types that have A100s."""
    return None if answer in REGIONS else f"has no A100s; use one of: {', '.join(REGIONS)}"


def aws_region(answer: str) -> str | None:
    """A region that offers the instance type."""
    regions = REGIONS[ANSWERS["instance_type"]]
    if answer in regions:
        return None
    return f"is not known to offer {ANSWERS['instance_type']}; use one of: {', '.join(regions)}"


def max_workers(answer: str) -> str | None:
    """A whole number of instances that a person may have meant."""
    if re.fullmatch(r"[1-9][0-9]?", answer) and int(answer) <= MOST_WORKERS:
        return None
    return f"is not a whole number from 1 to {MOST_WORKERS}; try 2"


def base_model(answer: str) -> str | None:
    """An id of the Hugging Face hub, or a folder here or on S3."""
    name = r"[A-Za-z0-9_][A-Za-z0-9._-]*"
    if re.fullmatch(rf"{name}/{name}|(s3:/|\.)?(/{name})+", answer):
        return None
    return "is neither a Hugging Face id such as Qwen/Qwen3-8B nor a path that starts with /, ./ or s3://"


def _keyword(answer: str) -> str | None:
    reserved = {word.lower() for word in keyword.kwlist}
    return f"is a word of Python; try {answer}-llm" if answer.lower() in reserved else None


for check in (project_name, project_slug, instance_type, aws_region, max_workers, base_model):
    if problem := check(ANSWERS[check.__name__]):
        sys.exit(f"error: {check.__name__} {ANSWERS[check.__name__]!r:.80} {problem}.")
