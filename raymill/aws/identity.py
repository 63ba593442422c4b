"""Which cluster on AWS this checkout works with: its account, region and name, and who owns it.

`prepare` records it before it creates anything, and `down` forgets it when nothing is left. In between, every verb
refuses to work in another account or region, or on another name, where it would find nothing and say so, while the
cluster still costs money.
"""

import dataclasses
import json
import re
import shlex
from pathlib import Path

from raymill import settings, state_files
from raymill.aws import caller
from raymill.common import cluster_file
from raymill.common.cluster_file import ClusterFile, target
from raymill.errors import UserError


@dataclasses.dataclass(frozen=True)
class Identity:
    """The cluster of this checkout."""

    account: str
    region: str
    slug: str
    owner: str
    """Value of the owner tag, as in caller.py."""


FOLDER = settings.PROJECT / ".cluster"


def record_of(target: str) -> Path:
    """Return the file in which this checkout records its cluster on "aws" or in a "rehearsal"."""
    return FOLDER / f"{target}-identity.json"


def record_file() -> Path:
    """Return the file in which this checkout records its cluster on the current target."""
    return record_of(target())


def load() -> ClusterFile:
    """Read cluster.yaml. Raises `UserError` if it is invalid, or as `check` does."""
    file = cluster_file.load()
    check(file)
    return file


def check(file: ClusterFile) -> None:
    """Check that cluster.yaml and the credentials are for the recorded cluster, if one is recorded.

    Raises:
        UserError: they are for another one, or cluster.yaml has two names for the cluster.
    """
    _check_names(file)
    recorded = read()
    if recorded is None:
        return
    own = f"the cluster of this checkout is {recorded.slug} in account {recorded.account}, {recorded.region}"
    gone = f"If nothing of it is left there, run: rm {shlex.quote(str(record_file()))}"
    for key, here, there in (("cluster_name", file.slug, recorded.slug), ("region", file.region, recorded.region)):
        if here != there:
            raise UserError(
                f"{own}, but cluster/cluster.yaml has {key}: {here}. Undo this change, run: inv down --target "
                f"{target()}, and then make it again. {gone}"
            )
    if (found := caller.ask(file)).account != recorded.account:
        raise UserError(
            f"{own}, but your AWS credentials are for account {found.account}: {found.arn}. Use those of account "
            f"{recorded.account}, for example: export AWS_PROFILE=NAME. {gone}"
        )


def _check_names(file: ClusterFile) -> None:
    """Check that each node type has the cluster's name in its tags, by which verbs find machines, and in its role."""
    for node_type in (file.head, *file.workers):
        specifications = node_type.node_config.get("TagSpecifications", [])
        tags = [tag["Value"] for one in specifications for tag in one.get("Tags", []) if tag["Key"] == "ray-project"]
        if set(tags) != {file.slug}:
            found = f"the tag ray-project: {', '.join(dict.fromkeys(tags))}" if tags else "no tag ray-project"
            raise UserError(
                f"{node_type.name} in cluster/cluster.yaml has {found}, but cluster_name is {file.slug}. Verbs find "
                f"machines by this tag, so write the same name in all places of cluster/cluster.yaml and "
                "cluster/stack.yaml"
            )
        expected = file.role("head" if node_type.name == file.head.name else "worker")
        role = node_type.node_config.get("IamInstanceProfile", {}).get("Name", expected)
        in_region = rf"{re.escape(file.slug)}-[a-z]+(-[a-z]+)+-\d-(head|worker)"  # your own role may have another name
        if re.fullmatch(in_region, role) and role != expected:
            raise UserError(
                f"{node_type.name} has the role {role}, but in {file.region} its name is {expected}. Change "
                "IamInstanceProfile in cluster/cluster.yaml"
            )


def read() -> Identity | None:
    """Return the recorded cluster, or None. Raises `UserError` if the record is damaged."""
    if not record_file().is_file():
        return None
    remedy = (
        "It says where your cluster is. Check the region in cluster/cluster.yaml and your AWS credentials yourself, "
        f"then run: rm {shlex.quote(str(record_file()))}"
    )
    return state_files.parse_or_refuse(record_file().read_bytes(), Identity, str(record_file()), remedy)


def record(file: ClusterFile, owner: str) -> None:
    """Record the cluster."""
    path = record_file()
    path.parent.mkdir(exist_ok=True)
    own = Identity(caller.ask(file).account, file.region, file.slug, owner)
    state_files.replace(path, json.dumps(dataclasses.asdict(own)))


def forget() -> None:
    """Delete the record."""
    record_file().unlink(missing_ok=True)
