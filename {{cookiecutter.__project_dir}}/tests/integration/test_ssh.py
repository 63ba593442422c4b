"""Test the options for ssh connections to the head, as ssh itself interprets them."""

import re
import subprocess
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml

import settings
from cluster.aws import ssh
from cluster.aws.ssh import SshHead
from cluster.common import cluster_file, instances


def ssh_config(head: SshHead) -> dict[str, str]:
    """Return the configuration that ssh uses with these options, without connecting."""
    shown = subprocess.run(head.command("-G"), check=True, capture_output=True, text=True).stdout
    return dict(line.split(" ", 1) for line in shown.splitlines() if " " in line)


def test_ssh_uses_the_address_and_only_the_clusters_key(tmp_path: Path) -> None:
    key = tmp_path / "key.pem"
    key.touch()  # without the file, ssh would fall back to its default keys
    options = ssh_config(SshHead("i-0a1", "198.51.100.7", "ubuntu", key))
    assert (options["user"], options["hostname"]) == ("ubuntu", "198.51.100.7")
    assert options["identityfile"] == str(key)
    assert options["identitiesonly"] == "yes"
    assert options["hostkeyalias"] == "i-0a1"
    assert "proxycommand" not in options


def test_with_ssm_ssh_uses_the_instance_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (settings.PROJECT / "docs" / "aws-variants.md").read_text(encoding="utf-8")
    block = next(block for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL) if "ssh_proxy_command" in block)
    key = tmp_path / "key.pem"
    key.touch()
    content = cluster_file.load().content
    auth = content["auth"] | yaml.safe_load(block)["auth"] | {"ssh_private_key": str(key)}
    file = cluster_file.ClusterFile(content | {"auth": auth}, "")
    instance = Mock(id="i-0a1", public_address="", private_address="10.0.0.7")
    monkeypatch.setattr(instances, "head", lambda file: instance)
    options = ssh_config(ssh.find_head(file))
    assert options["hostname"] == "i-0a1"
    assert options["proxycommand"].startswith('sh -c "aws ssm start-session --target %h')
