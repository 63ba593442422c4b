"""The SSH key pair of a cluster: the private key is on this machine, the public key on AWS."""

import contextlib
import os
import subprocess
import tempfile
from pathlib import Path

import botocore.exceptions

import settings
from cluster.common.cluster_file import TARGET, ClusterFile


def ensure(file: ClusterFile) -> None:
    """Create the key pair unless it exists.

    Raises:
        settings.UserError: the private key on this machine is missing, unreadable, or not that of the key pair on AWS.
    """
    ec2 = file.client("ec2")
    on_aws = ec2.describe_key_pairs(Filters=[{"Name": "key-name", "Values": [file.slug]}], IncludePublicKey=True)[
        "KeyPairs"
    ]
    if not on_aws:
        if not file.key_file.exists():
            _make_key(file.key_file)
        try:
            ec2.import_key_pair(
                KeyName=file.slug,
                PublicKeyMaterial=_public_key(file.key_file).encode(),
                TagSpecifications=[{"ResourceType": "key-pair", "Tags": [{"Key": "ray-project", "Value": file.slug}]}],
            )
        except botocore.exceptions.ClientError as error:
            if error.response["Error"]["Code"] != "InvalidKeyPair.Duplicate":
                raise
            ensure(file)  # somebody else has just imported a key
    elif not file.key_file.exists():
        raise settings.UserError(
            f"the cluster's private key {file.key_file} is not on this machine. Copy it from the machine that "
            f"ran `inv up`, or end the cluster: inv down --target {TARGET}"
        )
    elif (theirs := on_aws[0].get("PublicKey")) and theirs.split()[:2] != _public_key(file.key_file).split()[:2]:
        raise settings.UserError(
            f"{file.key_file} does not belong to the key pair {file.slug} on AWS. Replace it with the key from the "
            f"machine that ran `inv up`, or end the cluster: inv down --target {TARGET}"
        )


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
        raise settings.UserError(f"ssh-keygen cannot read the private key {file} ({shown.stderr.strip()})")
    return shown.stdout
