"""The page at / of what is served, on which a person tries the model in a browser, with a key of their own.

It holds no secret, so it is there without a key; what it asks of the API wants one, as all else does. The person's key
stays in the memory of their browser's tab.
"""

import base64
import hashlib
import re
from pathlib import Path

from starlette.responses import HTMLResponse
from starlette.types import ASGIApp, Receive, Scope, Send

TEXT = Path(__file__).with_name("page.html").read_text(encoding="utf-8")


def _hash(element: str) -> str:
    """What a policy names the page's one script or style by; whatever else gets into the page stays without effect."""
    [content] = re.findall(f"<{element}>(.*?)</{element}>", TEXT, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


POLICY = (
    f"default-src 'none'; script-src {_hash('script')}; style-src {_hash('style')}; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Page:
    """ASGI app that answers `GET /` with the page, and leaves all else to `app`."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self._page = HTMLResponse(TEXT, headers=HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked_for = scope["type"] == "http" and scope["path"] == "/" and scope["method"] in ("GET", "HEAD")
        await (self._page if asked_for else self.app)(scope, receive, send)
