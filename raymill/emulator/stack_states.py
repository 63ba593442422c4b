"""The states of stacks in the emulated cloud: an operation takes time, and meanwhile no other one can start.

moto completes an operation before it answers. Here, the resources of a new or updated stack exist at once, those of a
deleted stack until its end, and the stack is *_IN_PROGRESS for a while.
https://docs.aws.amazon.com/AWSCloudFormation/latest/UserGuide/using-cfn-describing-stacks.html
"""

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from moto.cloudformation.models import Stack, cloudformation_backends

from raymill.emulator import stack_updates
from raymill.emulator.iam import AwsError, Principal, account_of

DURATION_S = 15.0
"""How long an operation takes in the emulated cloud. On AWS, it takes some minutes."""
CHANGES = ("CreateStack", "UpdateStack", "DeleteStack", "ContinueUpdateRollback")
NOT_UPDATABLE = ("REVIEW_IN_PROGRESS", "ROLLBACK_COMPLETE", "ROLLBACK_FAILED", "CREATE_FAILED", "DELETE_FAILED")
NOT_UPDATABLE += ("UPDATE_ROLLBACK_FAILED", "IMPORT_ROLLBACK_FAILED")
DELETABLE_WHILE_BUSY = ("CREATE_IN_PROGRESS", "DELETE_IN_PROGRESS", "REVIEW_IN_PROGRESS")
IN_USE = "resource sg-1 has a dependent object (Service: Ec2, Status Code: 400)"
CONTINUED = (
    '<ContinueUpdateRollbackResponse xmlns="http://cloudformation.amazonaws.com/doc/2010-05-15/">'
    "<ContinueUpdateRollbackResult/></ContinueUpdateRollbackResponse>"
)
DELETED = (
    '<DeleteStackResponse xmlns="http://cloudformation.amazonaws.com/doc/2010-05-15/"><DeleteStackResult/>'
    "</DeleteStackResponse>"
)


@dataclass(frozen=True)
class _Operation:
    stack: Stack
    at: float
    """When it ends."""
    end: str
    """The state of the stack at its end."""
    caller: Principal | None
    """Who deletes the stack."""


class StackStates:
    """Delays the ends of operations on stacks, and refuses operations that the state of a stack does not allow."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """How long an operation takes."""
        self.continues = True
        """Whether a rollback that is continued succeeds."""
        self.refused_deletions = 0
        """How many of the next deletions fail, because something still uses the security group."""
        self._busy: dict[str, _Operation] = {}
        """Maps the ids of busy stacks to their operations."""
        self._lock = threading.Lock()

    def begin(self, action: str, region: str, parameters: Mapping[str, str], caller: Principal) -> str | None:
        """Check that an operation can start. Return the answer if this class answers the call, or None.

        Raises:
            AwsError: the state of the stack does not allow the operation.
        """
        if action not in CHANGES:
            return None
        stack = _find(account_of(caller.arn), region, parameters["StackName"])
        stack_updates.CALLER.set(caller)
        if stack is None:
            return None
        is_busy = stack.status.endswith("_IN_PROGRESS")
        if action == "CreateStack" and is_busy:  # moto refuses it in other states
            raise AwsError("AlreadyExistsException", f"Stack [{stack.name}] already exists")
        if action == "UpdateStack" and (is_busy or stack.status in NOT_UPDATABLE):
            text = f"Stack:{stack.stack_id} is in {stack.status} state and can not be updated."
            raise AwsError("ValidationError", text)
        if action == "DeleteStack":
            return self._begin_deletion(stack, caller)
        if action == "ContinueUpdateRollback":
            return self._continue_rollback(stack)
        return None

    def note(self, action: str, region: str, parameters: Mapping[str, str], account: str) -> None:
        """After moto's part of an operation, show the stack as busy, if operations take time."""
        if action not in ("CreateStack", "UpdateStack") or not self.seconds:
            return
        backend, name = cloudformation_backends[account][region], parameters["StackName"]
        stack = _find(account, region, name)
        if stack is None:  # its creation failed, and moto has forgotten it
            stack = next(one for one in reversed(backend.deleted_stacks.values()) if one.name == name)
            backend.stacks[stack.stack_id] = backend.deleted_stacks.pop(stack.stack_id)
        self._occupy(stack, f"{action.removesuffix('Stack').upper()}_IN_PROGRESS", stack.status)

    def end_due(self) -> None:
        """End the operations whose time has come. Each call to the emulated AWS does this first."""
        with self._lock:
            ended = [one for one in self._busy.values() if time.monotonic() >= one.at]
            for one in ended:
                del self._busy[one.stack.stack_id]
        for one in ended:
            stack, caller = one.stack, one.caller
            backend = cloudformation_backends[stack.account_id][stack.region_name]
            if backend.stacks.get(stack.stack_id) is not stack:
                continue  # a test has emptied the account
            if one.end == "DELETE_COMPLETE" and caller is None:  # its creation failed
                backend.deleted_stacks[stack.stack_id] = backend.stacks.pop(stack.stack_id)
                stack.status = one.end
            elif one.end == "DELETE_COMPLETE":
                stack_updates.CALLER.set(caller)
                backend.delete_stack(stack.stack_id)
            else:
                stack.status = one.end

    def _begin_deletion(self, stack: Stack, caller: Principal) -> str | None:
        if stack.status.endswith("_IN_PROGRESS") and stack.status not in DELETABLE_WHILE_BUSY:
            text = f"Stack [{stack.name}] cannot be deleted while in status {stack.status}"
            raise AwsError("ValidationError", text)
        if not self.seconds and not self.refused_deletions:
            return None
        if stack.status != "DELETE_IN_PROGRESS":
            stack._add_stack_event("DELETE_IN_PROGRESS", resource_status_reason="User Initiated")
            if self.refused_deletions:
                self.refused_deletions -= 1
                stack_updates.note_failure(stack, stack_updates.ResourceFailed("Group", "delete", IN_USE))
                self._occupy(stack, "DELETE_IN_PROGRESS", "DELETE_FAILED")
            else:
                self._occupy(stack, "DELETE_IN_PROGRESS", "DELETE_COMPLETE", caller)
        return DELETED

    def _continue_rollback(self, stack: Stack) -> str:
        if stack.status != "UPDATE_ROLLBACK_FAILED":
            text = f"Stack:{stack.stack_id} is in {stack.status} state and can not continue its rollback."
            raise AwsError("ValidationError", text)
        stack._add_stack_event("UPDATE_ROLLBACK_IN_PROGRESS", resource_status_reason="User Initiated")
        end = "UPDATE_ROLLBACK_COMPLETE" if self.continues else "UPDATE_ROLLBACK_FAILED"
        self._occupy(stack, "UPDATE_ROLLBACK_IN_PROGRESS", end)
        return CONTINUED

    def _occupy(self, stack: Stack, status: str, end: str, caller: Principal | None = None) -> None:
        with self._lock:
            stack.status = status
            self._busy[stack.stack_id] = _Operation(stack, time.monotonic() + self.seconds, end, caller)


def _find(account: str, region: str, name_or_id: str) -> Stack | None:
    stacks = cloudformation_backends[account][region].stacks.values()
    return next((one for one in stacks if name_or_id in (one.name, one.stack_id)), None)
