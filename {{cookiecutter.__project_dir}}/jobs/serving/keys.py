"""Who may use the API: keys by name, read as secrets, and again every few seconds, so that one can be withdrawn.

SERVE_API_KEY is the owner's; SERVE_API_KEYS, as NAME:KEY,NAME:KEY, are other people's.
"""

import asyncio
import hashlib
import hmac
import logging

from jobs import secrets

OWNER = "owner"
SECRETS = ("SERVE_API_KEY", "SERVE_API_KEYS")
REFRESH_S = 10

log = logging.getLogger("ray.serve")


class Keys:
    """The keys of the moment, as digests of the headers that carry them."""

    def __init__(self) -> None:
        """Read them.

        Raises:
            ValueError: there is none, or SERVE_API_KEYS is not NAME:KEY,NAME:KEY.
        """
        self._digests = _read()
        if not self._digests:
            raise ValueError("SERVE_API_KEY did not reach the replica: name it in [secrets] of settings.toml")

    def name_of(self, authorization: bytes) -> str | None:
        """The name of the key that the header carries, or None.

        The time that it takes does not tell how much of a wrong key is right, nor whose it resembles.
        """
        given = _digest(authorization)
        found = None
        for name, digest in self._digests.items():
            if hmac.compare_digest(given, digest):
                found = name
        return found

    async def keep_up(self) -> None:
        """Read them again and again. While they cannot be read, those that were read last stay valid."""
        while True:
            await asyncio.sleep(REFRESH_S)
            try:
                self._digests = await asyncio.to_thread(_read)
            except Exception as error:  # the store may be away, or what stands there malformed: neither ends a server
                log.warning(f"the API keys could not be read again ({type(error).__name__}); the last ones stay valid")


def _read() -> dict[str, bytes]:
    values = secrets.read(SECRETS)
    pairs = [(OWNER, values["SERVE_API_KEY"])] if "SERVE_API_KEY" in values else []
    for pair in filter(None, values.get("SERVE_API_KEYS", "").split(",")):
        name, colon, key = pair.strip().partition(":")
        if not (name and colon and key):
            raise ValueError("SERVE_API_KEYS is not NAME:KEY,NAME:KEY")
        pairs.append((name, key))
    return {name: _digest(f"Bearer {key}".encode()) for name, key in pairs}


def _digest(header: bytes) -> bytes:
    return hashlib.sha256(header).digest()
