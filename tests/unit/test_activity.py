"""Test when a cluster counts as used, and when it warns that it is idle."""

import io
from http.client import IncompleteRead
from typing import Any

import pytest

from raymill.common.limits import LimitsSection
from raymill.node import activity, ray_jobs
from raymill.node.activity import Activity

NOW = 1_000_000.0


class Head:
    """The jobs and the metrics of a head."""

    def __init__(self) -> None:
        self.jobs: list[dict[str, Any]] = []
        self.requests = 0.0
        self.error: Exception | None = None

    def all_jobs(self) -> list[dict[str, Any]]:
        if self.error:
            raise self.error
        return self.jobs

    def last_use(self, tracker: Activity, now: float) -> float:
        tracker.check(now)
        return tracker.last


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> Head:
    made = Head()
    monkeypatch.setattr(ray_jobs, "all_jobs", made.all_jobs)
    monkeypatch.setattr(activity, "count_requests", lambda: made.requests)
    return made


def job(status: str, end_time: float | None = None) -> dict[str, Any]:
    return {"status": status, "end_time": None if end_time is None else end_time * 1000}


@pytest.mark.parametrize("status", ["PENDING", "RUNNING"])
def test_a_job_that_waits_or_runs_is_use(head: Head, status: str) -> None:
    head.jobs = [job("SUCCEEDED", NOW - 900), job(status)]
    assert head.last_use(Activity(NOW - 1000, 0), NOW) == NOW


def test_a_job_that_ended_between_two_checks_was_use(head: Head) -> None:
    head.jobs = [job("FAILED", NOW - 20), job("SUCCEEDED", NOW - 900)]
    assert head.last_use(Activity(NOW - 1000, 0), NOW) == NOW - 20


def test_only_new_requests_are_use(head: Head) -> None:
    tracker, head.requests = Activity(NOW - 1000, 7), 7.0
    assert head.last_use(tracker, NOW) == NOW - 1000
    head.requests = 8.0
    assert head.last_use(tracker, NOW + 30) == NOW - 1000  # not checked again yet
    assert head.last_use(tracker, NOW + 60) == NOW + 60
    assert head.last_use(tracker, NOW + 120) == NOW + 60
    head.requests = 2.0  # Serve was started again
    assert head.last_use(tracker, NOW + 180) == NOW + 180


@pytest.mark.parametrize("error", [OSError("no answer"), KeyError("no answer"), IncompleteRead(b"", 7)], ids=repr)
def test_what_cannot_be_read_counts_as_use(head: Head, log: io.StringIO, error: Exception) -> None:
    head.error = error
    assert head.last_use(Activity(NOW - 1000, 0), NOW) == NOW
    assert "unknown, so the cluster counts as used: " in log.getvalue()


def test_an_idle_cluster_warns_half_an_hour_before_its_end() -> None:
    limits = LimitsSection(hours=24, dollars=500, idle_hours=3)
    assert limits.idle_warning(2.4) == ""
    assert limits.idle_warning(2.6).startswith("no job and no request for 2.6 hours, so the cluster shuts itself down")
    assert "in 24 minutes. To keep it, use it, or run: inv limits --idle-hours 0" in limits.idle_warning(2.6)


def test_a_short_idle_time_warns_when_half_of_it_is_over() -> None:
    limits = LimitsSection(hours=24, dollars=500, idle_hours=0.2)
    assert limits.idle_warning(0.09) == ""
    assert "in 5 minutes" in limits.idle_warning(0.11)


def test_without_idle_hours_an_idle_cluster_keeps_running() -> None:
    assert LimitsSection(hours=24, dollars=500).idle_warning(1000) == ""
