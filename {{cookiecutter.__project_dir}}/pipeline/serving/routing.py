"""How Serve's own proxy chooses a replica. HAProxy sends it the requests for which it knows no replica.

By default Serve holds them until a replica has started, which takes minutes for a large model. A client that gets an
error at once can retry, or use another server.
"""

from ray.serve.config import RequestRouterConfig
from ray.serve.llm.request_router import PrefixCacheAffinityRouter
from ray.serve.request_router import RequestRouter

from pipeline.ray_support.private.serve_router import FailFastRouter, PowerOfTwoChoicesRequestRouter


class LeastLoaded(FailFastRouter, PowerOfTwoChoicesRequestRouter):
    """Picks two replicas at random and chooses the one with fewer requests."""


class SamePrefix(FailFastRouter, PrefixCacheAffinityRouter):
    """Prefers the replica that has answered a request with the same prefix, unless it is much busier than others."""


def behind_haproxy(router: type[RequestRouter]) -> RequestRouterConfig:
    """Return the configuration with this router, for an app that HAProxy reaches directly.

    Serve refuses any router but its own there, because HAProxy never asks it. Serve's proxy does ask it, and answers
    whenever HAProxy has no replica. Serve compares names only, so the class is stored under the name of the default.
    """
    custom = RequestRouterConfig(request_router_class=router)
    return RequestRouterConfig.from_serialized_request_router_cls({}, custom.get_serialized_request_router_cls())
