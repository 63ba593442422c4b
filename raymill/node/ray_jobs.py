"""Ray's jobs, as its dashboard on this head describes them."""

import json
import urllib.request
from pathlib import Path
from typing import Any

from raymill.node import state

URL = f"http://127.0.0.1:{state.DASHBOARD_PORT}/api/jobs/"
TOKEN_FILE = Path("~/.ray/auth_token").expanduser()


def all_jobs() -> list[dict[str, Any]]:
    """Return the submitted jobs and the programs that connected to Ray. Raises `OSError` if Ray does not answer."""
    request = urllib.request.Request(URL, headers={"Authorization": f"Bearer {TOKEN_FILE.read_text().strip()}"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.load(answer)
