"""Request routers, which choose a replica for each request that HAProxy does not assign itself.

Serve's own proxy gets the requests for which HAProxy has no replica. By default, it holds them until a replica has
started, which takes minutes for a large model. These routers return an error at once, so that a client can retry or
use another server.
"""

from ray.serve.config import RequestRouterConfig
from ray.serve.llm.request_router import PrefixCacheAffinityRouter
from ray.serve.request_router import RequestRouter

from raymill.ray_support.private.serve_router import FailFastRouter, PowerOfTwoChoicesRequestRouter


class LeastLoadedRouter(FailFastRouter, PowerOfTwoChoicesRequestRouter):
    """Picks two replicas at random and chooses the one with fewer requests."""


class PrefixRouter(FailFastRouter, PrefixCacheAffinityRouter):
    """Prefers the replica that answered a request with the same prefix, unless it is much busier than the others."""


def behind_haproxy(router: type[RequestRouter]) -> RequestRouterConfig:
    """Return the configuration of a router for an app that HAProxy reaches directly.

    Serve rejects custom routers for such apps, because HAProxy does not use them. But Serve's own proxy does. Serve
    checks only the name of the router, so this function stores the class under the name of the default router.
    """
    custom = RequestRouterConfig(request_router_class=router)
    return RequestRouterConfig.from_serialized_request_router_cls({}, custom.get_serialized_request_router_cls())
