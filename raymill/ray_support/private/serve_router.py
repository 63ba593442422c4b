"""Ray Serve's request routers, which choose a replica for each request."""

from typing import Any

from ray.serve._private.request_router import PowerOfTwoChoicesRequestRouter
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

__all__ = ["FailFastRouter", "PowerOfTwoChoicesRequestRouter"]


class FailFastRouter(RequestRouter):
    """Answers 503 while there is no replica.

    Apps that scale to zero cannot use it, because only waiting requests make them start a replica.

    Relies on `_pending_requests_to_fulfill`, `_deployment_id` and `_choose_replica_for_request` of
    ray.serve.request_router.RequestRouter (Ray 2.60). Serve's default router, PowerOfTwoChoicesRequestRouter of
    ray.serve._private.request_router, is not public either.
    """

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Use these replicas from now on. If there are none, refuse the requests that wait for one."""
        super().update_replicas(replicas)
        if not replicas:
            for pending in self._pending_requests_to_fulfill:
                if not pending.future.done():
                    pending.future.set_exception(DeploymentUnavailableError(self._deployment_id))

    async def _choose_replica_for_request(self, pending_request: PendingRequest, **options: Any) -> RunningReplica:
        if not self.curr_replicas:
            raise DeploymentUnavailableError(self._deployment_id)
        return await super()._choose_replica_for_request(pending_request, **options)
