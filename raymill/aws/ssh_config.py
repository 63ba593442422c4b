"""Tell ssh itself about the head, so that other programs reach it by name: plain ssh, rsync, VS Code Remote, PyCharm.

The entry is in a file of its own in ~/.ssh. The only change to ~/.ssh/config is one line that includes this file.
"""

import os
import pwd
import tempfile
from pathlib import Path

from raymill.aws.ssh import SshHead


def write(head: SshHead, name: str) -> Path:
    """Write an entry with this name for the head, and return its file. Replaces an older entry of this name."""
    folder = _folder()
    folder.mkdir(mode=0o700, exist_ok=True)
    options = {"HostName": head.address, "User": head.user, **head.options()}
    lines = [f"Host {name}", *(f"    {option} {value}" for option, value in options.items())]
    _replace(_file(name), "".join(f"{line}\n" for line in lines))
    config = folder / "config"
    text = config.read_text(encoding="utf-8") if config.exists() else ""
    if _include(name) not in text.splitlines():
        # At the top: below a Host or Match line, it would apply only to that host. ssh_config(5)
        _replace(config, f"{_include(name)}\n{text}")
    return _file(name)


def remove(name: str) -> None:
    """Remove the entry with this name, if there is one. All other lines of ~/.ssh/config stay as they are."""
    _file(name).unlink(missing_ok=True)
    config = _folder() / "config"
    if not config.exists():
        return
    lines = config.read_text(encoding="utf-8").splitlines(keepends=True)
    if kept := [line for line in lines if line.strip() != _include(name)]:
        if kept != lines:
            _replace(config, "".join(kept))
    elif lines:
        config.unlink()


def _folder() -> Path:
    """Return the folder that ssh reads. ssh ignores the variable HOME."""
    return Path(pwd.getpwuid(os.getuid()).pw_dir) / ".ssh"


def _file(name: str) -> Path:
    return _folder() / f"{name}.config"


def _include(name: str) -> str:
    return f'Include "{_file(name)}"'


def _replace(file: Path, text: str) -> None:
    """Replace the content of a private file as a whole, so that ssh never reads half of it. Follows links."""
    file = file.resolve()
    mode = file.stat().st_mode if file.exists() else 0o600
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=file.parent, delete=False) as new:
        new.write(text)
    os.chmod(new.name, mode)
    os.replace(new.name, file)
