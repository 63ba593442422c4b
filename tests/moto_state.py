"""Empties the services of moto in this process."""

from collections.abc import Iterable
from typing import Any

from moto.backends import get_backend
from moto.core.model_instances import reset_model_data


def empty(services: Iterable[Any]) -> None:
    """Empty these services in all accounts and regions.

    moto's `reset` would create EC2's default VPC in each region that an earlier test has used, which takes seconds.
    """
    for name in services:
        for account in get_backend(name).values():
            if name == "ec2":
                account.clear()
            else:
                account.reset()
    reset_model_data()  # moto keeps all resources that it ever made
