"""Serves a web page where people can try the model, or the answers of `serve_rag` with their sources, in a browser.

The page itself contains no secret and needs no key. Its requests to the API need a key. The user enters the key, which
stays in the memory of the browser tab.
"""

import base64
import hashlib
import re
from pathlib import Path

from starlette.responses import HTMLResponse, RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

HTML = Path(__file__).with_name("page.html").read_text(encoding="utf-8")


def _hash(element: str) -> str:
    """Return the hash of the page's only script or style. POLICY allows no other script or style."""
    [content] = re.findall(f"<{element}>(.*?)</{element}>", HTML, re.DOTALL)
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


class ChatPage:
    """ASGI middleware that answers GET and HEAD requests for / with the page. All other requests go to `app`.

    An app below a path, such as /rag, has its page at /rag/, because the page's own requests are relative.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self._page = HTMLResponse(HTML, headers=HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        root = scope.get("root_path", "")
        path = scope["path"].removeprefix(root) if scope["type"] == "http" else None
        if path not in ("", "/") or scope["method"] not in ("GET", "HEAD"):
            await self.app(scope, receive, send)
        elif path:
            await self._page(scope, receive, send)
        else:
            await RedirectResponse(f"{root}/")(scope, receive, send)
