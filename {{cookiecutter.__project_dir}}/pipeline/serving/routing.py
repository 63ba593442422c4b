"""How Serve's own proxy chooses a replica. HAProxy sends it the requests for which it has no replica.

By default Serve holds such requests until a replica has started, which takes minutes for a large model. A client that
gets an error at once can retry, or use another server.
"""

from typing import Any

from ray.serve._private.request_router import PowerOfTwoChoicesRequestRouter  # Serve's default, not public yet
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.llm.request_router import PrefixCacheAffinityRouter
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


class FailFastRouter(RequestRouter):
    """Answers 503 while there is no replica. Not for apps that scale to zero, where a request starts one."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Replace the list of replicas. If it is empty, reject the requests that wait for a replica."""
        super().update_replicas(replicas)
        if not replicas:
            for pending in self._pending_requests_to_fulfill:
                if not pending.future.done():
                    pending.future.set_exception(DeploymentUnavailableError(self._deployment_id))

    async def _choose_replica_for_request(self, pending_request: PendingRequest, **options: Any) -> RunningReplica:
        if not self.curr_replicas:
            raise DeploymentUnavailableError(self._deployment_id)
        return await super()._choose_replica_for_request(pending_request, **options)


class LeastLoadedRouter(FailFastRouter, PowerOfTwoChoicesRequestRouter):
    """Picks two replicas at random, and chooses the one with fewer requests."""


class PrefixRouter(FailFastRouter, PrefixCacheAffinityRouter):
    """Prefers the replica that answered a request with the same prefix, unless it is much busier than the others."""


def behind_haproxy(router: type[RequestRouter]) -> RequestRouterConfig:
    """Return the configuration of a router for an app that HAProxy reaches directly.

    Serve rejects custom routers for such apps, because HAProxy does not use them. Serve's proxy does, and it answers
    whenever HAProxy has no replica. Serve compares names only, so the class is stored under the default's name.
    """
    custom = RequestRouterConfig(request_router_class=router)
    return RequestRouterConfig.from_serialized_request_router_cls({}, custom.get_serialized_request_router_cls())
