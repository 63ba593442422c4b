"""Test what the limit in dollars counts if AWS does not name a price, and while nobody counts."""

import dataclasses
import datetime
import json
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError, ConnectTimeoutError

from raymill.common import cluster_file, prices
from raymill.common.instances import Instance
from raymill.common.limits import LimitsSection
from raymill.errors import UserError
from raymill.instance_types import highest_price
from raymill.node import spending, state, watchdog_head
from raymill.node.spending import Spending

FILE = cluster_file.load()
P5, HEAD = "p5.48xlarge", "m6i.2xlarge"
HOUR = 3600.0
DENIED = ClientError({"Error": {"Code": "AccessDenied", "Message": "with an explicit deny"}}, "GetProducts")
THROTTLED = ClientError({"Error": {"Code": "ThrottlingException", "Message": "Rate exceeded"}}, "GetProducts")
NO_ANSWER = ConnectTimeoutError(endpoint_url="https://api.pricing.us-east-1.amazonaws.com")
NO_PRICE = UserError("AWS has no price for p5.48xlarge")


class Market:
    """Answers like AWS, or fails."""

    def __init__(self) -> None:
        self.on_demand = {HEAD: 0.4, P5: 55.0}
        self.spot: dict[str, dict[str, float]] = {P5: {"us-east-1a": 20.0}}
        self.error: Exception | None = None
        self.spot_error: Exception | None = None
        self.asked: list[str] = []

    def price(self, file: object, name: str) -> float:
        self.asked.append(name)
        if self.error:
            raise self.error
        if name not in self.on_demand:
            raise UserError(f"AWS has no price for {name}")
        return self.on_demand[name]

    def spot_prices(self, file: object, names: Collection[str]) -> dict[str, dict[str, float]]:
        if self.spot_error:
            raise self.spot_error
        return {name: self.spot[name] for name in names if name in self.spot}


@pytest.fixture
def market(monkeypatch: pytest.MonkeyPatch) -> Market:
    made = Market()
    monkeypatch.setattr(prices, "_on_demand", made.price)
    monkeypatch.setattr(prices, "spot_prices", made.spot_prices)
    return made


def machine(
    instance_type: str = P5, market: str = "on-demand", zone: str = "us-east-1a", age_s: float = 9e9
) -> Instance:
    fields: dict[str, Any] = {field.name: "" for field in dataclasses.fields(Instance)}
    launched = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=min(age_s, 1e8))
    own: dict[str, Any] = {
        "instance_type": instance_type,
        "market": market,
        "zone": zone,
        "launched": launched,
        "state": "running",
    }
    return Instance(**fields | own)


@pytest.mark.parametrize("error", [DENIED, THROTTLED, NO_ANSWER, NO_PRICE], ids=["denied", "throttled", "dead", "none"])
def test_a_price_that_aws_does_not_name_counts_at_the_highest(market: Market, error: Exception) -> None:
    """Before, two p5 that joined while one query failed cost 0.38 dollars in the next hour."""
    costs = Spending(FILE, {})
    costs.add([machine(HEAD)], 0)
    assert costs.warning == ""
    market.error, market.spot = error, {}
    market.spot_error = None if error is NO_PRICE else error
    running = [machine(HEAD), machine(), machine(market="spot")]
    assert costs.add(running, HOUR) == 0.4 + 2 * highest_price(P5)
    assert costs.dollars == pytest.approx(0.4 + 2 * highest_price(P5))
    assert costs.dollars > 0.4 + 2 * 55, "never less than the real price"
    assert f"the price of {P5} (" in costs.warning
    assert f"counts {P5} at {highest_price(P5):.2f} dollars per hour" in costs.warning
    assert f"{2 * highest_price(P5):.2f} of these" in costs.caveat


def test_an_unknown_price_is_asked_for_at_the_next_tick_and_then_counts_in_retrospect(market: Market) -> None:
    costs = Spending(FILE, {})
    market.error = market.spot_error = THROTTLED
    costs.add([machine(), machine(market="spot")], HOUR)
    market.error = market.spot_error = None
    assert costs.add([], 5) == 0, "both have ended, and their price is still asked for"
    assert costs.dollars == pytest.approx(55 + 20)
    assert (costs.warning, costs.caveat, costs.assumed) == ("", "", 0)


def test_a_type_that_joins_later_is_asked_for_at_once_and_at_each_tick(market: Market) -> None:
    costs = Spending(FILE, {})
    costs.add([machine(HEAD)], 5)
    market.error = THROTTLED
    assert costs.add([machine(HEAD), machine()], 5) == 0.4 + highest_price(P5)
    market.error = None
    assert costs.add([machine(HEAD), machine()], 5) == 55.4
    assert market.asked == [HEAD, P5, P5]


def test_an_answer_of_another_form_is_no_answer(market: Market) -> None:
    market.error = market.spot_error = KeyError("OnDemand")
    costs = Spending(FILE, {})
    costs.add([machine()], HOUR)
    assert costs.dollars == highest_price(P5)


def test_an_instance_that_aws_has_not_listed_before_counts_from_its_launch(market: Market) -> None:
    """For example, because questions about instances failed for hours."""
    costs = Spending(FILE, {})
    costs.add([machine(HEAD)], 5)
    costs.add([machine(HEAD), dataclasses.replace(machine(age_s=2 * HOUR), id="i-2")], 5)
    assert costs.dollars == pytest.approx(2 * 55, rel=1e-3)


def test_known_prices_are_not_asked_for_at_each_tick_if_new_ones_fail(market: Market) -> None:
    costs = Spending(FILE, {})
    costs.add([machine(HEAD)], 5)
    market.error = THROTTLED
    costs._read = float("-inf")  # an hour later
    for _ in range(3):
        costs.add([machine(HEAD)], 5)
    assert market.asked == [HEAD, HEAD]


def test_known_prices_are_not_asked_for_at_each_tick(market: Market) -> None:
    costs = Spending(FILE, {})
    for _ in range(3):
        costs.add([machine(HEAD), machine()], 5)
    assert sorted(market.asked) == [HEAD, P5]


def test_the_first_answer_may_fail(market: Market) -> None:
    """Before, the watchdog failed in a loop, and checked no limit."""
    market.error = market.spot_error = DENIED
    costs = Spending(FILE, {})
    costs.add([machine(HEAD)], HOUR)
    assert costs.dollars == highest_price(HEAD) > 0.4


def test_without_the_spot_price_a_spot_instance_counts_at_the_on_demand_price(market: Market) -> None:
    market.spot_error = THROTTLED
    costs = Spending(FILE, {})
    assert costs.add([machine(market="spot")], HOUR) == 55
    assert f"{P5} at 55.00" in costs.warning
    market.spot_error = None
    assert costs.add([machine(market="spot")], 0) == 20
    assert costs.dollars == pytest.approx(20)


def test_a_zone_without_a_spot_price_has_the_on_demand_price(market: Market) -> None:
    """AWS has answered, so nothing is unknown, and spot instances never cost more."""
    costs = Spending(FILE, {})
    assert costs.add([machine(market="spot", zone="us-east-1f")], HOUR) == 55
    assert costs.warning == ""


def test_a_type_outside_the_table_counts_as_the_most_expensive_one(market: Market) -> None:
    costs = Spending(FILE, {})
    assert costs.add([machine("x99.metal")], 0) == highest_price("p6-b200.48xlarge")


def test_prepaid_and_ending_instances_need_no_price(market: Market) -> None:
    ending = dataclasses.replace(machine("x99.metal"), state="shutting-down")
    costs = Spending(FILE, {})
    assert costs.add([machine("x99.metal", market="capacity-block"), ending], HOUR) == 0
    assert (costs.dollars, costs.warning, market.asked) == (0, "", [])


def test_a_new_watchdog_continues_with_unknown_and_known_prices(market: Market) -> None:
    market.on_demand = {HEAD: 0.4}
    first = Spending(FILE, {"dollars": 7.0})  # as an earlier version saved it
    first.add([machine(HEAD), machine()], HOUR)
    saved = json.loads(json.dumps(first.state()))
    market.error = market.spot_error = NO_ANSWER
    second = Spending(FILE, saved)
    assert second.dollars == first.dollars == pytest.approx(7.4 + highest_price(P5))
    second.add([machine(HEAD), machine()], HOUR)
    assert second.dollars == pytest.approx(7.8 + 2 * highest_price(P5))
    market.on_demand[P5], market.error = 55.0, None
    second.add([], 5)
    assert second.dollars == pytest.approx(7.8 + 2 * 55)


def test_prices_are_read_again_after_an_hour_and_old_ones_apply_until_then(
    market: Market, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1000.0]
    monkeypatch.setattr(spending.time, "monotonic", lambda: clock[0])
    costs = Spending(FILE, {})
    assert costs.add([machine()], 0) == 55
    market.on_demand[P5], market.error = 60.0, THROTTLED
    clock[0] += spending.PRICES_S
    assert costs.add([machine()], 0) == 55
    market.error = None
    clock[0] += spending.RETRY_S
    assert costs.add([machine()], 0) == 60, "asked again after minutes, and not an hour later"


@pytest.mark.parametrize(("seconds", "age_s", "counted_s"), [(HOUR, 60, 60), (5, HOUR, 5), (-HOUR, HOUR, 0)])
def test_an_instance_counts_from_its_launch_and_never_backwards(
    market: Market, seconds: float, age_s: float, counted_s: float
) -> None:
    """After a gap, for example because the watchdog was dead, or if the clock was set back."""
    costs = Spending(FILE, {})
    costs.add([machine(age_s=age_s)], seconds)
    assert costs.dollars == pytest.approx(55 * counted_s / HOUR, abs=0.01)


@pytest.fixture
def counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the seconds for which a watchdog counts costs. It runs in an empty folder, without AWS."""
    seconds: list[float] = []
    for name in ("LEASE", "LAUNCHED"):
        monkeypatch.setattr(watchdog_head, name, tmp_path / name)
    watchdog_head.LAUNCHED.touch()
    monkeypatch.setattr(state, "STATE_FILE", tmp_path / "watchdog.json")
    monkeypatch.setattr(state, "STATE_WITHOUT_DISK", tmp_path / "memory.json")
    monkeypatch.setattr(watchdog_head.limits, "load", lambda: LimitsSection(hours=8760, dollars=500))
    monkeypatch.setattr(watchdog_head.instances, "living", lambda file: [])
    monkeypatch.setattr(watchdog_head.HeadWatchdog, "_close_node_types", lambda self, living, now: None)
    monkeypatch.setattr(watchdog_head.Activity, "check", lambda self, now: None)
    monkeypatch.setattr(watchdog_head.notices, "send", lambda text: None)
    monkeypatch.setattr(Spending, "add", lambda self, running, gap: seconds.append(gap))
    return seconds


@pytest.mark.parametrize("jump_s", [86_400, -86_400])
def test_a_jump_of_the_clock_costs_nothing(
    counted: list[float], monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    watchdog, now = watchdog_head.HeadWatchdog(FILE), time.time
    watchdog.check()
    monkeypatch.setattr(time, "time", lambda: now() + jump_s)
    watchdog.check()
    assert 0 <= counted[1] < 60


@pytest.mark.parametrize(("saved_s_ago", "expected"), [(600, 600), (-600, 0)])
def test_a_new_watchdog_counts_the_time_since_the_last_one(
    counted: list[float], saved_s_ago: float, expected: float
) -> None:
    state.STATE_FILE.write_text(json.dumps({"at": time.time() - saved_s_ago}))
    watchdog_head.HeadWatchdog(FILE).check()
    assert counted[0] == pytest.approx(expected, abs=60)


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"dollars": 5}'])
def test_after_a_damaged_state_the_instances_count_from_their_launch(counted: list[float], text: str) -> None:
    state.STATE_FILE.write_text(text)
    watchdog_head.HeadWatchdog(FILE).check()
    assert counted[0] > 1e9


def test_while_aws_does_not_list_the_instances_the_last_ones_cost(
    market: Market, counted: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(Spending, "add", lambda self, running, gap: seen.append(running))
    answers = iter([["an instance"]])

    def living(file: object) -> Any:
        for answer in answers:
            return answer
        raise THROTTLED

    monkeypatch.setattr(watchdog_head.instances, "living", living)
    watchdog = watchdog_head.HeadWatchdog(FILE)
    watchdog.check()
    watchdog.check()
    assert seen == [["an instance"]] * 2


def test_calls_of_the_watchdog_give_up_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that is not answered must delay the limits and the lease by less than a minute."""
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    watchdog_head._give_up_early(FILE)
    config = FILE.client("ec2").meta.config
    assert (config.connect_timeout + config.read_timeout) * config.retries["total_max_attempts"] < 60
