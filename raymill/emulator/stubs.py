"""Stubs for calls that moto lacks: prices, quotas, the key for disks and IAM's policy simulator.

Prices and quotas are made up. Prices are the same in all regions and at all times. Only quotas that a test sets are
enforced (see api.py).
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from raymill.emulator import launches
from raymill.emulator.iam import AwsError, Permission, Principal, is_allowed
from raymill.instance_types import INSTANCE_TYPES

DOLLARS_AN_HOUR = {"m6i.2xlarge": 0.4, "m6i.8xlarge": 1.6, "p4d.24xlarge": 22.0, "p4de.24xlarge": 28.0} | {
    one.name: one.gpus * one.gpu.bf16_flops / 1e14 for one in INSTANCE_TYPES.values() if not one.name.startswith("p4")
}
SPOT_PRICE_RATIO = 0.5
"""Spot price divided by on-demand price, in the cheapest zone."""
SPOT_PRICE_STEP = 0.08
"""How much the spot price rises from each zone to the next, as a share of the on-demand price."""

QUOTA = 1000.0
"""Value of each quota, unless a test sets another number."""
NEW_ACCOUNT = {
    **{"L-1216C47A": 5.0, "L-34B43A08": 5.0},  # vCPUs of standard instances: on demand, spot
    **{"L-417A185B": 0.0, "L-7212CCBC": 0.0, "L-C4BD4855": 0.0, "L-DB2E81BA": 0.0, "L-3819A6DF": 0.0},  # of P and G
    **{"L-F678F1CE": 5.0, "L-7A658B76": 50.0},  # VPCs, TiB of gp3 disks
}
"""Values of quotas in a new account.
https://docs.aws.amazon.com/ec2/latest/instancetypes/ec2-instance-quotas.html
https://docs.aws.amazon.com/vpc/latest/userguide/amazon-vpc-limits.html
https://docs.aws.amazon.com/ebs/latest/userguide/ebs-resource-quotas.html
"""

SIMULATION = """<?xml version="1.0" encoding="UTF-8"?>
<SimulatePrincipalPolicyResponse xmlns="https://iam.amazonaws.com/doc/2010-05-08/"><SimulatePrincipalPolicyResult>
<EvaluationResults>{results}</EvaluationResults><IsTruncated>false</IsTruncated>
</SimulatePrincipalPolicyResult></SimulatePrincipalPolicyResponse>"""
SPOT_PRICES = """<?xml version="1.0" encoding="UTF-8"?>
<DescribeSpotPriceHistoryResponse xmlns="http://ec2.amazonaws.com/doc/2016-11-15/"><spotPriceHistorySet>
{items}</spotPriceHistorySet></DescribeSpotPriceHistoryResponse>"""
DISK_KEY = """<?xml version="1.0" encoding="UTF-8"?>
<GetEbsDefaultKmsKeyIdResponse xmlns="http://ec2.amazonaws.com/doc/2016-11-15/"><kmsKeyId>{key}</kmsKeyId>
</GetEbsDefaultKmsKeyIdResponse>"""
SPOT_PRICE = """<item><instanceType>{instance_type}</instanceType><productDescription>Linux/UNIX</productDescription>
<spotPrice>{dollars:.6f}</spotPrice><timestamp>2026-01-01T00:00:00.000Z</timestamp>
<availabilityZone>{zone}</availabilityZone></item>"""


def respond(service: str, action: str, region: str, parameters: dict[str, Any], principal: Principal) -> str | None:
    """Return the response body, or None if there is no stub for this call."""
    if (service, action) == ("iam", "SimulatePrincipalPolicy"):
        return _simulate(parameters, principal)
    if (service, action) == ("ec2", "GetEbsDefaultKmsKeyId"):
        return DISK_KEY.format(key=launches.disk_key(region, principal.account))
    stub = STUBS.get((service, action))
    return stub(parameters, region) if stub else None


def _get_products(request: dict[str, Any], region: str) -> str:
    """Return the products on the second page, because any page of AWS may be empty."""
    if "NextToken" not in request:
        return json.dumps({"FormatVersion": "aws_v1", "PriceList": [], "NextToken": "2"})
    filters = {entry["Field"]: entry["Value"] for entry in request["Filters"]}
    price = DOLLARS_AN_HOUR.get(filters["instanceType"])
    found = [price] if price else []
    if "marketoption" not in filters:  # AWS then also lists the hours of Capacity Blocks
        found = [0.8 * one for one in found] + found
    products = [
        {
            "terms": {
                "OnDemand": {"term": {"priceDimensions": {"of": {"unit": "Hrs", "pricePerUnit": {"USD": str(one)}}}}}
            }
        }
        for one in found
    ]
    return json.dumps({"FormatVersion": "aws_v1", "PriceList": list(map(json.dumps, products))})


def _spot_price_history(request: dict[str, str], region: str) -> str:
    types = [value for key, value in request.items() if re.fullmatch(r"InstanceType\.\d+", key)]
    items = [
        SPOT_PRICE.format(
            instance_type=one,
            zone=f"{region}{letter}",
            dollars=DOLLARS_AN_HOUR[one] * (SPOT_PRICE_RATIO + index * SPOT_PRICE_STEP),
        )
        for one in types
        if DOLLARS_AN_HOUR.get(one)
        for index, letter in enumerate("abcdef")
        if f"{region}{letter}" in launches.zones_with(region, one, ())
    ]
    return SPOT_PRICES.format(items="".join(items))


def service_quota(code: str, values: Mapping[str, float | None]) -> str:
    """Return the response to GetServiceQuota.

    `values` maps the codes of quotas to numbers that a test has set, or to None if AWS has no such quota.

    Raises:
        AwsError: there is no such quota.
    """
    value = values.get(code, QUOTA)
    if value is None:
        raise AwsError("NoSuchResource", "The request failed because the specified service quota does not exist.")
    quota = {"ServiceCode": "ec2", "QuotaCode": code, "QuotaName": "Running machines", "Value": value}
    return json.dumps({"Quota": quota | {"Unit": "None", "Adjustable": True}})


def _simulate(request: dict[str, str], principal: Principal) -> str:
    """Simulate the caller's own policies with the code that authorizes calls. Ignores PolicySourceArn."""

    def members(prefix: str) -> list[str]:
        return [value for key, value in sorted(request.items()) if re.fullmatch(rf"{prefix}\.member\.\d+", key)]

    keys = [key.removesuffix("ContextKeyName") for key in request if key.endswith(".ContextKeyName")]
    context = {request[f"{key}ContextKeyName"]: request[f"{key}ContextKeyValues.member.1"] for key in keys}
    results = ""
    for action in members("ActionNames"):
        (resource,) = members("ResourceArns")
        allowed = is_allowed(principal.statements, Permission(action, resource, context))
        decision = "allowed" if allowed else "implicitDeny"
        results += f"<member><EvalActionName>{action}</EvalActionName><EvalDecision>{decision}</EvalDecision></member>"
    return SIMULATION.format(results=results)


STUBS: dict[tuple[str, str], Callable[[dict[str, Any], str], str]] = {
    ("pricing", "GetProducts"): _get_products,
    ("ec2", "DescribeSpotPriceHistory"): _spot_price_history,
}
