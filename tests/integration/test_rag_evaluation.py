"""Test the scores that `evaluate_rag` gives to answers."""

import asyncio
from pathlib import Path

import pytest
from pretend_api import running

from raymill.errors import UserError
from raymill.rag import evaluation
from raymill.rag.evaluation import Question

SOURCES = [{"document": "a.md"}, {"document": "b.pdf#page=2"}]


@pytest.mark.parametrize(("document", "found"), [("a.md", True), ("b.pdf", True), ("b.pdf#page=2", True), ("b", False)])
def test_a_document_is_found_by_its_id_or_its_file(document: str, found: bool) -> None:
    assert evaluation.score(Question("?", document), "so", SOURCES).source_found is found


@pytest.mark.parametrize(
    ("answer", "cited"),
    [("So [1].", True), ("So [1, 2] and [2].", True), ("So.", False), ("So [1] and [3].", False), ("So [0].", False)],
)
def test_every_citation_must_refer_to_a_source(answer: str, cited: bool) -> None:
    assert evaluation.score(Question("?"), answer, SOURCES).cited is cited


def test_an_unknown_answer_needs_no_citation() -> None:
    for answer, sources in (("I do not know.", SOURCES), ("anything", [])):
        scored = evaluation.score(Question("?"), answer, sources)
        assert (scored.unknown, scored.cited, scored.source_found, scored.f1) == (True, None, None, None)


@pytest.mark.parametrize(
    ("given", "contains", "f1"),
    [
        ("The Eiffel Tower! [1]", True, 1),
        ("It is the eiffel-tower [1].", False, 0),  # as in SQuAD, a hyphen joins words
        ("It is an Eiffel tower [2].", True, 2 / 3),
        ("the towers", False, 0),
    ],
)
def test_answers_are_compared_as_in_squad(given: str, contains: bool, f1: float) -> None:
    scored = evaluation.score(Question("?", answer="Eiffel Tower"), given, SOURCES)
    assert (scored.contains, scored.f1) == (contains, pytest.approx(f1))


def test_an_error_of_the_api_ends_the_evaluation(tmp_path: Path) -> None:
    with running(tmp_path) as api:
        api.fail_every, api.failure_status = 1, 400
        with pytest.raises(UserError, match=r"serve_rag failed \(Error code: 400.*\)\. To see .* run: inv status"):
            asyncio.run(evaluation.ask_all(api.url, [Question("?")], 1))
