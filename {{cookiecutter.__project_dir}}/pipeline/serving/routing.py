"""How Serve's own proxy chooses a replica. HAProxy sends a request to this proxy if HAProxy has no replica for it.

By default Serve holds such requests until a replica has started, which takes minutes for a large model. A client that
gets an error at once can retry, or use another server.
"""

from ray.serve.config import RequestRouterConfig
from ray.serve.llm.request_router import PrefixCacheAffinityRouter
from ray.serve.request_router import RequestRouter

from pipeline.ray_support.private.serve_router import FailFastRouter, PowerOfTwoChoicesRequestRouter


class LeastLoadedRouter(FailFastRouter, PowerOfTwoChoicesRequestRouter):
    """Picks two replicas at random and chooses the one with fewer requests."""


class PrefixRouter(FailFastRouter, PrefixCacheAffinityRouter):
    """Prefers the replica that has answered a request with the same prefix, unless it is much busier than others."""


def behind_haproxy(router: type[RequestRouter]) -> RequestRouterConfig:
    """Return the configuration of a router for an app that HAProxy reaches directly.

    Serve rejects custom routers for such apps, because HAProxy does not use them. Serve's proxy does, and it answers
    whenever HAProxy has no replica. Serve compares only names, so the class is stored under the default router's name.
    """
    custom = RequestRouterConfig(request_router_class=router)
    return RequestRouterConfig.from_serialized_request_router_cls({}, custom.get_serialized_request_router_cls())
