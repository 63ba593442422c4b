"""Test that no schema, regular expression or grammar of an answer stops other requests."""

import asyncio
import functools
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mistral_common
import numpy as np
import pytest
import torch
from llguidance import LLMatcher, LLTokenizer
from mistral_common.guidance.tokenizer import from_mistral_tokenizer
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.structured_output import backend_guidance
from vllm.v1.structured_output.backend_types import StructuredOutputOptions

from raymill.serving import accounting, grammars
from raymill.serving.grammar_worker import Vocabulary, tokenizer_of
from raymill.serving.grammars import GrammarChecker, Grammars, LimitedGrammar, MaskBudget

EOS = 256
SMALL = Vocabulary([*(bytes([number]) for number in range(256)), b"<|eos|>", b"<|call|>"], [EOS, EOS + 1], [EOS])
SLOW: dict[str, dict[str, Any]] = {
    "optional characters": {"regex": ".?" * 8000},
    "a pattern": {"json": {"type": "string", "pattern": ".?" * 15_000}},
    "a divisor": {"json": {"type": "number", "multipleOf": 15485863}},
    "names": {"json": {"type": "object", "patternProperties": {f"^{'a' * size}$": {} for size in range(1, 400)}}},
    "intersections": {
        "grammar": "start: A\nA: " + " & ".join(f"/(?s:.*)a.{{{size}}}(?s:.*)/" for size in range(200)) + "\n"
    },
    "lines": {"grammar": "\n" * 16_000},
}
"""Outputs that take seconds to hours to compile, or cannot be used in a step."""
HEAVY: dict[str, str] = {
    "nullable": "start: " + " ".join(["r?"] * 4000) + '\nr: "a" | "b" |\n',
    "many terminals": f"start: ({'|'.join(f'T{size}' for size in range(800))})*\n"
    + "".join(f"T{size}: /a{{{size}}}b?/\n" for size in range(800)),
    "ambiguous": 'start: s\ns: "a" | s s | s s s\n',
    "a chain": "start: r0\n" + "".join(f'r{i}: r{i + 1}? r{i + 1}? | "a"\n' for i in range(600)) + 'r600: "b"\n',
    "copies": 'start: x{1000,100000}\nx: "a"{1,1000} "b"{0,1000}\n',
}
"""Grammars that compile quickly, but have slow steps."""
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.fixture
def checker(monkeypatch: pytest.MonkeyPatch) -> GrammarChecker:
    monkeypatch.setattr(grammars, "_backend", lambda *_: SimpleNamespace(ll_tokenizer=tokenizer_of(SMALL)))
    return GrammarChecker(None, None)


async def verdict(checker: GrammarChecker, key: str = "", **output: Any) -> str:
    """Return the grammar, or the error."""
    accounting.current.set(SimpleNamespace(key=key))  # type: ignore[arg-type]
    try:
        return (await checker.check(StructuredOutputsParams(**output))).grammar
    except VLLMValidationError as error:
        return f"400 {error}"


@pytest.mark.parametrize("name", SLOW)
def test_what_takes_long_is_refused_while_others_are_served(checker: GrammarChecker, name: str) -> None:
    async def race() -> tuple[list[str], str]:
        """Return the answers of a key that sends three such outputs, and the one that another key gets in between."""
        await verdict(checker, json=SCHEMA)  # the process has started
        outputs = [{next(iter(SLOW[name])): vary(next(iter(SLOW[name].values())), number)} for number in range(3)]
        slow = [asyncio.create_task(verdict(checker, "slow", **output)) for output in outputs]
        await asyncio.sleep(0)
        other = await verdict(checker, "other", regex="[ab]+")
        assert not slow[-1].done()
        return [await one for one in slow], other

    started = time.monotonic()
    answers, other = asyncio.run(race())
    assert time.monotonic() - started < 30  # some would take hours
    assert all(answer.startswith("400 the schema or grammar of the answer ") for answer in answers)
    assert not other.startswith("400")


def vary(value: Any, number: int) -> Any:
    """Return another output that is as slow, because results are kept."""
    return value + "\n" * number if isinstance(value, str) else value | {"title": str(number)}


REPETITIONS: list[dict[str, Any]] = [
    {"json": {"type": "string", "pattern": "^[a-z]{1,30000}$"}},
    {"json": {"type": "array", "minItems": 100_000, "items": {"type": "array", "minItems": 10**9}}},
    {"json": {"type": "string", "minLength": 10**9}},
    {"regex": r"([a-z(]\(b{50}){50}"},
    {"regex": "(((a{99}){99}){99}){99}" * 99},
    {"regex": "a{%s}" % ("9" * 9000)},
    {"grammar": "root ::= [a-z]{30000}"},
    {"grammar": "start: x{100000}\nx: y{100000}\ny: z{100000}\nz: /a/\n"},
    *({"regex": piece * 4000} for piece in ("{", " ", "9", "[", "(", "\\", "a{1}", "{ 1 ,", "){2}", "/")),
    *({"grammar": piece * 4000} for piece in ("start: ", '"', "\\", "(", "/", "#", "%", "root ::= a\n", "|")),
    *({"json": json.dumps(piece)} for piece in ({"allOf": [{}] * 9000}, {"anyOf": [{}] * 9000}, {"enum": [""] * 9000})),
]


@pytest.mark.parametrize("number", range(len(REPETITIONS)))
def test_any_output_is_answered_soon(checker: GrammarChecker, number: int) -> None:
    started = time.monotonic()
    assert asyncio.run(verdict(checker, **REPETITIONS[number]))
    assert time.monotonic() - started < 10  # at most 0.3 s of CPU time, and the start of the process


def test_a_result_is_kept_and_does_not_depend_on_the_order(checker: GrammarChecker) -> None:
    outputs: list[dict[str, Any]] = [
        {"choice": ["a\r\nb"]},
        {"regex": "\\"},
        {"regex": r"\p{L}+"},
        {"json": {"$ref": "#"}},
        {"json": SCHEMA},
        {"grammar": 'root ::= "a"'},
        {"json_object": True},
        {"structural_tag": json.dumps({"format": {"type": "const_string", "value": "<|call|>a"}})},
        {"structural_tag": json.dumps({"format": {"type": "token", "token": 5}})},
        {"structural_tag": "{}"},
    ]

    async def ask(order: list[dict[str, Any]]) -> dict[str, str]:
        checker._results.clear()
        return {str(output): await verdict(checker, **output) for output in order}

    async def both() -> tuple[dict[str, str], dict[str, str]]:
        return await ask(outputs), await ask(outputs[::-1])

    first, second = asyncio.run(both())
    assert first == second
    refused = [number for number, output in enumerate(outputs) if first[str(output)].startswith("400")]
    assert refused == [1, 3, 8, 9]
    assert "'token' are not supported" in first[str(outputs[8])]
    assert "no text matches it" in first[str(outputs[3])]
    assert "ends with a backslash" in first[str(outputs[1])]


def test_a_client_that_disconnects_does_not_get_a_second_process(checker: GrammarChecker) -> None:
    async def disconnect() -> int:
        await verdict(checker, json=SCHEMA)
        for number in range(20):
            task = asyncio.create_task(verdict(checker, regex=".?" * 8000 + "a" * number))
            await asyncio.sleep(0.001)
            task.cancel()
        return checker._sent

    assert asyncio.run(disconnect()) == 2


def test_the_process_is_replaced(checker: GrammarChecker) -> None:
    async def replaced() -> str:
        await verdict(checker, json=SCHEMA)
        first = checker._process
        assert first
        first.kill()
        await first.wait()
        return await verdict(checker, regex="a")

    assert not asyncio.run(replaced()).startswith("400")


# ---------------------------------------------------------------- the engine's side


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Grammars:
    """A backend with a vocabulary of 131,072 tokens, as large models have."""
    monkeypatch.setattr(backend_guidance, "is_mistral_tokenizer", lambda _: True)
    config = SimpleNamespace(disable_any_whitespace=False, disable_additional_properties=False)
    tokenizer = SimpleNamespace(llg_tokenizer=large_tokenizer())
    size = tokenizer.llg_tokenizer.vocab_size
    return Grammars(SimpleNamespace(structured_outputs_config=config), tokenizer, size)  # type: ignore[arg-type]


@functools.cache
def large_tokenizer() -> LLTokenizer:
    file = Path(mistral_common.__file__).parent / "data" / "tekken_240911.json"
    return from_mistral_tokenizer(MistralTokenizer.from_file(str(file)))


def compiled(backend: Grammars, lark: str) -> LimitedGrammar:
    return backend.compile_grammar(StructuredOutputOptions.GRAMMAR, lark)


@pytest.mark.parametrize("name", HEAVY)
def test_a_key_with_many_slow_sequences_does_not_stop_the_engine(backend: Grammars, name: str) -> None:
    heavy = [compiled(backend, HEAVY[name]) for _ in range(64)]
    usual = compiled(backend, 'start: "a" | "b"\n')
    mask = backend.allocate_token_bitmask(1)
    for step in range(8):
        started = time.process_time()
        with backend.filling(of_key(1, heavy)):
            for grammar in heavy:
                before = time.process_time()
                grammar.fill_bitmask(mask, 0)
                assert time.process_time() - before < 0.5  # usually at most 0.13 s
        assert time.process_time() - started < 2  # the budget is 0.5 s for all of them, and the machine may be slow
        heavy = [grammar for grammar in heavy if grammar.accept_tokens("", [one_of(mask)])]
        with backend.filling(of_key(2, [usual])):
            usual.fill_bitmask(mask, 0)
        assert allowed(mask) == [backend.ll_tokenizer.tokenize_str(text)[0] for text in ("a", "b")], step
    assert usual.accept_tokens("", [one_of(mask)])


def of_key(number: int, grammars: list[LimitedGrammar]) -> list[Any]:
    """Return requests with the grammars."""
    outputs = [SimpleNamespace(grammar=grammar) for grammar in grammars]
    return [SimpleNamespace(priority=number, structured_output_request=output) for output in outputs]


def one_of(mask: torch.Tensor) -> int:
    """Return the last allowed token, for many tokens of many bytes."""
    return allowed(mask)[-1]


def allowed(mask: torch.Tensor) -> list[int]:
    words = mask[0].numpy().view("uint8")
    return np.flatnonzero(np.unpackbits(words, bitorder="little")).tolist()


def test_a_sequence_that_cannot_continue_ends_with_an_error(backend: Grammars) -> None:
    grammar = compiled(backend, HEAVY["nullable"])
    mask = backend.allocate_token_bitmask(1)
    with backend.filling([]):  # for draft tokens. vLLM would end the engine if the grammar refused one
        grammar.fill_bitmask(mask, 0)
        assert grammar.accept_tokens("", [5])
        grammar.rollback(1)
    assert grammar.failed
    assert not grammar.accept_tokens("", [5])
    assert not grammar.accept_tokens("", [backend.ll_tokenizer.eos_token])  # vLLM takes this for a good end


def test_usual_masks_do_not_use_up_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = MaskBudget()
    assert all(budget.spend(0.009) for _ in range(1000))
    assert all(budget.spend(0.1) for _ in range(4))
    assert not budget.spend(0.2)
    assert not budget.spend(0)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 60)
    assert budget.spend(0.4)


def test_a_grammar_is_compiled_once(backend: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def count(tokenizer: LLTokenizer, text: str, **options: Any) -> LLMatcher:
        calls.append(text)
        return LLMatcher(tokenizer, text, **options)

    monkeypatch.setattr(grammars, "LLMatcher", count)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda number: compiled(backend, f"start: /[ab]{{{number % 2}}}/\n"), range(32)))
    assert len(calls) == 2
    mask = backend.allocate_token_bitmask(1)
    for grammar in found[1::2]:
        grammar.fill_bitmask(mask, 0)
        assert len(allowed(mask)) == 2  # each sequence has a state of its own
        assert grammar.accept_tokens("", [one_of(mask)])
    for number in range(grammars.KEPT_GRAMMARS + 5):
        compiled(backend, f"start: /[ab]{{{number}}}/\n")
    assert len(backend._compiled) == grammars.KEPT_GRAMMARS


def test_only_checked_grammars_reach_llguidance(backend: Grammars) -> None:
    with pytest.raises(ValueError, match="not checked"):
        backend.compile_grammar(StructuredOutputOptions.JSON, "{}")


def test_every_sequence_with_an_output_is_checked(checker: GrammarChecker) -> None:
    seen: list[Any] = []

    async def generate(prompt: Any, params: SamplingParams, *_: Any, **__: Any) -> Any:
        seen.append(params.structured_outputs)
        yield SimpleNamespace(outputs=[SimpleNamespace(finish_reason="error" if prompt == "too complex" else "stop")])

    client = SimpleNamespace(generate=generate)
    grammars.install(client, checker)

    async def answers(prompt: str, output: StructuredOutputsParams | None) -> int:
        params = SamplingParams(structured_outputs=output)
        return len([each async for each in client.generate(prompt, params, "id", priority=1)])

    async def ask() -> None:
        assert await answers("hi", None) == 1
        assert await answers("hi", StructuredOutputsParams(json=SCHEMA)) == 1
        for prompt, output in (("hi", {"regex": "("}), ("too complex", {"regex": "a"})):
            with pytest.raises(VLLMValidationError):
                await answers(prompt, StructuredOutputsParams(**output))

    asyncio.run(ask())
    assert seen[0] is None
    assert [params.json for params in seen[1:]] == [None, None]
    assert all(params.grammar for params in seen[1:])
