"""Reads the API keys from the secrets every ten seconds, so that you can add and revoke keys without a restart.

SERVE_API_KEY is the owner's key. SERVE_API_KEYS holds other people's keys as NAME:KEY,NAME:KEY.
"""

import asyncio
import hashlib
import hmac
import logging

from pipeline.ray_support import job_secrets

OWNER = "owner"
SECRETS = ("SERVE_API_KEY", "SERVE_API_KEYS")
REFRESH_S = 10

log = logging.getLogger("ray.serve")


class ApiKeys:
    """The current API keys, as digests."""

    def __init__(self) -> None:
        """Read the keys.

        Raises:
            ValueError: there is no key, or SERVE_API_KEYS is not NAME:KEY,NAME:KEY or repeats a name or a key.
        """
        self._digests = _read()
        if not self._digests:
            raise ValueError("SERVE_API_KEY did not reach the replica: list it in [secrets] of settings.toml")

    def name_of(self, authorization: bytes) -> str | None:
        """Return the name of the key in an Authorization header, or None if the key is not valid.

        The comparison takes constant time, so it reveals nothing about the keys.
        """
        scheme, _, key = authorization.partition(b" ")
        if scheme.lower() != b"bearer":  # the scheme is case-insensitive (RFC 9110, section 11.1), and is no secret
            return None
        given = _digest(key.strip(b" "))
        found = None
        for name, digest in self._digests.items():
            if hmac.compare_digest(given, digest):
                found = name
        return found

    async def refresh_forever(self) -> None:
        """Read the keys every REFRESH_S seconds. If they cannot be read, the last valid ones stay in use."""
        while True:
            await asyncio.sleep(REFRESH_S)
            try:
                self._digests = await asyncio.to_thread(_read)
            except Exception as error:  # an unreachable store or a malformed list must not stop the server
                log.warning(f"could not reload the API keys ({error}); the last valid ones stay in use")


def _read() -> dict[str, bytes]:
    values = job_secrets.read(SECRETS)
    keys = {OWNER: values.get("SERVE_API_KEY", "")}
    for number, pair in enumerate(filter(None, values.get("SERVE_API_KEYS", "").split(",")), start=1):
        name, colon, key = (part.strip() for part in pair.partition(":"))
        if not (name and colon and key):
            raise ValueError("SERVE_API_KEYS is not NAME:KEY,NAME:KEY")
        # print neither name nor key, because somebody may have written KEY:NAME
        if name in keys:
            raise ValueError(
                f"entry {number} of SERVE_API_KEYS repeats a name: names must be unique, and {OWNER} is taken"
            )
        if key in keys.values():
            raise ValueError(f"entry {number} of SERVE_API_KEYS repeats a key: each name needs its own key")
        keys[name] = key
    return {name: _digest(key.encode()) for name, key in keys.items() if key}


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
