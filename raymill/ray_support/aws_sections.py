"""Sections of settings.toml about AWS that jobs and nodes read too."""

import ipaddress
import re
from typing import Self

from pydantic import Field, model_validator

from raymill import settings
from raymill.instance_types import INSTANCE_TYPES

PUBLIC_KEY = re.compile(r"[a-z][\w.@-]+ [A-Za-z0-9+/=]{40,}( [^\n]*)?")
"""The line in a file such as ~/.ssh/id_ed25519.pub: type, key and an optional comment."""


class NetworkSection(settings.Section):
    """[cluster.network] of settings.toml."""

    subnets: tuple[str, ...] = ()
    """Ids of your subnets, one per zone. If empty, the stack makes a VPC with its own subnets."""
    head_subnet: str = ""
    """Id of your public subnet for the head. If empty, the first of `subnets`."""
    private: bool = False
    """Whether workers have no public addresses. The stack's own VPC then has a NAT gateway."""
    efa: bool = True
    """Whether GPU workers use EFA and a placement group per zone, if their instance type supports EFA."""
    callers: tuple[str, ...] = ()
    """Addresses that may connect to port 22 of the head, as a.b.c.d/32. If empty, this machine's public address."""
    ssh_keys: tuple[str, ...] = ()
    """Public keys of other people, who connect to the head with their own private keys."""
    certificate: str = ""
    """ARN of the ACM certificate for serving over HTTPS. If empty, there is no load balancer."""
    clients: str = ""
    """Addresses that may connect to the load balancer, as a.b.c.d/n."""

    @model_validator(mode="after")
    def _head_has_a_subnet(self) -> Self:
        if self.head_subnet and not self.subnets:
            raise ValueError("set subnets too: head_subnet must be in the VPC of your other subnets")
        if self.private and self.subnets and not self.head_subnet:
            raise ValueError("set head_subnet to a public subnet, because subnets are private")
        return self

    @model_validator(mode="after")
    def _clients_are_named(self) -> Self:
        if bool(self.certificate) != bool(self.clients):
            raise ValueError(
                "set both certificate and clients, or neither. Only the addresses in clients can use the load balancer"
            )
        return self

    @model_validator(mode="after")
    def _callers_are_addresses(self) -> Self:
        for caller in self.callers:
            try:
                is_open = ipaddress.IPv4Network(caller).prefixlen == 0
            except ValueError:
                raise ValueError(f"{caller!r} in callers is not an address. Write it as a.b.c.d/32") from None
            if is_open:
                raise ValueError(f"{caller!r} in callers would open port 22 to the world. Name single addresses")
        return self

    @model_validator(mode="after")
    def _keys_are_public(self) -> Self:
        for key in self.ssh_keys:
            if not PUBLIC_KEY.fullmatch(key):
                raise ValueError(
                    f"{key[:20]!r} in ssh_keys is not a public key. Copy the line in ~/.ssh/id_ed25519.pub, for example"
                )
        return self

    @property
    def costs(self) -> str:
        """What the network costs, or "" if it is free."""
        if not self.private or self.subnets:
            return ""
        return (
            "the NAT gateway for private workers costs about 0.05 dollars per hour, and as much per GB, until inv down"
        )


class CapacitySection(settings.Section):
    """[cluster.capacity] of settings.toml."""

    reservation: str = ""
    """Id of a Capacity Block or an on-demand capacity reservation, as cr-0123456789abcdef0. If empty, there is none."""
    count: int = Field(0, ge=0)
    """Number of reserved instances that the cluster may use. If 0, all of them."""


class GpuSection(settings.Section):
    """[cluster.gpu] of settings.toml. The names are those in raymill/instance_types.py."""

    instance_types: tuple[str, ...] = ()
    """Types for training, the preferred one first. If empty, that of cluster.yaml."""
    serve_instance_type: str = ""
    """Type for `serve_llm` and `generate`. If empty, those for training."""

    @model_validator(mode="after")
    def _types_are_known(self) -> Self:
        for name in (*self.instance_types, self.serve_instance_type):
            if name and name not in INSTANCE_TYPES:
                raise ValueError(f"{name} is not in raymill/instance_types.py. Use one of: {', '.join(INSTANCE_TYPES)}")
        return self


def load_gpu() -> GpuSection:
    """Return the section."""
    return settings.load(GpuSection, "gpu", profile="cluster")
