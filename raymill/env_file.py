"""The project's .env: creates it, and changes its list of API keys."""

import contextlib
import secrets
from collections.abc import Callable, Iterator

from dotenv import dotenv_values, set_key
from filelock import FileLock, Timeout

from raymill import settings
from raymill.errors import UserError
from raymill.serving.keys import OTHERS_SECRET

LOCK_TIMEOUT_S = 60.0


class EnvFile:
    """Reads and changes SERVE_API_KEYS in .env. The rest of the file stays as it is."""

    name = ".env"

    def read(self) -> str:
        """Return the value, or "" if it has none.

        Raises:
            UserError: there is no .env.
        """
        file = settings.PROJECT / ".env"
        if not file.is_file():
            raise UserError(f"there is no .env, which stores the keys. Run: {settings.inv('up')}")
        return dotenv_values(file).get(OTHERS_SECRET) or ""

    def update(self, change: Callable[[str], str]) -> None:
        """Replace the value with what `change` returns for it. Hold `locked`."""
        set_key(settings.PROJECT / ".env", OTHERS_SECRET, change(self.read()), follow_symlinks=True)


@contextlib.contextmanager
def locked() -> Iterator[None]:
    """Keep other processes from changing .env, also those of another project whose .env is a link to the same file.

    Raises:
        UserError: another process holds the lock for too long.
    """
    file = (settings.PROJECT / ".env").resolve()
    try:
        with FileLock(f"{file}.lock", LOCK_TIMEOUT_S, mode=0o600):
            yield
    except Timeout:
        raise UserError(
            f"another process has been changing {file} for {LOCK_TIMEOUT_S:.0f} s. End that process, then try again"
        ) from None


def create() -> None:
    """If there is no .env, create a private one with a new API key, so that nothing is served without a key."""
    file = settings.PROJECT / ".env"
    with locked():
        if file.exists():
            return
        text = (settings.PROJECT / ".env.example").read_text()
        file.touch(mode=0o600)
        file.write_text(text.replace("SERVE_API_KEY=", f"SERVE_API_KEY={secrets.token_urlsafe(32)}"))
    print("created .env with a new SERVE_API_KEY; put all secrets there")
