"""Test that a document has the tokens of a server's prompt, followed by those that the model generates."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from raymill.data.document_encoder import DocumentEncoder
from raymill.data.template_renderer import RenderedText
from raymill.data.tokenization import NOT_TRAINED, DocumentTokenizer
from raymill.generation.prompts import PromptTokenizer, RemainingRows

TEXTS = [
    "Which one? Answer: yes, this one.\n\n\n",
    "Hello there.\n\n  Two words  \n",
    "QA AQ <think>\n\n</think>\n\n so",
] * 9


def tokenizer(change: Callable[[Tokenizer], Any] = lambda bpe: None, **flags: bool) -> PreTrainedTokenizerFast:
    """Return a small BPE with the added tokens <s>, </s> and <|a|>, which has `flags`."""
    bpe = Tokenizer(models.BPE(unk_token="<unk>"))
    change(bpe)
    added = [AddedToken(token, normalized=False, special=True, **flags) for token in ("<s>", "</s>", "<|a|>")]
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<unk>", *added],
        initial_alphabet=[*pre_tokenizers.ByteLevel.alphabet(), "\u2581"],
        show_progress=False,
    )
    bpe.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def byte_level(bpe: Tokenizer, *, prefix: bool = False) -> None:
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=prefix), decoders.ByteLevel()


def metaspace(scheme: Any, *, split: bool) -> Callable[[Tokenizer], None]:
    def change(bpe: Tokenizer) -> None:
        bpe.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)

    return change


def llama_2(bpe: Tokenizer) -> None:
    bpe.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])


def gemma(bpe: Tokenizer) -> None:
    bpe.normalizer = normalizers.Replace(" ", "\u2581")


def composing(bpe: Tokenizer) -> None:
    bpe.normalizer = normalizers.NFC()
    byte_level(bpe)


KINDS = {
    "byte level": tokenizer(byte_level),
    "byte level with a space before each text": tokenizer(lambda bpe: byte_level(bpe, prefix=True)),
    "Mistral: a space before the first text": tokenizer(metaspace("first", split=False)),
    "words with a space before the first text": tokenizer(metaspace("first", split=True)),
    "a space before each text": tokenizer(metaspace("always", split=True)),
    "Llama 2: a normalizer adds the space": tokenizer(llama_2),
    "Gemma: no space": tokenizer(gemma),
    "Phi: added tokens include white space after them": tokenizer(byte_level, rstrip=True),
    "added tokens include white space before them": tokenizer(byte_level, lstrip=True),
    "a normalizer that joins characters": tokenizer(composing),
}
TURNS = (
    "yes",
    " yes",
    "\n\nyes",
    "\n",
    "  two  words \n",
    "A",
    ".",
    "\u0301x",
    "</think>",
    "yes</s>",
    " a</s> b<|a|> c",
)
PROMPTS = ("Q", "\u6f22", "<s>Q: ", "<|a|>", "<|a|>\n", "<s>Hello<|a|>", "<think>\n", "Answer:\n\n", "e", "one ")


SPACE_AFTER_TOKENS = {
    "byte level with a space before each text",
    "a space before each text",
    "Llama 2: a normalizer adds the space",
}


def spaces(text: str) -> int:
    text = text.replace("\u2581", " ").replace("\u0120", " ")
    return len(text) - len(text.lstrip(" "))


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_and_its_turn_have_their_own_tokens(kind: str) -> None:
    made, encoder = KINDS[kind], DocumentEncoder(KINDS[kind])
    for prompt in PROMPTS:
        for turn in TURNS:
            text = prompt + turn
            [[document]] = encoder.encode([RenderedText(text, [(len(prompt), len(text))])])
            served = made.encode(prompt, add_special_tokens=False)
            assert document.ids[: len(served)] == served
            assert document.spans == [(len(served), len(document.ids))], "the whole turn is trained, and nothing else"
            generated = "".join(made.convert_ids_to_tokens(document.ids[len(served) :]))
            if kind in SPACE_AFTER_TOKENS and served[-1] == made.convert_tokens_to_ids("<|a|>"):
                assert document.ids == made.encode(text, add_special_tokens=False)
            else:
                assert spaces(generated) == spaces(turn), (prompt, turn, "a space that is not in the turn")


@pytest.mark.parametrize("kind", KINDS)
def test_each_turn_of_several_follows_what_a_server_would_send(kind: str) -> None:
    made, encoder = KINDS[kind], DocumentEncoder(KINDS[kind])
    for opening in ("<|a|>", "<|a|>\n", "<|a|><think>\n", "Answer: ", "A"):
        for turn in TURNS:
            text, spans = "<s>", []
            for number in range(3):
                text += f"Q{number}\n{opening}"
                spans.append((len(text), len(text) + len(turn) + 4))
                text += f"{turn}</s>\n"
            trained = [
                (document.ids[:start], document.ids[start:stop])
                for document in encoder.encode([RenderedText(text, spans)])[0]
                for start, stop in document.spans
            ]
            served = [made.encode(text[:start], add_special_tokens=False) for start, _ in spans]
            assert [before for before, _ in trained] == served
            assert len({tuple(generated) for _, generated in trained}) == 1
            assert all(generated[-1] == made.eos_token_id for _, generated in trained)


def test_turns_share_a_document_if_their_tokens_are_those_of_the_whole_text() -> None:
    encoder = DocumentEncoder(KINDS["byte level"])
    for turn, documents in (("yes</s>", 1), ("\n</s>", 2)):
        text = f"<|a|>\n{turn}Q<|a|>\n{turn}"
        second = text.rindex(turn)
        spans = [(6, 6 + len(turn)), (second, len(text))]
        assert len(encoder.encode([RenderedText(text, spans)])[0]) == documents


# ---------------------------------------------------------------- texts without a chat template


def folder_with(made: PreTrainedTokenizerFast, folder: Path, before: str = "", after: str = "") -> str:
    """Save a tokenizer that adds these tokens to a text, and return the folder."""
    ids = made.convert_tokens_to_ids
    single = " ".join(filter(None, (before, "$A", after)))
    tokens = [(token, ids(token)) for token in {*before.split(), *after.split()}]
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=tokens)
    made.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return str(folder)


SPECIAL = {
    "no tokens": ("", ""),
    "BOS": ("<s>", ""),
    "two tokens before": ("<|a|> <s>", ""),
    "BOS and EOS": ("<s>", "</s>"),
}


@pytest.mark.parametrize("name", SPECIAL)
@pytest.mark.parametrize(
    "kind", [byte_level, metaspace("first", split=False), llama_2], ids=["bytes", "first", "llama"]
)
def test_training_and_generate_encode_a_prompt_in_the_same_way(
    tmp_path: Path, kind: Callable[[Tokenizer], None], name: str
) -> None:
    made = tokenizer(kind)
    folder = folder_with(made, tmp_path, *SPECIAL[name])
    training, generating = DocumentTokenizer(folder, 512), PromptTokenizer(folder, "id", 512)
    for prompt in ("Q", "Q ", "Hello there.\n", f"{SPECIAL[name][0].replace(' ', '')}Q", "<s>Q</s>"):
        row = json.dumps({"id": 1, "prompt": prompt}).encode()
        generated = generating.prompt(row, RemainingRows(1, frozenset(), frozenset()))
        assert generated
        for completion in ("A", " yes", "\nA", "A</s>", "A</s>\n"):
            [document] = training.documents({"prompt": prompt, "completion": completion})
            ids, count = document.input_ids.tolist(), len(generated["tokenized_prompt"])
            assert ids[:count] == generated["tokenized_prompt"]
            assert document.labels.tolist() == [NOT_TRAINED] * count + ids[count:]
            assert ids[count:].count(made.eos_token_id) == 1
            assert ids[-1] == made.eos_token_id
        if not prompt.startswith("<"):
            assert generated["tokenized_prompt"] == made(prompt)["input_ids"]


@pytest.mark.parametrize("name", SPECIAL)
@pytest.mark.parametrize("text", ["Q", "<s>Q A</s>", "<s>Q</s> \n", "Q</s>", "<s>Q", "<s>Q</s><s>A</s>"])
def test_a_text_has_the_tokens_that_the_tokenizer_adds_only_once(tmp_path: Path, name: str, text: str) -> None:
    made = tokenizer(byte_level)
    before, _ = SPECIAL[name]
    [document] = DocumentTokenizer(folder_with(made, tmp_path, *SPECIAL[name]), 512).documents({"text": text})
    added = "" if text.startswith(before.replace(" ", "")) else before.replace(" ", "")
    assert made.decode(document.input_ids.tolist()) == added + text.strip().removesuffix("</s>") + "</s>"
    untrained = max(1, len(before.split()))  # nothing is before the first token, so a model cannot learn it
    assert document.labels.tolist() == [NOT_TRAINED] * untrained + document.input_ids[untrained:].tolist()
