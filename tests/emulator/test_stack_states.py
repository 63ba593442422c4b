"""Test that `prepare` and `down` work with a stack in any state: they wait, repair it, or say what to do."""

import datetime
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from moto.cloudformation.models import cloudformation_backends

from emulator.emulated_account import EmulatedAccount
from raymill.aws import guard, key_pair, prepare, stack, teardown, vpc
from raymill.aws.target import Aws
from raymill.emulator.moto_instances import ACCOUNT
from raymill.errors import UserError
from raymill.ray_support.aws_sections import NetworkSection

DURATION_S = 0.5


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack, "POLL_S", 0.05)


@pytest.fixture
def slow(account: EmulatedAccount) -> EmulatedAccount:
    """Return an account in which operations on stacks take half a second."""
    account.api.stacks.seconds = DURATION_S
    return account


def deploy(account: EmulatedAccount, caller: str = "203.0.113.7/32", **changes: str) -> str:
    """Deploy the stack as `prepare` does. Return what became of it."""
    network = vpc.find_network(account.file, NetworkSection()).stack_parameters
    fixed = {"Private": "no", "Efa": "no", "Caller": caller, "BucketName": "work", "MakeBucket": "no"}
    return stack.deploy(account.file, network | fixed | changes, 0, owner="somebody")


def end_when_waited_for(account: EmulatedAccount, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    """Let the operation on the stack end while somebody waits for it."""
    follow, busy = stack._follow, account.stack

    def end_and_follow(*args: Any) -> str:
        if busy.status.endswith("_IN_PROGRESS"):
            busy.status = end
        return follow(*args)

    monkeypatch.setattr(stack, "_follow", end_and_follow)


def test_two_people_can_prepare_at_the_same_time(slow: EmulatedAccount, capsys: pytest.CaptureFixture[str]) -> None:
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(prepare.prepare, slow.file) for _ in range(2)]:
            done.result()
    shown = capsys.readouterr().out
    assert shown.count(f"stack {slow.file.slug} created in") == 1
    assert shown.count(f"stack {slow.file.slug} is up to date in") == 1


def test_a_guard_or_a_key_that_somebody_else_has_just_made_is_used(
    account: EmulatedAccount, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare.prepare(account.file)
    monkeypatch.setattr(guard, "exists", lambda file: False)
    guard.move(account.file, datetime.datetime.now(datetime.UTC), hours=1)
    key = account.file.key_file.read_bytes()
    key_pair._make_key(account.file.key_file)
    assert account.file.key_file.read_bytes() == key


def test_after_ctrl_c_during_the_creation_down_waits_and_leaves_nothing(
    slow: EmulatedAccount, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: object) -> str:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(stack, "_follow", interrupt)
        with pytest.raises(KeyboardInterrupt):
            prepare.prepare(slow.file)
    assert slow.stack.status == "CREATE_IN_PROGRESS"
    assert Aws().down() == []
    assert stack.find(slow.file) is None


def test_down_and_prepare_wait_for_each_other(slow: EmulatedAccount) -> None:
    with ThreadPoolExecutor(1) as pool:
        creating = pool.submit(deploy, slow)
        while not cloudformation_backends[ACCOUNT][slow.file.region].stacks:
            time.sleep(0.01)
        stack.delete(slow.file)
        try:
            assert creating.result() == "created"
        except UserError as error:  # it looks only after the deletion has begun
            assert "another operation ended it. Run: aws cloudformation" in str(error)  # noqa: PT017
    assert stack.find(slow.file) is None
    deploy(slow)
    slow.file.client("cloudformation").delete_stack(StackName=slow.file.slug)
    assert deploy(slow) == "created"


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        (("CREATE_FAILED", "ROLLBACK_COMPLETE", "ROLLBACK_FAILED", "DELETE_FAILED"), "created"),
        (("UPDATE_ROLLBACK_COMPLETE", "IMPORT_COMPLETE", "IMPORT_ROLLBACK_COMPLETE", "UPDATE_FAILED"), "updated"),
        (("UPDATE_ROLLBACK_FAILED",), "updated"),
    ],
)
def test_a_stack_in_a_final_state_is_updated_or_made_again(
    account: EmulatedAccount, states: Sequence[str], expected: str
) -> None:
    for status in states:
        deploy(account)
        account.stack.status = status
        assert deploy(account, "198.51.100.9/32") == expected, status
        account.stack.status = status
        stack.delete(account.file)
        assert stack.find(account.file) is None, status


@pytest.mark.parametrize(
    ("status", "advice"),
    [
        ("REVIEW_IN_PROGRESS", r"nobody has executed .* run: aws cloudformation delete-stack --stack-name my-llm --"),
        ("IMPORT_ROLLBACK_FAILED", r"is IMPORT_ROLLBACK_FAILED, so it cannot be updated\. Run: inv down --target aws"),
    ],
)
def test_a_stack_that_needs_a_decision(account: EmulatedAccount, status: str, advice: str) -> None:
    deploy(account)
    account.stack.status = status
    with pytest.raises(UserError, match=advice):
        deploy(account)


def test_a_busy_stack_is_waited_for(account: EmulatedAccount, monkeypatch: pytest.MonkeyPatch) -> None:
    for busy, end, expected in (
        ("UPDATE_IN_PROGRESS", "UPDATE_ROLLBACK_COMPLETE", "is up to date"),
        ("UPDATE_COMPLETE_CLEANUP_IN_PROGRESS", "UPDATE_COMPLETE", "is up to date"),
        ("UPDATE_ROLLBACK_IN_PROGRESS", "UPDATE_ROLLBACK_FAILED", "is up to date"),
        ("ROLLBACK_IN_PROGRESS", "ROLLBACK_COMPLETE", "created"),
        ("IMPORT_IN_PROGRESS", "IMPORT_COMPLETE", "is up to date"),
    ):
        for verb, result in ((lambda: deploy(account), expected), (lambda: stack.delete(account.file), None)):
            deploy(account)
            account.stack.status = busy
            end_when_waited_for(account, monkeypatch, end)
            assert verb() == result, busy


def test_prepare_looks_at_a_stack_only_after_its_operation(
    account: EmulatedAccount, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would ask for a bucket that an earlier stack has left."""
    prepare.prepare(account.file)
    account.stack.status = "ROLLBACK_IN_PROGRESS"
    end_when_waited_for(account, monkeypatch, "ROLLBACK_COMPLETE")
    prepare.prepare(account.file)
    assert stack.parameters(account.file)["MakeBucket"] == "no"


def test_an_operation_without_end_is_said(account: EmulatedAccount, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack, "STACK_TIMEOUT_S", 0.2)
    deploy(account)
    account.stack.status = "UPDATE_IN_PROGRESS"
    with pytest.raises(UserError, match=r"is still UPDATE_IN_PROGRESS after 0 s\. Run the command again"):
        deploy(account)


def test_a_rollback_that_stays_stuck_says_so(account: EmulatedAccount) -> None:
    deploy(account)
    account.stack.status = "UPDATE_ROLLBACK_FAILED"
    account.api.stacks.continues = False
    with pytest.raises(UserError, match=r"continuing the rollback of the stack .* failed: .* Run: inv down"):
        deploy(account)
    stack.delete(account.file)


def test_a_failed_update_names_its_own_reason_and_not_that_of_an_earlier_one(account: EmulatedAccount) -> None:
    deploy(account)
    others = ["cloudformation:*", "iam:*", "lambda:*", "ec2:Describe*"]
    account.allow([*others, "ec2:*"])
    budget = {"BudgetDollars": "10", "BudgetEmail": "a@example.com"}
    with pytest.raises(UserError, match=r"updating the stack .* Budget: .* perform: budgets:"):
        deploy(account, **budget)
    account.allow([*others, "ec2:*", "budgets:*"])
    assert deploy(account, **budget) == "updated", "an earlier rollback is no failure of this update"
    account.allow([*others, "budgets:*"])
    with pytest.raises(UserError, match=r"updating the stack .* perform: ec2:") as raised:
        deploy(account, Private="yes", **budget)
    assert "budgets" not in str(raised.value)
    assert deploy(account, **budget) == "is up to date"


def test_a_creation_that_fails_says_why_and_leaves_nothing(slow: EmulatedAccount) -> None:
    slow.allow(["cloudformation:*", "ec2:Describe*", "iam:*", "lambda:*", "scheduler:*", "secretsmanager:*"])
    with pytest.raises(UserError, match=r"creating the stack my-llm failed: Network: .* ec2:CreateTags"):
        deploy(slow)
    assert stack.find(slow.file) is None
    assert teardown.leftovers(slow.file) == []


def test_what_is_freed_late_is_deleted_in_a_second_attempt(account: EmulatedAccount) -> None:
    deploy(account)
    account.api.stacks.refused_deletions = 1
    stack.delete(account.file)
    assert stack.find(account.file) is None
    deploy(account)
    account.api.stacks.refused_deletions = stack.DELETE_ATTEMPTS
    with pytest.raises(UserError, match=r"deleting the stack .* failed: Group: .*dependent object"):
        stack.delete(account.file)
