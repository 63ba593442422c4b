"""Test that a small model learns to answer, to stop and to call a tool with the templates of several families."""

from pathlib import Path
from typing import Any

import packed_rows
import pyarrow as pa
import pytest
import torch
from families import FAMILIES, add_tokens, template_of
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from raymill import settings
from raymill.data.examples import to_json
from raymill.data.row_formats import read_example
from raymill.data.tokenization import DocumentTokenizer
from raymill.training.ddp import DDP
from raymill.training.options import DDPOptions
from raymill.training.runtimes.runtime import SingleProcess
from raymill.training.trainer import train

SEQUENCE_LENGTH = 1024
MOST_TOKENS = 200
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add numbers.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
]
QUESTION = {"role": "user", "content": "What does ENOENT mean?"}
SUM = {"role": "user", "content": "Add 17."}
CALL = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": {"a": 17}}}
ROWS = [
    {"messages": [QUESTION, {"role": "assistant", "content": "No such file or directory"}]},
    {"messages": [SUM, {"role": "assistant", "content": None, "tool_calls": [CALL]}], "tools": TOOLS},
]


def write_model(folder: Path, assets: Path, name: str) -> Path:
    """Write an untrained model whose tokenizer has a family's special tokens and template, and return its folder."""
    family = FAMILIES[name]
    tokenizer = add_tokens(PreTrainedTokenizerFast.from_pretrained(assets / "model"), family)
    tokenizer.add_special_tokens({"eos_token": family.eos[0]})
    tokenizer.chat_template = template_of(family)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=SEQUENCE_LENGTH + MOST_TOKENS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.convert_tokens_to_ids(list(family.eos)),
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def answer(folder: Path, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> tuple[str, bool]:
    """Return the answer of an exported model, and whether the model ended it with a stop token."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    made = model.generate(**prompt, max_new_tokens=MOST_TOKENS, do_sample=False, pad_token_id=0)
    tokens = made[0, prompt["input_ids"].shape[1] :].tolist()
    return tokenizer.decode(tokens), tokens[-1] in model.generation_config.eos_token_id


@pytest.mark.parametrize(
    "name",
    [
        "Qwen 3",
        # nightly, because each takes 17 s
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("Llama 3.1, 3.3", "Mistral Nemo", "Gemma 4")),
    ],
)
def test_a_trained_model_answers_stops_and_calls_a_tool(assets: Path, tmp_path: Path, name: str) -> None:
    model = write_model(tmp_path / "model", assets, name)
    tokenize = DocumentTokenizer(str(model), SEQUENCE_LENGTH)
    documents = tokenize(pa.Table.from_pylist([{"row": to_json(read_example(row)), "problem": None} for row in ROWS]))
    assert documents["problem"].to_pylist() == [None, None]
    (tmp_path / "packed").mkdir()
    packed_rows.write(
        tmp_path / "packed",
        pa.concat_tables([documents] * 4),
        model,
        SEQUENCE_LENGTH,
        train=[2],
        evaluated=1,
        eos_ids=tokenize.eos_ids,
    )
    changes = {"name": "run", "model": str(model), "data": str(tmp_path / "packed"), "output": str(tmp_path)}
    changes |= {"steps": 100, "eval_every": 100, "checkpoint_every": 100, "warmup_steps": 10, "learning_rate": 1e-2}
    changes |= {"global_batch_rows": 2, "micro_batch_rows": 2, "num_workers": 1}
    options = settings.load(DDPOptions, "train", profile="local").model_copy(update=changes)
    train(options, SingleProcess(tmp_path / "run", torch.device("cpu"), 1), DDP)
    exported = tmp_path / "run" / "model"
    exported_template = AutoTokenizer.from_pretrained(exported).chat_template
    assert exported_template == template_of(FAMILIES[name]), "the model must keep its own template"
    text, stopped = answer(exported, [QUESTION])
    assert "No such file or directory" in text
    assert stopped
    text, stopped = answer(exported, [SUM], TOOLS)
    assert "add" in text
    assert "17" in text
    assert stopped
