"""Answers of AWS that moto has not: prices. The figures are round and made up; the shapes are AWS's.

Not modelled: that prices differ by region, zone and hour.
"""

import json
from collections.abc import Callable
from typing import Any

DOLLARS_AN_HOUR = {"m6i.2xlarge": 0.4, "m6i.8xlarge": 1.6, "p4d.24xlarge": 22.0, "p4de.24xlarge": 28.0}
SPOT_SHARE = 0.5
"""Of the price on demand."""

SPOT_PRICES = """<?xml version="1.0" encoding="UTF-8"?>
<DescribeSpotPriceHistoryResponse xmlns="http://ec2.amazonaws.com/doc/2016-11-15/"><spotPriceHistorySet><item>
<instanceType>{instance_type}</instanceType><productDescription>Linux/UNIX</productDescription>
<spotPrice>{dollars:.6f}</spotPrice><timestamp>2026-01-01T00:00:00.000Z</timestamp>
<availabilityZone>us-east-1a</availabilityZone></item></spotPriceHistorySet></DescribeSpotPriceHistoryResponse>"""


def answer(service: str, action: str, parameters: dict[str, Any]) -> str | None:
    """The body of the answer to a call; None where moto answers."""
    fake = FAKES.get((service, action))
    return fake(parameters) if fake else None


def _get_products(request: dict[str, Any]) -> str:
    wanted = {entry["Field"]: entry["Value"] for entry in request["Filters"]}
    price = DOLLARS_AN_HOUR.get(wanted["instanceType"])
    dimension = {"unit": "Hrs", "pricePerUnit": {"USD": f"{price:.10f}"}} if price else None
    product = {"terms": {"OnDemand": {"term": {"priceDimensions": {"dimension": dimension}}}}}
    return json.dumps({"FormatVersion": "aws_v1", "PriceList": [json.dumps(product)] if price else []})


def _spot_price_history(request: dict[str, str]) -> str:
    instance_type = request["InstanceType.1"]
    return SPOT_PRICES.format(instance_type=instance_type, dollars=DOLLARS_AN_HOUR.get(instance_type, 1) * SPOT_SHARE)


FAKES: dict[tuple[str, str], Callable[[dict[str, Any]], str]] = {
    ("pricing", "GetProducts"): _get_products,
    ("ec2", "DescribeSpotPriceHistory"): _spot_price_history,
}
