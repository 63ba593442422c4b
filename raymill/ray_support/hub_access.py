"""Checks, in seconds, whether the Hugging Face hub lets this machine read a repository, and explains its refusals.

transformers hides these refusals: it reports most of them as a missing connection, after several rounds of retries.
"""

import functools
from collections.abc import Iterator
from typing import Literal

import httpx2
from huggingface_hub import constants, get_token, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff, parse_ratelimit_headers

from raymill.errors import UserError

TIMEOUT_S = 5.0
RETRIES = 2
RETRIED = (500, 502, 504)
"""Not 429 and 503: with these, the hub may ask to wait for minutes, and the client would obey."""
TOKENS = "https://huggingface.co/settings/tokens"
Kind = Literal["model", "dataset"]


@functools.cache
def check(name: str, kind: Kind = "model", retries: int = RETRIES) -> None:
    """Ask the hub for the first file of a repository. If the hub does not answer, a copy in the cache is enough.

    Raises:
        UserError: the hub refuses access, has no such repository, or does not answer.
    """
    if constants.is_offline_mode():
        return  # only the cache is read
    file = "config.json" if kind == "model" else "README.md"
    try:
        url = hf_hub_url(name, file, repo_type=kind)
        answer = http_backoff(
            "HEAD",
            url,
            headers=build_hf_headers(),
            timeout=TIMEOUT_S,
            max_retries=retries,
            retry_on_status_codes=RETRIED,
        )
        hf_raise_for_status(answer)
    except (HFValidationError, EntryNotFoundError):
        return  # the name is a path, or the repository is readable but has other files
    except httpx2.HTTPError as error:
        if not isinstance(try_to_load_from_cache(name, file, repo_type=kind), str):
            raise explain(error, name, kind) or error from None


def explain(error: BaseException, name: str, kind: Kind = "model") -> UserError | None:
    """Return a UserError if the hub or the network caused an error in reading the repository `name`, otherwise None."""
    for cause in _causes(error):
        if isinstance(cause, HfHubHTTPError) and not isinstance(cause, EntryNotFoundError):
            return UserError(_refusal(cause, name, kind))
        if isinstance(cause, httpx2.TransportError):
            reason = str(cause).strip().partition("\n")[0] or type(cause).__name__
            return UserError(
                f"{_not_a_folder(name, kind)}{constants.ENDPOINT} does not answer ({reason}). Check the network, then "
                "try again."
            )
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, the error that caused it, and so on."""
    while error:
        yield error
        error = error.__cause__ or error.__context__


def _refusal(error: HfHubHTTPError, name: str, kind: Kind) -> str:
    """Describe why the hub refused a request, and what to do."""
    status, token = error.response.status_code, get_token()
    page = f"{constants.ENDPOINT}/{'' if kind == 'model' else 'datasets/'}{name}"
    add_token = f"put a token that may read, from {TOKENS}, into .env as HF_TOKEN"
    if isinstance(error, GatedRepoError) or status == 403:
        if token:
            return f"HF_TOKEN has no access to {name}. Accept the license at {page} with the account of this token."
        return f"{name} is gated. Accept the license at {page}, and {add_token}."
    if isinstance(error, RepositoryNotFoundError) or (status == 401 and not token):
        problem = f"{_not_a_folder(name, kind)}the Hugging Face hub has no {kind} {name}"
        if token:
            return f"{problem} that HF_TOKEN may read. Correct the name."
        return f"{problem}, or it is private. Correct the name, or {add_token}."
    if status == 401:
        return f"the Hugging Face hub does not accept HF_TOKEN. In its place, {add_token}."
    if status == 429:
        advice = "" if token else f", or {add_token}, which allows more requests"
        return f"the Hugging Face hub allows no more requests for now (status 429). Try again {_when(error)}{advice}."
    return (
        f"the Hugging Face hub cannot send {name} (status {status}). Try again later. To see its state, open "
        "https://status.huggingface.co"
    )


def _not_a_folder(name: str, kind: Kind) -> str:
    """Return the beginning of a sentence: the name of a model may be a mistyped path."""
    return f"there is no folder {name}, and " if kind == "model" else ""


def _when(error: HfHubHTTPError) -> str:
    headers = error.response.headers
    limit = parse_ratelimit_headers(headers)
    seconds = headers.get("Retry-After") or (str(limit.reset_in_seconds) if limit else "")
    return f"in {seconds} s" if seconds.isdigit() else "in a few minutes"
