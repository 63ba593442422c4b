"""boto3's session, which keeps the temporary credentials of a role on disk, so that a code for MFA lasts for an hour.

The cache is that of the AWS CLI. All verbs, all their sessions and `ray up` share it. Without it, each of them would
assume the role again, and ask for another code.
https://docs.aws.amazon.com/cli/latest/userguide/cli-configure-role.html#cli-configure-role-cache
"""

import contextlib
import functools
import getpass
import logging
import threading
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import boto3
import botocore.session
from botocore.config import Config
from botocore.credentials import ReadOnlyCredentials
from botocore.exceptions import NoCredentialsError
from botocore.loaders import Loader, create_loader
from botocore.utils import JSONFileCache

from raymill.errors import UserError

_clients: WeakKeyDictionary[boto3.Session, dict[tuple[str, str], Any]] = WeakKeyDictionary()
_creates = threading.Lock()  # threads may share clients, but a session must not create two at once


class _Cache(JSONFileCache):
    """Files that only their owner can read. Damaged files count as missing, and a folder may not be writable."""

    def __contains__(self, cache_key: str) -> bool:
        with contextlib.suppress(KeyError):
            return bool(self[cache_key])
        return False

    def __setitem__(self, cache_key: str, value: Any) -> None:
        with contextlib.suppress(OSError):
            super().__setitem__(cache_key, value)


def start(region: str, config: Config | None = None) -> None:
    """Make boto3 use a new session. It assumes roles in this region. `config` is the default for its clients."""
    session = botocore.session.get_session()
    session.register_component("data_loader", _loader(session.get_config_variable("data_path")))
    session.set_config_variable("region", region)
    if config:
        session.set_default_client_config(config)
    provider = session.get_component("credential_provider").get_provider("assume-role")
    provider.cache = _Cache(str(Path("~/.aws/cli/cache").expanduser()))
    logging.getLogger("botocore.credentials").setLevel(logging.CRITICAL)  # it would print a traceback for a wrong code
    provider._prompter = _ask  # a private attribute of botocore, whose version is pinned
    boto3.setup_default_session(botocore_session=session)


def current(region: str) -> boto3.Session:
    """Return boto3's session. If there is none, start one in this region."""
    if boto3.DEFAULT_SESSION is None:
        start(region)
    assert boto3.DEFAULT_SESSION
    return boto3.DEFAULT_SESSION


def client(service: Any, region: str) -> Any:  # Any, because boto3's types have an overload for each service's name
    """Return the boto3 client for the named service. All callers share it, because creating one takes 30 ms or more."""
    with _creates:
        clients = _clients.setdefault(current(region), {})
        if (service, region) not in clients:
            clients[service, region] = boto3.client(service, region_name=region)
        return clients[service, region]


def credentials(region: str) -> ReadOnlyCredentials:
    """Return credentials that are valid for at least ten minutes. Raises `NoCredentialsError` if there are none."""
    if found := current(region).get_credentials():
        return found.get_frozen_credentials()
    raise NoCredentialsError


@functools.cache  # it keeps what it has read: EC2's model alone has 1.5 MB
def _loader(path: str | None) -> Loader:
    return create_loader(path)


def _ask(question: str) -> str:
    try:
        return getpass.getpass(question)
    except EOFError:
        raise UserError(
            "your AWS profile needs a code for MFA, but there is no terminal. Run in one: aws sts get-caller-identity"
        ) from None
