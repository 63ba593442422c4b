"""Sends this project's requests to its own cluster, whatever proxies the user's environment names."""

import os
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
