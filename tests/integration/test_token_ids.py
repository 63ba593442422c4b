"""Test that fastokens gives the documents of Hugging Face's tokenizer, or that Hugging Face's tokenizer gives them."""

import copy
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fastokens
import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from jobs import preprocess
from raymill import settings
from raymill.data import document_encoder, preprocessing, token_ids
from raymill.data.document_encoder import DocumentEncoder
from raymill.data.examples import Completion
from raymill.data.options import PreprocessOptions
from raymill.data.template_renderer import RenderedText
from raymill.data.token_ids import TokenIds, UnsupportedTokenizer
from raymill.errors import UserError

PIECES = (
    *("Hello", " world", " it's", " DON'T", "1234567", " 3.14", "\n", "\n\n", "  ", " ", "\t", "\r\n", "x" * 90),
    *("caf\u00e9", "cafe\u0301", " \u00c5ngstr\u00f6m", "\ufb01", "\u1100\u1161", "\u4f60\u597d", "\u65e5\u672c"),
    *("\U0001f600", "\U0001f469\u200d\U0001f467", "\u0939\u093f", " \u00a0", "\u2028", "\u200b", "\ufeff", "\x00"),
    *("def f(x):\n        return", "{'a': 1}", "!?", "...", "\u0130I", "\u00bd", "<|s|>", "<|e|>", "<|e|>\n", " <|e|>"),
)


def text_of(draw: random.Random, most: int = 12) -> str:
    return "".join(draw.choices(PIECES, k=draw.randint(1, most)))


def trained(model: models.BPE, change: Callable[[Tokenizer], None], **options: Any) -> dict[str, Any]:
    """Return the tokenizer.json of a small BPE, trained on the pieces."""
    bpe, draw = Tokenizer(model), random.Random(0)
    change(bpe)
    trainer = trainers.BpeTrainer(vocab_size=900, show_progress=False, **options)
    bpe.train_from_iterator([text_of(draw) for _ in range(500)], trainer)
    return json.loads(bpe.to_str())


def train_on_bytes(bpe: Tokenizer) -> None:
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)


BYTES = trained(models.BPE(), train_on_bytes, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())

GPT_4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN_2 = GPT_4.replace("{1,3}", "")
QWEN_3_5 = QWEN_2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
END = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SHORT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
WORD = r"[^\r\n\p{L}\p{N}]?"
O200K = rf"{WORD}{UPPER}*{LOWER}+{SHORT}|{WORD}{UPPER}+{LOWER}*{SHORT}|\p{{N}}{{1,3}}{END}"
TEKKEN = rf"{WORD}{UPPER}*{LOWER}+|{WORD}{UPPER}+{LOWER}*|\p{{N}}{END}"
KIMI = r"[\p{Han}]+|" + O200K.replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]")
DEEPSEEK = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


def sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(steps)}


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def byte_level(*, use_regex: bool = False, prefix: bool = False) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": True, "use_regex": use_regex}


def on_bytes(pre_tokenizer: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return copy.deepcopy(BYTES) | {"pre_tokenizer": pre_tokenizer} | changes


def post_processor(*, trim: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": trim, "use_regex": True}


def ignoring_merges(definition: dict[str, Any]) -> dict[str, Any]:
    return definition | {"model": definition["model"] | {"ignore_merges": True}}


NFC = {"type": "NFC"}
EXACT = {
    "Qwen 2.5 and 3": on_bytes(
        sequence(split(QWEN_2), byte_level()), normalizer=NFC, post_processor=post_processor(trim=False)
    ),
    "Qwen 3.5": on_bytes(
        sequence(split(QWEN_3_5), byte_level()), normalizer=NFC, post_processor=post_processor(trim=False)
    ),
    "Llama 3, SmolLM3, OLMo": ignoring_merges(
        on_bytes(sequence(split(GPT_4), byte_level()), post_processor=post_processor(trim=True))
    ),
    "gpt-oss, Phi-4-mini, MiniMax": on_bytes(
        sequence(split(O200K), byte_level()), post_processor=post_processor(trim=False)
    ),
    "Mistral (Tekken)": ignoring_merges(on_bytes(sequence(split(TEKKEN), byte_level()))),
    "Kimi": on_bytes(sequence(split(KIMI), byte_level())),
    "DeepSeek V3": on_bytes(sequence(*map(split, DEEPSEEK), byte_level())),
    "GPT-2, Granite 3": on_bytes(byte_level(use_regex=True), post_processor=post_processor(trim=True)),
    "SmolLM2": on_bytes(sequence({"type": "Digits", "individual_digits": True}, byte_level(use_regex=True))),
    "GLM": on_bytes(sequence(split(GPT_4), byte_level())),
}
"""tokenizer.json files like those of published models, with a small vocabulary."""


def llama_2(bpe: Tokenizer) -> None:
    bpe.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])


def gemma(bpe: Tokenizer) -> None:
    bpe.normalizer = normalizers.Replace(" ", "\u2581")
    bpe.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")


def mistral(bpe: Tokenizer) -> None:
    bpe.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme="first", split=False)


def sentencepiece(change: Callable[[Tokenizer], None]) -> dict[str, Any]:
    special = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    model = models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    made = trained(model, change, special_tokens=special, limit_alphabet=120)
    return made | {"added_tokens": made["added_tokens"][:1]}


REFUSED = {
    "Llama 2, Phi 3.5": sentencepiece(llama_2),
    "Mistral v0.3": sentencepiece(mistral),
    "Gemma": sentencepiece(gemma),
    "a space before each text": on_bytes(byte_level(use_regex=True, prefix=True)),
    "another normalizer": on_bytes(byte_level(use_regex=True), normalizer={"type": "Lowercase"}),
}


def tokenizer(definition: dict[str, Any], **flags: bool) -> PreTrainedTokenizerFast:
    """Return a tokenizer with the added tokens <|s|> and <|e|>, which have `flags`."""
    made = Tokenizer.from_str(json.dumps(definition))
    made.add_special_tokens([AddedToken(token, normalized=False, **flags) for token in ("<|s|>", "<|e|>")])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<|s|>", eos_token="<|e|>")


def documents(count: int) -> list[RenderedText | Completion]:
    """Return random texts: conversations with one to four turns, most of which end with a stop token, and others."""
    draw = random.Random(1)
    made: list[RenderedText | Completion] = []
    for _ in range(count):
        if draw.random() < 0.2:
            made.append(Completion(draw.choice(("", text_of(draw))), text_of(draw) + "<|e|>"))
            continue
        text, spans = draw.choice(("", "<|s|>")), []
        for _ in range(draw.randint(1, 4)):
            text += text_of(draw) + draw.choice(("<|s|>", "<|s|>\n", ": "))
            start = len(text)
            text += text_of(draw) + draw.choice(("<|e|>", "<|e|>", "<|e|>", "", " "))
            spans.append((start, len(text)))
            text += draw.choice(("\n", "", " and"))
        made.append(RenderedText(text, spans))
    return made


def as_lists(found: list[list[Any]]) -> list[list[tuple[list[int], list[tuple[int, int]]]]]:
    return [[(list(map(int, text.ids)), text.spans) for text in texts] for texts in found]


@pytest.fixture
def nothing_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_encoder, "COMPARED", 2**40)  # the run must not compare what the test compares


@pytest.mark.parametrize("flags", [{}, {"rstrip": True, "lstrip": True}], ids=["plain", "Phi-4"])
@pytest.mark.parametrize("kind", EXACT)
def test_fastokens_gives_the_same_documents(kind: str, flags: dict[str, bool], nothing_compared: None) -> None:
    texts = documents(400)
    slow, fast = (DocumentEncoder(tokenizer(EXACT[kind], **flags)) for _ in range(2))
    fast.use_fastokens()
    found = fast.encode(texts)
    assert as_lists(found) == as_lists(slow.encode(texts))
    share = sum(texts[0].is_fast for texts in found) / len(found)
    assert share > (0.03 if flags else 0.1 if "Qwen" in kind else 0.4), (
        "white space, or text that is not normal, needs the other"
    )


@pytest.mark.parametrize("kind", REFUSED)
def test_other_tokenizers_are_refused_and_change_nothing(kind: str) -> None:
    made = tokenizer(REFUSED[kind])
    with pytest.raises(UnsupportedTokenizer):
        TokenIds(made.backend_tokenizer)
    slow, fast = (DocumentEncoder(tokenizer(REFUSED[kind])) for _ in range(2))
    fast.use_fastokens()
    texts = documents(50)
    found = fast.encode(texts)
    assert as_lists(found) == as_lists(slow.encode(texts))
    assert not any(text.is_fast for texts in found for text in texts)


def test_text_that_the_tokenizer_changes_is_not_exact() -> None:
    ids = TokenIds(tokenizer(EXACT["Qwen 3.5"]).backend_tokenizer)
    assert ids.encode(["caf\u00e9", "cafe\u0301", ""]).is_exact.tolist() == [True, False, True]


class Wrong:
    """A tokenizer of fastokens that encodes one letter as another."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def encode_batch_flat(self, texts: list[str]) -> Any:
        return self._real.encode_batch_flat([text.replace("H", "J") for text in texts])


def test_a_tokenizer_that_differs_on_a_probe_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Module:
        Tokenizer = type("T", (), {"from_json_str": lambda text: Wrong(fastokens.Tokenizer.from_json_str(text))})

    monkeypatch.setitem(sys.modules, "fastokens", Module)
    with pytest.raises(UnsupportedTokenizer, match=r"fastokens .* encodes .Hello world, .* differently"):
        TokenIds(tokenizer(EXACT["GLM"]).backend_tokenizer)


def test_a_difference_during_the_run_stops_it() -> None:
    encoder = DocumentEncoder(tokenizer(EXACT["GLM"]))
    encoder.use_fastokens()
    ids: Any = encoder._token_ids
    ids._fast = Wrong(ids._fast)
    texts = [RenderedText(f"<|s|>Hello {number}<|e|>", [(5, 17)]) for number in range(1000)]
    with pytest.raises(UserError, match=r'encodes a row differently.*set tokenizer_engine = "transformers" in'):
        encoder.encode(texts)


def run(assets: Path, folder: Path, engine: str) -> dict[str, Any]:
    """Run the job over the demo's rows, and return the manifest."""
    given = {"input": str(assets / "data"), "output": str(folder / engine), "model": str(assets / "model")}
    options = settings.load(PreprocessOptions, "preprocess", profile="local")
    preprocess.main(options.model_copy(update=given | {"tokenizer_engine": engine}))
    return json.loads((folder / engine / "manifest.json").read_text(encoding="utf-8"))


def test_a_run_has_the_same_bytes_with_both(
    assets: Path, tmp_path: Path, ray_session: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preprocessing, "FAST_BYTES", 0)  # also for a small input
    fast, slow = (run(assets, tmp_path, engine) for engine in ("auto", "transformers"))
    documents = fast["train"]["documents"] + fast["eval"]["documents"]
    assert fast["fastokens"] == {"version": token_ids.version(), "documents": documents}
    assert slow["fastokens"]["documents"] == 0
    assert fast | {"fastokens": None} == slow | {"fastokens": None}


def test_small_inputs_use_hugging_faces_tokenizer(assets: Path, tmp_path: Path, ray_session: None) -> None:
    assert run(assets, tmp_path, "auto")["fastokens"]["documents"] == 0
