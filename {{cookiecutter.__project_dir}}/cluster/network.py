"""Loopback on this machine: free ports, and requests that bypass proxies."""

import itertools
import os
import random
import socket
import urllib.request

LOOPBACK = "127.0.0.1,localhost,::1"


def keep_to_loopback() -> None:
    """Bypass proxies and addresses of other Rays in this process and its children: the cluster is on loopback.

    HTTP clients read `no_proxy` in either spelling.
    """
    for scheme, proxy in urllib.request.getproxies().items():
        if scheme != "no":  # macOS's own settings are used only as long as no variable is set
            os.environ.setdefault(f"{scheme}_proxy", proxy)
    bypassed = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    if bypassed != "*":  # bypasses all proxies, and must stand alone
        bypassed = f"{bypassed},{LOOPBACK}" if bypassed else LOOPBACK
    os.environ |= {"no_proxy": bypassed, "NO_PROXY": bypassed}
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):  # Ray's client prefers these to the address it is given
        os.environ.pop(name, None)


def free_ports(count: int) -> list[int]:
    """Different ports that nobody listens on, and that no outgoing connection takes before they are used.

    From below the ranges that Linux (32768 up) and macOS (49152 up) give to connections: of the many that Ray
    makes while it starts, one sometimes got a port that was meant for its agent.
    """
    candidates = random.SystemRandom().sample(range(20_000, 32_000), 1_000)
    return list(itertools.islice(filter(_is_free, candidates), count))


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True
