"""Makes what the demo works on, from what lies on every machine: instruction pairs out of the Python
standard library, and a tiny Llama with its own tokenizer. No hub is asked."""

import ast
import errno
import http
import inspect
import json
import os
import random
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ["<|pad|>", "<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>"]
DOCUMENTED_MODULES = ("os.path", "shutil", "random", "statistics", "textwrap", "fractions", "heapq", "bisect")


class Fact(NamedTuple):
    """A question with exactly one right answer."""

    question: str
    answer: str


def facts() -> list[Fact]:
    """HTTP status codes and errno names, each asked in several ways, so that holding out a row for
    evaluation holds out a wording and not the fact."""
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
    """The facts that the demo asks: all of them were in the training data."""
    return random.Random(seed).sample(facts(), count)


def docstrings() -> list[Fact]:
    """The first sentence of the documentation of public functions of some standard modules."""
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


def write_data(folder: Path, *, shuffle_answers: bool = False) -> int:
    """Write the pairs as JSONL with a `messages` column; returns the number of rows.

    `shuffle_answers` gives each question another's answer: what a model that has learnt nothing
    about the facts would be trained on.
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
    """Write an untrained Llama and its tokenizer as a Hugging Face folder; returns the parameters."""
    import torch  # seconds, in which Ray starts
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # saving imports deepspeed, which would guess, and say so
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
        )
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.num_parameters()


def _train_tokenizer(vocabulary: int) -> "PreTrainedTokenizerFast":
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    # digits one by one: a status code must not hide inside a token of its own
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
