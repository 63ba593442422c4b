"""Add, revoke and list the API keys of other people. `inv keys` runs this.

A key is stored as a digest in the secret SERVE_API_KEYS, which the server reads every ten seconds
(raymill/serving/keys.py).
"""

import datetime
import hashlib
import math
import re
import secrets
from collections.abc import Sequence

from rich.console import Console

from raymill import env_file, settings
from raymill.console import cell
from raymill.errors import UserError
from raymill.serving.keys import OWNER, ApiKey, parse
from raymill.status import empty_table
from raymill.target import KeyStore


def add(stores: Sequence[KeyStore], name: str, days: int, models: str) -> str:
    """Add a new key to the first store, and also to the others. Return the key, which is stored nowhere.

    The key is valid for `days` days, or until it is revoked if `days` is 0. It may use the comma-separated `models`,
    or all if there are none.

    Raises:
        UserError: the name is taken or not valid, a model's name is not valid, or `days` is negative.
    """
    if not re.fullmatch(r"[A-Za-z0-9][\w.@-]*", name, re.ASCII):
        raise UserError(f"{name!r} is not a name for a key. Use letters, digits and . _ @ -, such as: alice")
    if days < 0:
        raise UserError(f"--days is {days}. Use a positive number, such as --days 90")
    if not re.fullmatch(r"[^\s:|'\"#]*", models):
        raise UserError(
            f"--models is {models!r}. Use the names that {settings.inv('models')} shows: --models NAME,NAME"
        )
    key = secrets.token_urlsafe(32)
    entry = f"{name}:sha256={hashlib.sha256(key.encode()).hexdigest()}"
    if days:
        entry += f":expires={datetime.datetime.now(datetime.UTC).date() + datetime.timedelta(days=days)}"
    if models:
        entry += f":models={models.replace(',', '|')}"

    def added(value: str) -> str:
        if name in (OWNER, *map(_name, _entries(value))):
            raise UserError(
                f"there already is a key of {name}. Use another name, or first run: {settings.inv('keys revoke', name)}"
            )
        return _value([*_entries(value), entry])

    first, *others = stores
    with env_file.locked():
        first.update(added)
        for store in others:
            store.update(lambda value: _value([*_without(value, name), entry]))
    return key


def revoke(stores: Sequence[KeyStore], name: str) -> None:
    """Remove a key from all stores.

    Raises:
        UserError: the first store has no such key.
    """
    if name == OWNER:
        raise UserError(
            f"the key of owner is SERVE_API_KEY. To replace it, change it in .env. Other keys: "
            f"{settings.inv('keys revoke NAME')}"
        )

    def removed(value: str) -> str:
        names = [_name(entry) for entry in _entries(value)]
        if name not in names:
            found = ", ".join(names) or "none"
            raise UserError(f"there is no key of {name!r} (found: {found}). Run: {settings.inv('keys')}")
        return _value(_without(value, name))

    first, *others = stores
    with env_file.locked():
        first.update(removed)
        for store in others:
            store.update(lambda value: _value(_without(value, name)))


def show(store: KeyStore, console: Console) -> None:
    """Print a table of the keys, without the owner's."""
    table = empty_table("API keys", "name", "valid until", "models", "stored as")
    for key, entry in zip(_parse(store), _entries(store.read()), strict=True):
        last_day = datetime.datetime.fromtimestamp(key.expires - 1, datetime.UTC) if key.expires < math.inf else None
        valid = f"{last_day:%Y-%m-%d}" if last_day else "revoked"
        if last_day and last_day < datetime.datetime.now(datetime.UTC):
            valid += ", expired"
        models = ", ".join(sorted(key.models)) if key.models else "all"
        table.add_row(cell(key.name), valid, cell(models), "digest" if ":sha256=" in entry else "clear text")
    console.print(
        table if table.row_count else f"only the owner has a key. To add one, run: {settings.inv('keys add NAME')}"
    )


def _parse(store: KeyStore) -> list[ApiKey]:
    try:
        return list(parse(store.read()))
    except ValueError as error:
        raise UserError(f"{error}. Correct it in {store.name}") from None


def _entries(value: str) -> list[str]:
    return [entry.strip() for entry in value.split(",") if entry.strip()]


def _value(entries: list[str]) -> str:
    return ",".join(entries)


def _name(entry: str) -> str:
    return entry.partition(":")[0].strip()


def _without(value: str, name: str) -> list[str]:
    return [entry for entry in _entries(value) if _name(entry) != name]
