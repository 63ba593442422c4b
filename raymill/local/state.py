"""Files that describe the local cluster, so that every verb finds it: its state, its token and its log."""

import json
import os
import secrets
import tempfile
from pathlib import Path
from typing import Any

import psutil

from raymill import settings, state_files
from raymill.errors import UserError
from raymill.network import free_ports

FOLDER = settings.PROJECT / ".cluster"
STATE_FILE = FOLDER / "local.json"
TOKEN_FILE = FOLDER / "token"
LOG_FILE = FOLDER / "ray.log"
ACCESS_LOGS = FOLDER / "access"
"""Folder of the served models' access logs, which outlive the cluster."""
MAX_TEMP_FOLDER_BYTES = 38
"""HAProxy's socket path is 59 bytes longer than the folder's, and is limited to 97 bytes. Ray's paths are shorter."""


def read() -> dict[str, Any]:
    """Return the state of the cluster that `up` started.

    Raises:
        UserError: the state file is damaged.
    """
    remedy = f"Run: rm {STATE_FILE}, then inv up"
    return state_files.parse_or_refuse(STATE_FILE.read_bytes(), dict[str, Any], str(STATE_FILE), remedy)


def write(state: dict[str, Any]) -> None:
    """Replace the state file."""
    state_files.replace(STATE_FILE, json.dumps(state))


def create() -> dict[str, Any]:
    """Create the token, the temp folder and the state file of a new cluster. Return the state.

    `up` calls this before it starts anything, so that `down` finds what an interrupted `up` has left behind.
    """
    temp_root = _temp_root()
    FOLDER.mkdir(exist_ok=True)
    TOKEN_FILE.touch(mode=0o600)
    TOKEN_FILE.write_text(secrets.token_hex(32))
    dashboard_port, gcs_port, *other_ports = free_ports(8)
    state = {
        "id": secrets.token_hex(8),
        "temp": _make_temp_folder(temp_root),
        "dashboard": f"http://127.0.0.1:{dashboard_port}",
        "address": f"127.0.0.1:{gcs_port}",
        "other_ports": other_ports,
        "boot": boot_id(),
    }
    write(state)
    return state


def headers() -> dict[str, str]:
    """Return the HTTP headers that the dashboard requires."""
    return {"Authorization": f"Bearer {TOKEN_FILE.read_text()}"}


def boot_id() -> str:
    """Return an id that changes with each boot of this machine.

    The boot time is only a fallback, because the system may correct it later.
    """
    file = Path("/proc/sys/kernel/random/boot_id")
    return file.read_text() if file.exists() else str(psutil.boot_time())


def _temp_root() -> str:
    """Return RAY_TMPDIR or /tmp, as Ray does. TMPDIR is ignored, because macOS's is too long for socket paths."""
    root = os.environ.get("RAY_TMPDIR", "/tmp")
    if any(character.isspace() for character in root):
        problem = f"RAY_TMPDIR is {root!r}, but HAProxy does not support paths with spaces"
        raise UserError(f"{problem}. Run: unset RAY_TMPDIR")
    return root


def _make_temp_folder(root: str) -> str:
    """Create a temp folder that other users cannot access, and return its path."""
    folder = tempfile.mkdtemp(prefix="ray-", dir=root)
    if len(os.fsencode(folder)) > MAX_TEMP_FOLDER_BYTES:
        os.rmdir(folder)
        maximum = MAX_TEMP_FOLDER_BYTES - len(os.fsencode(folder)) + len(os.fsencode(root))
        problem = f"RAY_TMPDIR is {root}, which is too long for socket paths. Use at most {maximum} bytes"
        raise UserError(f"{problem}, or run: unset RAY_TMPDIR")
    return folder
