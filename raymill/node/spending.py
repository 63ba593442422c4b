"""What the cluster's instances have cost so far, for the limit in dollars."""

import logging
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

from raymill.common import prices
from raymill.common.cluster_file import CAPACITY_BLOCK, ClusterFile
from raymill.common.instances import Instance
from raymill.common.prices import MarketPrices

log = logging.getLogger(__name__)
PRICES_S = 3600.0
"""How often all prices are read again. Spot prices change slowly."""
RETRY_S = 300.0
"""How soon, if AWS has not named all of them."""


class Offer(NamedTuple):
    """What has a price."""

    instance_type: str
    market: str
    zone: str


class Spending:
    """Adds up the costs of instances.

    A price that AWS does not name is asked for again in each call of `add`. Until AWS answers, the time counts at the
    type's highest price. Then it counts at the right price, also in retrospect.
    """

    def __init__(self, file: ClusterFile, saved: Mapping[str, Any]) -> None:
        """Continue with what `state` has returned, or {}."""
        self._file = file
        self._known = saved.get("known_dollars", saved.get("dollars", 0.0))
        """Cost of the time whose price is known."""
        self._unpriced: dict[Offer, float] = {Offer(*offer): hours for *offer, hours in saved.get("unpriced", [])}
        """Hours of instances whose price is unknown."""
        self._prices = MarketPrices(**saved.get("prices", {"on_demand": {}, "spot": {}}))
        self._read = float("-inf")
        """When all prices were last read, by the monotonic clock."""
        self._seen: set[str] = set()
        """Ids of the instances that ran at the last call of `add`."""
        self._running: set[Offer] = set()
        self._reason = ""
        """Why AWS has not named a price."""

    @property
    def dollars(self) -> float:
        """What the instances have cost. What is unknown counts at the highest price."""
        return self._known + self.assumed

    @property
    def assumed(self) -> float:
        """The part of `dollars` that counts at the highest price."""
        return sum(self._prices.highest(offer.instance_type) * hours for offer, hours in self._unpriced.items())

    @property
    def warning(self) -> str:
        """A sentence that says which prices of running instances are unknown, or ""."""
        unknown = sorted({one.instance_type for one in self._running if self._prices.of_offer(*one) is None})
        if not unknown:
            return ""
        counted = " and ".join(f"{name} at {self._prices.highest(name):.2f}" for name in unknown)
        return (
            f"AWS does not name the price of {' and '.join(unknown)} ({self._reason}), so the limit in dollars counts "
            f"{counted} dollars per hour until it does"
        )

    @property
    def caveat(self) -> str:
        """What a message about the limit must add, or ""."""
        if not self._unpriced:
            return ""
        names = " and ".join(sorted({offer.instance_type for offer in self._unpriced}))
        return (
            f"; {self.assumed:.2f} of these {self.dollars:.2f} dollars are assumed, because AWS did not name the price "
            f"of {names} ({self._reason})"
        )

    def state(self) -> dict[str, Any]:
        """Return what the constructor needs to continue, as JSON."""
        return {
            "dollars": self.dollars,
            "known_dollars": self._known,
            "unpriced": [[*offer, hours] for offer, hours in self._unpriced.items()],
            "prices": asdict(self._prices),
        }

    def add(self, running: Collection[Instance], seconds: float) -> float:
        """Add the cost of all running instances for the last `seconds`. Return what they cost per hour.

        A new instance counts from its launch, also if AWS has not listed it before.
        """
        self._running = {_offer(one) for one in running if one.state != "shutting-down"}
        self._ask()
        hourly = 0.0
        for one in running:
            is_new = bool(self._seen) and one.id not in self._seen
            price, hours = self._prices.of(one), max(0.0, one.age_s if is_new else min(seconds, one.age_s)) / 3600
            if price is None:
                self._unpriced[_offer(one)] = self._unpriced.get(_offer(one), 0.0) + hours
                hourly += self._prices.highest(one.instance_type)
            else:
                self._known += price * hours
                hourly += price
        self._seen = {one.id for one in running}
        return hourly

    def _ask(self) -> None:
        """Ask AWS for unknown prices, and every PRICES_S for all. Earlier prices apply until AWS answers."""
        offers = [one for one in self._running | set(self._unpriced) if one.market != CAPACITY_BLOCK]
        is_due = time.monotonic() - self._read >= PRICES_S
        names = {one.instance_type for one in offers if is_due or self._prices.of_offer(*one) is None}
        found, reason = prices.find(self._file, names)
        self._prices.on_demand.update(found.on_demand)
        self._prices.spot.update(found.spot)
        if is_due:  # after a failure, ask again soon; what is unknown is asked for in each call anyway
            self._read = time.monotonic() - (PRICES_S - RETRY_S if reason else 0.0)
        if reason and reason != self._reason:  # once, because AWS is asked every few seconds
            log.warning("AWS does not name all prices, so earlier ones or the highest ones apply: %s", reason)
        self._reason = reason
        for offer in list(self._unpriced):
            if (price := self._prices.of_offer(*offer)) is not None:
                self._known += price * self._unpriced.pop(offer)


def _offer(one: Instance) -> Offer:
    return Offer(one.instance_type, one.market, one.zone)
