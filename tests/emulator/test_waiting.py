"""Test that timeouts grow on a slow machine."""

import itertools

import pytest
from sleeping import in_this_thread

from raymill.emulator import waiting
from raymill.errors import UserError


def test_a_machine_three_times_slower_gets_three_times_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "slowdown", lambda: 3.0)
    clock = itertools.count(0, 10)
    monkeypatch.setattr(waiting.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(waiting.time, "sleep", in_this_thread(lambda _: None))
    answers = iter([False, False, True])
    assert waiting.wait_for(lambda: next(answers), 10, "a host") == 30
    with pytest.raises(UserError, match="waited 30 s for a host"):
        waiting.wait_for(lambda: False, 10, "a host")
