"""What still costs money when a cluster has ended itself."""

from raymill import settings
from raymill.common.cluster_file import target
from raymill.errors import UserError
from raymill.ray_support.aws_sections import CapacitySection, NetworkSection


def describe() -> str:
    """Return two sentences that say what still costs money, and how to end that.

    Prices: https://aws.amazon.com/elasticloadbalancing/pricing https://aws.amazon.com/vpc/pricing
    https://aws.amazon.com/secrets-manager/pricing
    """
    try:
        network = settings.load(NetworkSection, "network", profile="cluster")
        reserved = settings.load(CapacitySection, "capacity", profile="cluster").reservation
    except UserError:  # a reason to name everything, and not to say nothing
        network = NetworkSection(private=True, certificate="unknown", clients="unknown")
        reserved = "perhaps a capacity reservation"
    costs = ["the secrets (0.40 dollars each per month)"]
    if network.private and not network.subnets:
        costs.insert(0, "the NAT gateway (about 0.05 dollars per hour)")
    if network.certificate:
        costs.insert(0, "the load balancer (about 20 dollars per month)")
    listed = f"{', '.join(costs[:-1])} and {costs[-1]}" if costs[1:] else costs[0]
    until_deleted = "You pay for what is in the bucket until you delete it"
    if reserved:  # a Capacity Block is paid in advance, but an on-demand reservation is not
        until_deleted += f", and for {reserved}, unless it is a Capacity Block, until you cancel it"
    return f"You still pay for {listed} until you run: inv down --target {target()}   {until_deleted}"
