"""Test the options for ssh connections to the head, as ssh itself interprets them."""

import re
import subprocess
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml
from pydantic import ValidationError

from raymill import settings
from raymill.aws import ssh
from raymill.aws.ssh import SshHead
from raymill.common import cluster_file, instances
from raymill.errors import UserError
from raymill.ray_support.aws_sections import NetworkSection


def shown_config(head: SshHead) -> dict[str, str]:
    """Return the configuration that ssh uses with these options, without connecting."""
    shown = subprocess.run(head.command("-G"), check=True, capture_output=True, text=True).stdout
    return dict(line.split(" ", 1) for line in shown.splitlines() if " " in line)


def test_ssh_uses_the_address_and_only_the_clusters_key(tmp_path: Path) -> None:
    key = tmp_path / "key.pem"
    key.touch()  # without the file, ssh would fall back to its default keys
    options = shown_config(SshHead("i-0a1", "198.51.100.7", "ubuntu", key))
    assert (options["user"], options["hostname"]) == ("ubuntu", "198.51.100.7")
    assert options["identityfile"] == str(key)
    assert options["identitiesonly"] == "yes"
    assert options["hostkeyalias"] == "i-0a1"
    assert "proxycommand" not in options


def test_without_the_clusters_key_ssh_uses_the_persons_own_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = cluster_file.load().content
    file = cluster_file.ClusterFile(content | {"auth": content["auth"] | {"ssh_private_key": str(tmp_path / "no")}}, "")
    monkeypatch.setattr(instances, "head", lambda file: Mock(id="i-0a1", public_address="198.51.100.7"))
    head = ssh.find_head(file)
    assert shown_config(head)["identitiesonly"] == "no"
    assert shown_config(head)["identityfile"] != str(tmp_path / "no")
    refused = subprocess.CompletedProcess([], 255, "", "ubuntu@198.51.100.7: Permission denied (publickey).\n")
    with monkeypatch.context() as network:
        network.setattr(subprocess, "run", lambda *_, **__: refused)
        with pytest.raises(UserError, match="Ask whoever started the cluster to add your public key"):
            head.run("true")


class LocalHead(SshHead):
    """Runs the commands for the head on this machine."""

    def run(self, command: str, text: str = "") -> str:
        return subprocess.run(["bash", "-c", command], check=True, capture_output=True, text=True).stdout


def test_the_keys_of_other_people_come_and_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir()
    keys = tmp_path / ".ssh" / "authorized_keys"
    keys.write_text("ssh-ed25519 AAAAowner the cluster's own\n")
    head = LocalHead("i-0a1", "198.51.100.7", "ubuntu", None)
    ssh.add_authorized_keys(head, ["ssh-ed25519 AAAAada ada's laptop", "ssh-rsa AAAAbob"])
    assert [line.split()[1] for line in keys.read_text().splitlines()] == ["AAAAowner", "AAAAada", "AAAAbob"]
    assert keys.stat().st_mode & 0o077 == 0
    ssh.add_authorized_keys(head, ["ssh-rsa AAAAbob"])
    assert [line.split()[1] for line in keys.read_text().splitlines()] == ["AAAAowner", "AAAAbob"]
    ssh.add_authorized_keys(head, [])
    assert keys.read_text() == "ssh-ed25519 AAAAowner the cluster's own\n"


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ({"callers": ["203.0.113.7/32", "0.0.0.0/0"]}, "would open port 22 to the world"),
        ({"callers": ["laptop.example.com"]}, "is not an address"),
        ({"ssh_keys": ["-----BEGIN OPENSSH PRIVATE KEY-----"]}, "is not a public key"),
        ({"ssh_keys": ["~/.ssh/id_ed25519.pub"]}, "is not a public key"),
    ],
)
def test_a_wrong_address_or_key_is_refused(setting: dict[str, list[str]], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        NetworkSection.model_validate(setting)


def test_public_keys_are_accepted(tmp_path: Path) -> None:
    for kind in ("ed25519", "rsa", "ecdsa"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", kind, "-N", "", "-C", "ada@laptop", "-f", tmp_path / kind], check=True
        )
        NetworkSection(ssh_keys=((tmp_path / f"{kind}.pub").read_text().strip(),))


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
    options = shown_config(ssh.find_head(file))
    assert options["hostname"] == "i-0a1"
    assert options["proxycommand"].startswith('sh -c "aws ssm start-session --target %h')


OWN_CONFIG = """\
# my comment
Host *.example.com my-llm-old
    User ada
"""


@pytest.fixture
def ssh_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "a b é" / ".ssh"
    folder.mkdir(parents=True)
    monkeypatch.setattr(ssh, "_folder", lambda: folder)
    return folder


def test_ssh_itself_finds_the_head_by_name(ssh_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = ssh_folder / "my key 100%.pem"
    key.touch()
    config = ssh_folder / "config"
    config.write_text(OWN_CONFIG)
    config.chmod(0o640)
    for address in ("198.51.100.7", "198.51.100.8"):  # the second replaces the first
        head = SshHead("i-0a1", address, "ubuntu", key, 'sh -c "aws ssm start-session --target %h"')
        assert ssh.write_config(head, "my-llm").stat().st_mode & 0o077 == 0
    shown = subprocess.run(["ssh", "-F", config, "-G", "my-llm"], check=True, capture_output=True, text=True).stdout
    options = dict(line.split(" ", 1) for line in shown.splitlines() if " " in line)
    assert (
        options | {"hostname": "198.51.100.8", "user": "ubuntu", "identityfile": str(key).replace("%", "%%")} == options
    )
    assert options["hostkeyalias"] == "i-0a1"
    assert options["proxycommand"] == 'sh -c "aws ssm start-session --target %h"'
    assert config.read_text().endswith(OWN_CONFIG)
    assert config.stat().st_mode & 0o777 == 0o640
    other = subprocess.run(["ssh", "-F", config, "-G", "a.example.com"], check=True, capture_output=True, text=True)
    assert "user ada" in other.stdout.splitlines()
    assert "hostkeyalias" not in other.stdout

    ssh.remove_config("my-llm")
    assert config.read_text() == OWN_CONFIG
    assert sorted(path.name for path in ssh_folder.iterdir()) == ["config", key.name]


def test_without_an_entry_nothing_is_removed(ssh_folder: Path) -> None:
    ssh.remove_config("my-llm")
    assert list(ssh_folder.iterdir()) == []
    dotfiles = ssh_folder.parent / "dotfiles"
    dotfiles.write_text(OWN_CONFIG)
    (ssh_folder / "config").symlink_to(dotfiles)
    ssh.remove_config("my-llm")
    ssh.write_config(SshHead("i-0a1", "198.51.100.7", "ubuntu", None), "my-llm")
    ssh.remove_config("my-llm")
    assert (ssh_folder / "config").is_symlink()
    assert dotfiles.read_text() == OWN_CONFIG
