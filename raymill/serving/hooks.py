"""Functions of jobs/serve_llm.py that reject requests to the API, or log them when they have ended."""

import inspect
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NamedTuple

from raymill import job
from raymill.serving.accounting import RequestRecord
from raymill.serving.errors import ApiError

log = logging.getLogger("ray.serve")


class ApiRequest(NamedTuple):
    """A request with a valid key, before the model sees it."""

    route: str
    """Method and path, such as `POST /v1/chat/completions`."""
    key: str
    """Name of the key, not the key itself."""
    model: str
    """Name of the requested model."""
    body: dict[str, Any]
    """The parsed body. Changing it changes nothing."""


Check = Callable[[ApiRequest], Awaitable[None] | None]
"""Raises `ApiError` if the request is rejected. While a check that is not `async` runs, all other requests wait."""
Logger = Callable[[RequestRecord], None]
"""Gets each request with a valid key when the request has ended."""


class Hooks(NamedTuple):
    """The functions of one app."""

    checks: tuple[Check, ...] = ()
    loggers: tuple[Logger, ...] = ()

    @classmethod
    def of_job(cls) -> "Hooks":
        """Return the functions in jobs/serve_llm.py. A script of an older version has none."""
        script = job.load("serve_llm")
        return cls(*(tuple(getattr(script, name, ())) for name in ("CHECKS", "LOGGERS")))


async def check(request: ApiRequest, checks: Iterable[Check]) -> None:
    """Run all checks.

    Raises:
        ApiError: a check rejects the request, or fails, because a request that was not checked must not pass.
    """
    for one in checks:
        try:
            result = one(request)
            if inspect.isawaitable(result):
                await result
        except ApiError:
            raise
        except Exception as error:
            log.exception(f"the check {_name(one)} failed")
            message = f"the server's own check {_name(one)} failed; its log says why"
            raise ApiError(500, message, code="check_failed") from error


def record(ended: RequestRecord, loggers: Iterable[Logger]) -> None:
    """Call all loggers. One that fails does not affect the answer."""
    for one in loggers:
        try:
            one(ended)
        except Exception:
            log.exception(f"the logger {_name(one)} failed")


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", repr(function))
