"""Test that timeouts grow on a slow machine."""

import itertools

import pytest

from cluster.emulator.drill import __main__ as drill
from cluster.emulator.drill import markets, stage
from pipeline.ray_support.workers import WorkerOptions


def test_a_machine_three_times_slower_has_three_times_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "slowness", lambda: 3.0)
    clock = itertools.count(0, 10)
    monkeypatch.setattr(stage.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(stage.time, "sleep", lambda _: None)
    answers = iter([False, False, True])
    assert stage.wait_for(lambda: next(answers), 10, "a host") == 30
    with pytest.raises(AssertionError, match="waited 30 s for a host"):
        stage.wait_for(lambda: False, 10, "a host")


@pytest.mark.parametrize(
    ("only", "rows"), [("", 23), (",", 23), ("limit", 2), ("limit,", 2), ("time limit , spend", 2)]
)
def test_faults_are_chosen_by_their_names(only: str, rows: int) -> None:
    assert len(drill.choose(only)) == rows


def test_a_zone_is_not_given_up_while_its_hosts_start() -> None:
    """The rows wait until AWS refuses. Their zone timeout is the project's default, far longer than any start."""
    assert f"{WorkerOptions.model_fields['zone_timeout_s'].default}, gang.offers()" in markets.GATHER
