"""Keeps this project's requests on its own cluster, whatever proxies the user's environment names."""

import os

LOOPBACK = "127.0.0.1,localhost,::1"


def keep_to_loopback() -> None:
    """Let no proxy, and no address of another Ray, come between this process, its children and the cluster.

    Clusters and tunnels are on loopback. All HTTP clients read `no_proxy`, in the one spelling or the other.
    """
    bypassed = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    if bypassed != "*":  # which stands for all, and only alone
        bypassed = f"{bypassed},{LOOPBACK}" if bypassed else LOOPBACK
    os.environ |= {"no_proxy": bypassed, "NO_PROXY": bypassed}
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):  # Ray's client prefers them to the address it is given
        os.environ.pop(name, None)
