"""Runs the whole pipeline on this machine, and checks its results. `inv demo` runs this module.

The demo creates its data and a tiny model. Everything else is real: this project's jobs, Ray, DeepSpeed and vLLM.
"""

import json
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import psutil
from dotenv import dotenv_values
from matplotlib.figure import Figure
from rich.table import Table

from raymill import settings, status, submission
from raymill.console import Console
from raymill.demo import assets
from raymill.errors import UserError
from raymill.local.target import Local
from raymill.network import free_ports
from raymill.printable import printable
from raymill.target import Connection

STEPS_COMPARED = 30
SOURCES, SHOWN = 5, 3
# separate folders and runs, so that the demo does not change your own
DATA, PACKED, MODEL = "data/demo", "data/demo/packed", "models/tiny"
INDEX, EMBEDDER = "data/demo/index", "models/embedder"
DDP, DEEPSPEED = "demo_ddp", "demo_deepspeed"
RESULTS = settings.PROJECT / "results"
CONSOLE = Console(highlight=False)


def play() -> dict[str, Any]:
    """Run every step. Return the results, and save them to results/demo.json.

    Raises:
        UserError: a job failed, or a result is not as expected.
    """
    times: dict[str, float] = {}
    with _peak_memory() as memory:
        with (
            _step(times, "create data, ask an untrained model, and start Ray"),
            ThreadPoolExecutor(1) as background,
        ):
            started = background.submit(Local().up, yes=True)
            _make_assets()
            questions = assets.questions()
            before = ask_with_transformers(settings.PROJECT / MODEL, questions)
            started.result()
        connection = Local().connect()
        training = ["--model", MODEL, "--data", PACKED, "--fresh"]
        with _step(times, "preprocess"):
            _run(connection, "preprocess", "--input", f"{DATA}/*.jsonl", "--output", PACKED, "--model", MODEL)
        with _step(times, "fine-tune with DDP"):
            _run(connection, "finetune_ddp", "--name", DDP, *training)
        # Loading vLLM and loading DeepSpeed each take one core, so they run in parallel.
        (port,) = free_ports(1)  # the port in settings.toml may be in use
        serving = submission.submit(connection, "serve_llm", ["--model", f"runs/{DDP}/model", "--port", str(port)])
        with _step(times, f"repeat {STEPS_COMPARED} steps with DeepSpeed while vLLM loads the model"):
            _run(connection, "finetune_deepspeed", "--name", DEEPSPEED, *training, "--stop-after", str(STEPS_COMPARED))
        with _step(times, "serve the trained model with vLLM"):
            _follow(connection, serving)
        with _step(times, "ask the trained model"):
            url = status.address(status.snapshot(connection), connection)
            after = _ask_served(questions, url)
        with _step(times, "index documentation, and answer questions from it with sources"):
            asked = ["--questions", f"{DATA}/questions/library.jsonl"]
            _run(connection, "embed", "--input", f"{DATA}/documents", "--index", INDEX, "--model", EMBEDDER, *asked)
            _run(connection, "serve_rag", "--index", INDEX, "--sources", str(SOURCES))
            found = _share_found(f"{url}/rag/v1")
    result = _result(questions, before, after)
    result |= {"documents_found": found, "seconds": times, "peak_memory_gib": memory["peak_gib"]}
    _save(result)
    _show(result)
    _check(result)
    return result


def _make_assets() -> None:
    for folder in (DATA, MODEL, EMBEDDER):
        shutil.rmtree(settings.PROJECT / folder, ignore_errors=True)
    rows = assets.write_data(settings.PROJECT / DATA)
    parameters = assets.write_model(settings.PROJECT / MODEL)
    documents = assets.write_documents(settings.PROJECT / DATA)
    assets.write_embedder(settings.PROJECT / EMBEDDER)
    print(f"{rows} questions with answers, and {documents} documents, from Python's standard library")
    print(f"an untrained Llama with {parameters / 1e6:.1f} million parameters")


def _run(connection: Connection, job: str, *arguments: str) -> None:
    _follow(connection, submission.submit(connection, job, list(arguments)))


def _follow(connection: Connection, job_id: str) -> None:
    if code := submission.follow(connection, job_id):
        raise UserError(f"{job_id} failed with exit code {code}; the reason is above. Show its log: inv logs {job_id}")


def ask_with_transformers(folder: Path, questions: list[assets.Fact]) -> list[str]:
    """Return the greedy answers that transformers generates with the model in a Hugging Face folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder)
    asked = [[{"role": "user", "content": question}] for question, _ in questions]
    prompts = tokenizer.apply_chat_template(
        asked, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    outputs = model.generate(**prompts, max_new_tokens=32, do_sample=False)
    return tokenizer.batch_decode(outputs[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)


def _ask_served(questions: list[assets.Fact], url: str) -> list[str]:
    """Ask the served model these questions over the OpenAI API, and return its greedy answers."""
    client = _client(f"{url}/v1")
    model = client.models.list().data[0].id
    answers = []
    for question, _ in questions:
        messages: Any = [{"role": "user", "content": question}]
        answer = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=32)
        answers.append(answer.choices[0].message.content or "")
    return answers


def _share_found(url: str) -> float:
    """Return the share (0 to 1) of questions for which the sources include the right document. Print some answers."""
    client = _client(url)
    found = 0
    for number, (question, document) in enumerate(assets.DOCUMENT_QUESTIONS.items()):
        messages: Any = [{"role": "user", "content": question}]
        answer = client.chat.completions.create(model="rag", messages=messages)
        sources = [source["document"] for source in (answer.model_extra or {})["sources"]]
        found += document in sources
        if number < SHOWN:
            text = printable(answer.choices[0].message.content or "")
            print(f"{question}\n  {text}\n  sources: {', '.join(sources)}")
    return found / len(assets.DOCUMENT_QUESTIONS)


def _client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key=dotenv_values(settings.PROJECT / ".env")["SERVE_API_KEY"])


def share_right(answers: list[str], questions: list[assets.Fact]) -> float:
    """Return the share (0 to 1) of answers that are exactly right."""
    return sum(answer.strip() == fact.answer for answer, fact in zip(answers, questions, strict=True)) / len(questions)


def _result(questions: list[assets.Fact], before: list[str], after: list[str]) -> dict[str, Any]:
    ddp, deepspeed = (_metrics(run) for run in (DDP, DEEPSPEED))
    losses = [(a["loss"], b["loss"]) for a, b in zip(ddp, deepspeed, strict=False)][:STEPS_COMPARED]
    return {
        "questions": len(questions),
        "right_before": share_right(before, questions),
        "right_after": share_right(after, questions),
        "steps_compared": len(losses),
        "losses_ddp": [a for a, _ in losses],
        "losses_deepspeed": [b for _, b in losses],
        "largest_loss_difference": max(abs(a - b) for a, b in losses),
        "final_loss": ddp[-1]["loss"],
        "tokens_per_s": sorted(row["tokens_per_s"] for row in ddp)[len(ddp) // 2],
        "plot": str(_plot(ddp, deepspeed).relative_to(settings.PROJECT)),
    }


def _metrics(run: str) -> list[dict[str, Any]]:
    lines = (settings.PROJECT / "runs" / run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if "loss" in row]


def _plot(ddp: list[dict[str, Any]], deepspeed: list[dict[str, Any]]) -> Path:
    figure = Figure(figsize=(8, 4.5))
    axes = figure.subplots()
    axes.plot([row["step"] for row in ddp], [row["loss"] for row in ddp], label="DDP")
    axes.plot([row["step"] for row in deepspeed], [row["loss"] for row in deepspeed], "--", label="DeepSpeed ZeRO")
    evaluated = [row for row in ddp if "eval_loss" in row]
    axes.plot(
        [row["step"] for row in evaluated], [row["eval_loss"] for row in evaluated], "o:", label="DDP, evaluation"
    )
    axes.set(xlabel="step", ylabel="loss per trained token (nats)", title="The demo's fine-tuning", yscale="log")
    axes.legend()
    RESULTS.mkdir(exist_ok=True)
    figure.savefig(RESULTS / "losses.png", dpi=120, bbox_inches="tight")
    return RESULTS / "losses.png"


def _save(result: dict[str, Any]) -> None:
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "demo.json").write_text(json.dumps(result, indent=2) + "\n")


def _show(result: dict[str, Any]) -> None:
    CONSOLE.print("[bold]Loss of the first steps with DDP and with DeepSpeed[/]")
    CONSOLE.print(_losses(result))
    CONSOLE.print(f"largest difference in {result['steps_compared']} steps: {result['largest_loss_difference']:.1e}")
    CONSOLE.print("\n[bold]Right answers[/] to questions from the training data")
    right = (("before training", result["right_before"]), ("after, with vLLM", result["right_after"]))
    CONSOLE.print(_pairs({name: f"{share:.0%} of {result['questions']}" for name, share in right}))
    found = f"{result['documents_found']:.0%} of {len(assets.DOCUMENT_QUESTIONS)} questions"
    CONSOLE.print(f"\n[bold]Answers from documentation[/]: the right document is among {SOURCES} sources for {found}")
    CONSOLE.print("\n[bold]Time[/]")
    times = result["seconds"] | {"total": sum(result["seconds"].values())}
    CONSOLE.print(_pairs({name: f"{seconds:.0f} s" for name, seconds in times.items()}))
    memory = f"{result['peak_memory_gib']:.1f} GiB"
    CONSOLE.print(f"training: {result['tokens_per_s']:,.0f} tokens/s   peak memory: {memory}")
    CONSOLE.print(f"losses: {result['plot']}   numbers: results/demo.json")


def _losses(result: dict[str, Any]) -> Table:
    table = Table(box=None)
    for column in ("step", "DDP", "DeepSpeed", "difference"):
        table.add_column(column, justify="right")
    for step, (a, b) in enumerate(zip(result["losses_ddp"], result["losses_deepspeed"], strict=True), 1):
        if step == 1 or step % 5 == 0:
            table.add_row(str(step), f"{a:.6f}", f"{b:.6f}", f"{abs(a - b):.1e}")
    return table


def _pairs(values: dict[str, str]) -> Table:
    table = Table(box=None, show_header=False)
    for name, value in values.items():
        table.add_row(name, value)
    return table


def _check(result: dict[str, Any]) -> None:
    """Raise `UserError` if a result is not as expected."""
    expectations = {
        "the untrained model knows no answer": result["right_before"] == 0,
        "the trained model knows at least 95 % of the answers": result["right_after"] >= 0.95,
        "DDP and DeepSpeed agree within 1e-5": result["largest_loss_difference"] <= 1e-5,
        f"{STEPS_COMPARED} steps were compared": result["steps_compared"] == STEPS_COMPARED,
        "the right document is a source for at least two in three questions": result["documents_found"] >= 2 / 3,
    }
    for expectation, is_met in expectations.items():
        if not is_met:
            raise UserError(f"the demo did not show that {expectation}. The numbers are in results/demo.json")


@contextmanager
def _step(times: dict[str, float], title: str) -> Iterator[None]:
    CONSOLE.rule(f"[bold]{len(times) + 1}/7 {title}", align="left")
    started = time.monotonic()
    yield
    times[title] = round(time.monotonic() - started, 1)


@contextmanager
def _peak_memory(interval_s: float = 0.5) -> Iterator[dict[str, float]]:
    """Measure the peak memory use of this machine, in GiB above the use at the start."""
    base = psutil.virtual_memory().used
    result, done = {"peak_gib": 0.0}, threading.Event()

    def watch() -> None:
        while not done.wait(interval_s):
            result["peak_gib"] = max(result["peak_gib"], (psutil.virtual_memory().used - base) / 2**30)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    yield result
    done.set()
    watcher.join()
