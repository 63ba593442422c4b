"""Rejects requests for models that an app does not serve, before vLLM sees their names."""

from collections.abc import Callable, Container, Mapping

from starlette.types import ASGIApp, Receive, Scope, Send

from raymill.serving.body_checks import Body
from raymill.serving.errors import ApiError

MAX_NAME_SHOWN = 200  # maximum characters of a model's name in an error message


class KnownModels:
    """ASGI middleware that looks the requested model up among the names that the app serves.

    vLLM's resolvers take any name for that of an adapter, and vLLM keeps a lock for each, however long it is. Requires
    `ApiMiddleware` in front, which inspects the body. A body without a name passes, because vLLM then uses the model.
    """

    def __init__(self, app: ASGIApp, names: Callable[[], Container[str]], problems: Mapping[str, str]) -> None:
        """`names` returns the names of the app's model and its adapters; `problems` says what is wrong with others."""
        self.app = app
        self._names = names
        self._problems = problems

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body: Body | None = scope.get("state", {}).get("body")
        if body and body.model and body.model not in self._names():
            if problem := self._problems.get(body.model):
                raise ApiError(400, f"the adapter of {body.model} cannot be used: {problem}", param="model")
            raise unknown_model(body.model)
        await self.app(scope, receive, send)


def unknown_model(name: str) -> ApiError:
    """Return the error for a request for a model that nobody serves."""
    message = f"model `{name[:MAX_NAME_SHOWN]}` does not exist; list the models with GET /v1/models"
    return ApiError(404, message, param="model")
