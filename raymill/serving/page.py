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

FOLDER = Path(__file__).parent


def _read(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def _hashes(element: str) -> str:
    """Return the hashes of the page's scripts or styles. POLICY allows no others."""
    contents = re.findall(f"<{element}>(.*?)</{element}>", HTML, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() for content in contents]
    return " ".join(f"'sha256-{digest}'" for digest in digests)


# The page contains its scripts, so that no other address needs to be open without a key.
HTML = re.sub('<script src="(.+)"></script>', lambda script: f"<script>{_read(script[1])}</script>", _read("page.html"))
POLICY = (
    f"default-src 'none'; script-src {_hashes('script')}; style-src {_hashes('style')}; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types dompurify"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-DNS-Prefetch-Control": "off",  # browsers look up the hosts of links, and a host can contain text of an answer
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
