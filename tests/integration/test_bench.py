"""Test `inv bench` with a server whose delays are known."""

import json
import re
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest
from pretend_api import PretendApi, running
from rich.console import Console

from raymill.clients import bench
from raymill.clients.bench import Load
from raymill.errors import UserError

PIECES, PAUSE_S = 6, 0.05


@pytest.fixture
def api(tmp_path: Path) -> Iterator[PretendApi]:
    with running(tmp_path) as started:
        started.chunks, started.delay_s = ["word "] * PIECES, PAUSE_S
        yield started


def run(api: PretendApi, folder: Path, concurrent: tuple[int, ...] = (1, 4), seconds: float = 1.5) -> tuple[dict, str]:
    """Run the benchmark, and return the saved results and the output."""
    console = Console(record=True, width=150)
    bench.bench(api.url, {}, Load(seconds, PIECES, concurrent), console, folder)
    return json.loads((folder / "bench.json").read_text()), console.export_text()


def test_the_results_match_the_servers_delays(api: PretendApi, tmp_path: Path) -> None:
    saved, printed = run(api, tmp_path / "results")
    one, four = saved["levels"]
    whole_s = (PIECES - 1) * PAUSE_S
    for level in (one, four):
        # a piece that arrives late makes the next gap shorter
        assert 900 * PAUSE_S < level["between_ms"][0] < 1500 * PAUSE_S
        assert 0 < level["first_ms"][0] < 1000 * PAUSE_S
        assert level["first_ms"][0] <= level["first_ms"][1]
        assert level["errors"] == {}
    assert 0.5 / whole_s < one["requests_per_s"] <= 1 / whole_s
    assert 2 < four["requests_per_s"] / one["requests_per_s"] < 5
    assert one["tokens_per_s"] == pytest.approx(PIECES * one["requests_per_s"])
    assert "2 levels of 1.5 s, 3 s in total" in printed
    assert re.search(r"^ +4 +\d", printed, re.MULTILINE)
    assert (tmp_path / "results" / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_prompts_are_the_same_in_each_run_and_never_repeat(api: PretendApi, tmp_path: Path) -> None:
    asked = []
    for _ in range(2):
        api.requests.clear()
        run(api, tmp_path, (2,), 0.4)
        asked.append([body["messages"][0]["content"] for body in api.requests if body["max_tokens"] == PIECES])
        assert len(set(asked[-1])) == len(asked[-1]) == len(api.requests) - 2  # two warm-up requests
    assert set(asked[0][:2]) == set(asked[1][:2])
    assert statistics.mean(len(prompt.split()) for prompt in asked[0]) == bench.PROMPT_WORDS + 1


def test_errors_are_counted_and_shown(api: PretendApi, tmp_path: Path) -> None:
    api.fail_every = 3
    saved, printed = run(api, tmp_path, (1,))
    [(words, count)] = saved["levels"][0]["errors"].items()
    assert words.endswith("busy")
    assert 1 <= count <= 3
    assert f"{count} × {words}" in printed


def test_a_rate_limit_ends_the_measurement_and_the_remedy_is_shown(api: PretendApi, tmp_path: Path) -> None:
    api.fail_every, api.failure_status = 4, 429
    saved, printed = run(api, tmp_path, (1, 2))
    assert [level["concurrent"] for level in saved["levels"]] == [1]
    assert (
        "1 × the key's rate limit is exceeded. Raise it, then measure again: inv submit serve_llm -- --key-requests"
        in printed
    )


def test_a_server_that_fails_every_request_is_an_error(api: PretendApi, tmp_path: Path) -> None:
    api.deleted = {"small"}
    with pytest.raises(UserError, match=r"answered no request from 1 concurrent clients .*does not exist"):
        run(api, tmp_path, (1,), 0.2)


def test_an_unreachable_server_is_an_error(api: PretendApi, tmp_path: Path) -> None:
    api.url = "http://127.0.0.1:9/v1"
    with pytest.raises(UserError, match=r"nothing answers at .* Run: inv submit serve_llm"):
        run(api, tmp_path)
