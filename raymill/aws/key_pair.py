"""The SSH key pair of a cluster: the private key is on this machine, the public key on AWS."""

import contextlib
import os
import subprocess
import tempfile
from pathlib import Path

import botocore.exceptions

from raymill.aws import caller, ownership
from raymill.common.cluster_file import ClusterFile, target
from raymill.errors import UserError


def check(file: ClusterFile) -> bool:
    """Return whether AWS has the key pair.

    Raises:
        UserError: the private key on this machine is missing, unreadable, or not that of the key pair on AWS.
    """
    named = [{"Name": "key-name", "Values": [file.slug]}]
    on_aws = file.client("ec2").describe_key_pairs(Filters=named, IncludePublicKey=True)["KeyPairs"]
    if not on_aws:
        return False
    if not file.key_file.exists():
        problem = f"the cluster's private key {file.key_file} is not on this machine. Copy it"
        raise UserError(f"{problem} {_advise(file)}")
    if (theirs := on_aws[0].get("PublicKey")) and theirs.split()[:2] != _public_key(file.key_file).split()[:2]:
        problem = f"{file.key_file} does not belong to the key pair {file.slug} on AWS. Replace it with the key"
        raise UserError(f"{problem} {_advise(file)}")
    return True


def _advise(file: ClusterFile) -> str:
    """Return where the key is, and what else to do. Only who owns the cluster is advised to end it."""
    found = ownership.find(file) or ownership.UNKNOWN
    if found == caller.ask(file).owner:
        return f"from the machine that ran `inv up`, or end the cluster: inv down --target {target()}"
    whose = ownership.describe(file, found)
    return f"from its owner's machine ({whose}). For a cluster of your own, {ownership.OTHER_NAME}"


def ensure(file: ClusterFile, owner: str) -> None:
    """Create the key pair for this owner unless it exists. Raises `UserError` as `check` does."""
    if check(file):
        return
    if not file.key_file.exists():
        _make_key(file.key_file)
    tags = [{"Key": "ray-project", "Value": file.slug}, {"Key": caller.OWNER_TAG, "Value": owner}]
    try:
        file.client("ec2").import_key_pair(
            KeyName=file.slug,
            PublicKeyMaterial=_public_key(file.key_file).encode(),
            TagSpecifications=[{"ResourceType": "key-pair", "Tags": tags}],
        )
    except botocore.exceptions.ClientError as error:
        if error.response["Error"]["Code"] != "InvalidKeyPair.Duplicate":
            raise
        check(file)  # somebody else has just imported a key


def _make_key(file: Path) -> None:
    """Make a private key. ssh-keygen -y derives the public key from it."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        made = Path(folder, file.name)
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", file.stem, "-f", made], check=True)
        with contextlib.suppress(FileExistsError):  # another verb has just made one
            os.link(made, file)


def _public_key(file: Path) -> str:
    shown = subprocess.run(["ssh-keygen", "-y", "-f", file], capture_output=True, text=True)
    if shown.returncode:
        raise UserError(f"ssh-keygen cannot read the private key {file} ({shown.stderr.strip()})")
    return shown.stdout
