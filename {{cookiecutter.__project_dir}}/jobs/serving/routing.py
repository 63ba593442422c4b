"""How Serve's own proxy chooses a replica. It gets the requests for which HAProxy has none.

By itself it would hold them until a replica has started, which takes minutes for a large model. A client that is
refused at once can ask elsewhere, or again.
"""

from typing import Any

from ray.serve._private.request_router import PowerOfTwoChoicesRequestRouter  # Serve's default, not public yet
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.llm.request_router import PrefixCacheAffinityRouter
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


class RefusesWithoutReplicas(RequestRouter):
    """Answers with status 503 while there is no replica. Not for apps that scale to zero: a request wakes those."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take over the replicas that there are now; without any, refuse what still waits for one."""
        super().update_replicas(replicas)
        if not replicas:
            for pending in self._pending_requests_to_fulfill:
                if not pending.future.done():
                    pending.future.set_exception(DeploymentUnavailableError(self._deployment_id))

    async def _choose_replica_for_request(self, pending_request: PendingRequest, **how: Any) -> RunningReplica:
        if not self.curr_replicas:
            raise DeploymentUnavailableError(self._deployment_id)
        return await super()._choose_replica_for_request(pending_request, **how)


class LeastLoaded(RefusesWithoutReplicas, PowerOfTwoChoicesRequestRouter):
    """Of two replicas, the one that works on fewer requests."""


class SamePrefix(RefusesWithoutReplicas, PrefixCacheAffinityRouter):
    """The replica that has answered a request with the same beginning, unless it has much more to do than others."""
