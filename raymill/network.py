"""Use loopback on this machine: find free ports, and bypass HTTP proxies."""

import itertools
import os
import random
import socket
import urllib.request

LOOPBACK = "127.0.0.1,localhost,::1"


def keep_to_loopback() -> None:
    """Make this process and its children reach loopback without a proxy, and ignore addresses of other Ray clusters.

    Some HTTP clients read `no_proxy`, others `NO_PROXY`.
    """
    for scheme, proxy in urllib.request.getproxies().items():
        if scheme != "no":  # once a proxy variable is set, the proxy settings of macOS no longer apply
            os.environ.setdefault(f"{scheme}_proxy", proxy)
    bypassed = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    if bypassed != "*":  # "*" bypasses all proxies, but only if it is the entire value
        bypassed = f"{bypassed},{LOOPBACK}" if bypassed else LOOPBACK
    os.environ |= {"no_proxy": bypassed, "NO_PROXY": bypassed}
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):  # Ray's client prefers these to the address it is given
        os.environ.pop(name, None)


def free_ports(count: int) -> list[int]:
    """Return distinct free ports that no outgoing connection takes before you use them.

    The ports are below the ranges for outgoing connections (from 32768 on Linux, from 49152 on macOS). Inside these
    ranges, one of the many connections that Ray opens while it starts could take a port before Ray listens on it.
    """
    candidates = random.SystemRandom().sample(range(20_000, 32_000), 1_000)
    return list(itertools.islice(filter(is_free, candidates), count))


def is_free(port: int) -> bool:
    """Return whether this process could listen on this port of 127.0.0.1."""
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True
