"""Who owns the cluster. Several people may use the same account, and the same name for their clusters."""

import shlex
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from raymill.aws import aws_errors, caller, consent, identity, stack
from raymill.common import aws_session
from raymill.common.cluster_file import ClusterFile, target

UNKNOWN = "unknown"
"""Owner of a cluster that an older version of this project has made."""
ROLE = "guard-caller"
"""Part of the name of a role that every stack makes, as in `ClusterFile.role`."""
OTHER_NAME = "write another cluster_name in all places of cluster/cluster.yaml and cluster/stack.yaml"


def find(file: ClusterFile) -> str | None:
    """Return the owner of the stack or, if there is no stack, of the key pair. Return None if there is neither."""
    if found := stack.find(file):
        return _owner(found)
    named = [{"Name": "key-name", "Values": [file.slug]}]
    keys = file.client("ec2").describe_key_pairs(Filters=named)["KeyPairs"]
    return _owner(keys[0]) if keys else None


def _owner(described: dict[str, Any]) -> str:
    tags = {tag["Key"]: tag["Value"] for tag in described.get("Tags", [])}
    return tags.get(caller.OWNER_TAG, UNKNOWN)


def is_mine(file: ClusterFile, owner: str) -> bool:
    """Return whether the cluster belongs to the caller, or to the owner that this checkout has recorded.

    That of an older version, which has no owner, belongs to each checkout that has a record.
    """
    recorded = identity.read()
    return owner == caller.ask(file).owner or (recorded is not None and owner in (recorded.owner, UNKNOWN))


def agree(file: ClusterFile, agreed: str, question: str, command: str) -> None:
    """Ask before `command` works on the cluster of another owner, unless `agreed` names this owner.

    Raises:
        UserError: the user does not agree, or cannot be asked.
    """
    try:
        owner = find(file)
    except (BotoCoreError, ClientError):
        if identity.read() is None:
            raise
        return  # the cluster of this checkout, which `down` must end even if CloudFormation does not answer
    if owner is None or owner == agreed or is_mine(file, owner):
        return
    whose = describe(file, owner)
    consent.require(
        f"{whose}. {question}",
        f"{whose}. To agree, run: {command} --owner {shlex.quote(owner)}   For a cluster of your own, {OTHER_NAME}",
    )


def describe(file: ClusterFile, owner: str) -> str:
    """Return a sentence that says where the cluster is and whose it is."""
    where = f"the cluster {file.slug} in account {caller.ask(file).account}, {file.region}"
    return f"{where} does not say whose it is" if owner == UNKNOWN else f"{where} belongs to {owner}"


def record(file: ClusterFile) -> str:
    """Record that this checkout works with the cluster, which may not exist yet. Return its owner."""
    found = find(file)
    owner = caller.ask(file).owner if found in (None, UNKNOWN) else found
    identity.record(file, owner)
    return owner


def describe_nothing(file: ClusterFile) -> str:
    """Return sentences that say where there is nothing to end, and where clusters of this account are."""
    who = caller.ask(file)
    nothing = f"there was nothing to end: account {who.account} ({who.arn}) has nothing of {file.slug} in {file.region}"
    try:
        pages = file.client("iam").get_paginator("list_roles").paginate(PaginationConfig={"PageSize": 1000})
        names = [role["RoleName"] for page in pages for role in page["Roles"]]
    except (BotoCoreError, ClientError) as error:
        return f"{nothing}. Other regions were not searched: {aws_errors.explain(error)}"
    partition = who.arn.split(":")[1]
    regions = aws_session.current(file.region).get_available_regions("cloudformation", partition)
    ends = {region: f"-{region}-{ROLE}" for region in regions}
    found = [f"{name.removesuffix(end)} in {one}" for name in names for one, end in ends.items() if name.endswith(end)]
    if not found:
        return f"{nothing}, and no cluster in any region. If yours is in another account, use its credentials"
    return (
        f"{nothing}, but it has {', '.join(sorted(found))}. If one of them is yours, set its region and name in "
        f"cluster/cluster.yaml, then run: inv down --target {target()}"
    )
