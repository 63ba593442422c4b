"""Run tasks of EleutherAI's lm-evaluation-harness against the served model. `inv lm-eval` runs this.

lm-eval runs in an environment of its own, which uv creates, so its packages do not have to fit the project's.
"""

import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import openai
from rich.console import Console
from rich.table import Table

from raymill import environment, settings
from raymill.clients import chat
from raymill.console import cell
from raymill.errors import UserError
from raymill.printable import printable
from raymill.ray_support import job_secrets, model_cache
from raymill.training import storage
from raymill.training.options import DDPOptions

LM_EVAL = "lm-eval[api]==0.4.13"
CONCURRENT = 16
MAX_NAME = 60  # characters of a file's name that list tasks
RESULTS = settings.PROJECT / "results" / "lm-eval"
REASONS = {
    "Status code: 429": "the key's rate limit is exceeded. Raise it, then try again: "
    f"{settings.inv('submit serve_llm -- --key-requests-per-minute 1000000')}",
    "Loglikelihood is not supported for chat completions": "a task compares the probabilities of given answers, which "
    "the chat API does not return. Run it with: --completions",
}
"""Texts in lm-eval's log, and what they mean."""


class Request(NamedTuple):
    """What to evaluate."""

    tasks: str
    """Comma-separated names of tasks."""
    model: str = ""
    """Name of a served model. Empty: the main model."""
    completions: bool = False
    """Use /v1/completions, without a chat template."""
    options: tuple[str, ...] = ()
    """Further options of lm-eval."""


def run(
    url: str, variables: Mapping[str, str], request: Request, console: Console, results: Path = RESULTS
) -> dict[str, Any]:
    """Run the tasks, print a table of their metrics, and return lm-eval's results, which are in a file in `results`.

    `variables` are the environment variables of submitted jobs, which say where to find the server's key.

    Raises:
        UserError: there is no key, the server does not answer, it does not serve the model, or lm-eval fails.
    """
    key = chat.api_key(variables)
    with chat.readable_errors(url):
        served = openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=chat.TIMEOUTS).models.list().data
    card = next((one for one in served if one.id == (request.model or served[0].id)), None)
    if not card:
        names = ", ".join(one.id for one in served)
        raise UserError(f"no model is named {request.model}. Served models: {names}")
    max_length = getattr(card, "max_model_len", None) or 2048  # a field of vLLM's, which adapters lack
    arguments: dict[str, Any] = {
        "model": card.id,
        "base_url": f"{url}/{'completions' if request.completions else 'chat/completions'}",
        "num_concurrent": CONCURRENT,
        "max_length": max_length,
        "max_gen_toks": min(256, max_length // 2),  # for tasks that set no limit of their own
    }
    if request.completions:
        arguments |= {"tokenizer_backend": "huggingface", "tokenizer": _tokenizer(card.id)}
    folder = results / time.strftime("%Y-%m-%d_%H-%M-%S")
    folder.mkdir(parents=True)
    _run_lm_eval(request, arguments, key, folder)
    [file] = folder.rglob("results_*.json")
    found = json.loads(file.read_text(encoding="utf-8"))
    console.print(_table(found, card.id))
    console.print(f"numbers: {file}", soft_wrap=True, markup=False)
    return found


def write_questions(request: Request, results: Path = RESULTS) -> Path:
    """Write the rows that the tasks ask about to a file in `results`, for [preprocess.filters]. Return its path.

    Raises:
        UserError: lm-eval does not know a task, or cannot load its data set, or `request` names a model.
    """
    if request.model or request.completions:
        raise UserError("--write-questions asks no model; leave out --model and --completions.")
    name = request.tasks.replace("/", "_")
    if len(name) > MAX_NAME:  # file systems allow 255 bytes
        name = f"{name[:MAX_NAME]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    file = results / "questions" / f"{name}.jsonl"
    script = Path(__file__).with_name("lm_eval_questions.py")
    log = results / "questions" / "log.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    # -P: otherwise this folder would come first on the path, and lm_eval.py would hide the package
    command = ("python", "-P", str(script), request.tasks, str(file), *request.options)
    _run_in_environment(command, {}, log, stdout=None)
    print(f"To keep these questions out of the training data: decontaminate = [{json.dumps(str(file))}]")
    print("in [preprocess.filters] of settings.toml")
    return file


def _tokenizer(model: str) -> str:
    """Return the location of the model's tokenizer: the folder of the run, or a hub id."""
    output = settings.resolve(settings.load(DDPOptions, "train").output)
    location = f"{output}/{model}/model"
    if storage.list_names(location):
        return model_cache.on_this_node(location, weights=False)
    if "/" in model:
        return model
    raise UserError(
        f"{location} does not exist, so there is no tokenizer for {model}. Serve a run under its own name, or a model "
        "of the hub under its id"
    )


def _run_lm_eval(request: Request, arguments: dict[str, Any], key: str, folder: Path) -> None:
    """Run lm-eval, show its progress, and keep its log in `folder`. Raises `UserError` if it fails."""
    command = [
        *("lm_eval", "run"),
        *("--model", "local-completions" if request.completions else "local-chat-completions"),
        *("--model_args", *(f"{name}={value}" for name, value in arguments.items())),
        *([] if request.completions else ["--apply_chat_template"]),
        *("--tasks", request.tasks, "--output_path", str(folder)),
        *request.options,
    ]
    _run_in_environment(command, {"OPENAI_API_KEY": key}, folder / "log.txt", stdout=subprocess.DEVNULL)  # its table


def _run_in_environment(command: Sequence[str], variables: dict[str, str], log: Path, stdout: int | None) -> None:
    """Run a command in lm-eval's environment, show its progress, and write its log. Raises `UserError` if it fails."""
    _, sources = environment.package_sources(environment.pip_settings())
    # the tokenizer of the project's own transformers
    transformers = f"transformers=={importlib.metadata.version('transformers')}"
    tool = [environment.find_uv(), "tool", "run", "--quiet", "--python", sys.executable, "--from", LM_EVAL]
    token = {} if "HF_TOKEN" in os.environ else job_secrets.read(["HF_TOKEN"])
    process = subprocess.Popen(
        [*tool, "--with", transformers, *command],
        env=os.environ | sources | variables | token,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    lines = []
    with process:
        assert process.stderr
        for line in process.stderr:  # a progress bar is a line too, because Python also ends lines at \r
            if "%|" in line:
                print(f"\r{printable(line.rstrip())}", end="", file=sys.stderr, flush=True)
            else:
                lines.append(line)
    print(file=sys.stderr)
    written = "".join(lines)
    log.write_text(written, encoding="utf-8")
    if process.returncode:
        last = next((line.strip() for line in reversed(lines) if line.strip()), f"exit code {process.returncode}")
        reason = next((meaning for text, meaning in REASONS.items() if text in written), last)
        raise UserError(f"lm-eval failed: {reason}   Its log: {log}")


def _table(found: dict[str, Any], model: str) -> Table:
    table = Table(title=cell(model), box=None)
    for column in ("task", "metric", "filter", "value", "± standard error", "questions"):
        table.add_column(column, justify="left" if column in ("task", "metric", "filter") else "right")
    for task, metrics in found["results"].items():
        questions = found.get("n-samples", {}).get(task, {}).get("effective", "")
        for name, value in metrics.items():
            metric, comma, filter_ = name.partition(",")
            if comma and not metric.endswith("_stderr") and isinstance(value, int | float):
                error = metrics.get(f"{metric}_stderr,{filter_}")
                shown = f"{error:.4f}" if isinstance(error, float) else ""
                table.add_row(*map(cell, (task, metric, filter_)), f"{value:.4f}", shown, str(questions))
    return table
