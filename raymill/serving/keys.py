"""Reads the API keys from the secrets every ten seconds, so that you can add and revoke keys without a restart.

SERVE_API_KEY is the owner's key. SERVE_API_KEYS holds other people's keys, separated by commas, each as NAME:KEY or, as
`inv keys` writes it, with the key's digest: NAME:sha256=DIGEST:expires=DATE:models=MODEL|MODEL.
"""

import asyncio
import datetime
import hashlib
import hmac
import logging
import math
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from raymill.ray_support import job_secrets

OWNER = "owner"
OWNER_SECRET, OTHERS_SECRET = "SERVE_API_KEY", "SERVE_API_KEYS"
REFRESH_S = 10
DIGEST = re.compile(r"sha256=([0-9a-f]{64})((?::[^:]+)*)")
"""A key in SERVE_API_KEYS that is stored as a digest, and its options. Everything else is the key itself."""

log = logging.getLogger("ray.serve")


class ApiKey(NamedTuple):
    """An API key."""

    name: str
    digest: bytes
    """SHA-256 of the key. Keys are random, so their digests need no salt."""
    expires: float = math.inf
    """Time in seconds since 1970 from which on the key is not valid."""
    models: frozenset[str] | None = None
    """Models that the key may use. None: all."""


class ApiKeys:
    """The current API keys."""

    def __init__(self) -> None:
        """Read the keys.

        Raises:
            ValueError: there is no key, or SERVE_API_KEYS has another form, or repeats a name or a key.
        """
        self._keys = _read()
        if not self._keys:
            raise ValueError("SERVE_API_KEY did not reach the replica: list it in [secrets] of settings.toml")
        self.token = _token(self._keys)
        """A secret that all replicas share and no client knows, because it depends on all keys."""

    def name_of(self, authorization: bytes) -> str | None:
        """Return the name of the key in an Authorization header, or None if the key is not valid.

        The comparison takes constant time, so it reveals nothing about the keys.
        """
        scheme, _, key = authorization.partition(b" ")
        if scheme.lower() != b"bearer":  # the scheme is case-insensitive (RFC 9110, section 11.1), and is no secret
            return None
        given = _digest(key.strip(b" "))
        found = None
        for each in self._keys.values():
            if hmac.compare_digest(given, each.digest):
                found = each
        return found.name if found and time.time() < found.expires else None

    def may_use(self, name: str, model: str) -> bool:
        """Return whether the key with this name may use a model."""
        key = self._keys.get(name)  # None if the key has been revoked a moment ago
        return key is not None and (key.models is None or model in key.models)

    async def refresh_forever(self) -> None:
        """Read the keys every REFRESH_S seconds. If they cannot be read, the last valid ones stay in use."""
        while True:
            await asyncio.sleep(REFRESH_S)
            try:
                keys = await asyncio.to_thread(_read)
                self._keys, self.token = keys, _token(keys)
            except Exception as error:  # an unreachable store or a malformed list must not stop the server
                log.warning(f"could not reload the API keys ({error}); the last valid ones stay in use")


def parse(others: str) -> Iterator[ApiKey]:
    """Yield the keys in a value of SERVE_API_KEYS.

    Raises:
        ValueError: an entry has another form. The message contains neither name nor key, because somebody may have
            written KEY:NAME.
    """
    for number, entry in enumerate(filter(None, others.split(",")), start=1):
        name, colon, key = (part.strip() for part in entry.partition(":"))
        if not (name and colon and key):
            raise ValueError("SERVE_API_KEYS is not NAME:KEY,NAME:KEY")
        if stored := DIGEST.fullmatch(key):
            try:
                yield ApiKey(name, bytes.fromhex(stored[1]), **_options(stored[2]))
            except (ValueError, LookupError):
                raise ValueError(
                    f"the options in entry {number} of SERVE_API_KEYS are not :expires=YYYY-MM-DD:models=MODEL|MODEL"
                ) from None
        else:
            yield ApiKey(name, _digest(key.encode()))


def _options(text: str) -> dict[str, Any]:
    """Parse the options after a digest."""
    options: dict[str, Any] = {}
    for name, _, value in (option.partition("=") for option in filter(None, text.split(":"))):
        options[name] = {"expires": _end_of_day, "models": lambda value: frozenset(value.split("|"))}[name](value)
    return options


def _end_of_day(date: str) -> float:
    """Return the end of a day, in UTC."""
    start = datetime.datetime.strptime(date, "%Y-%m-%d").replace(tzinfo=datetime.UTC)
    return (start + datetime.timedelta(days=1)).timestamp()


def _read() -> dict[str, ApiKey]:
    values = job_secrets.read((OWNER_SECRET, OTHERS_SECRET))
    owner = values.get(OWNER_SECRET)
    keys = {OWNER: ApiKey(OWNER, _digest(owner.encode()))} if owner else {}
    for number, key in enumerate(parse(values.get(OTHERS_SECRET, "")), start=1):
        if key.name in (OWNER, *keys):
            raise ValueError(
                f"entry {number} of SERVE_API_KEYS repeats a name: names must be unique, and {OWNER} is taken"
            )
        if key.digest in (each.digest for each in keys.values()):
            raise ValueError(f"entry {number} of SERVE_API_KEYS repeats a key: each name needs its own key")
        keys[key.name] = key
    return keys


def _token(keys: Mapping[str, ApiKey]) -> bytes:
    digests = sorted(key.digest for key in keys.values())
    return hashlib.sha256(b"".join([b"fallback", *digests])).hexdigest().encode()


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
