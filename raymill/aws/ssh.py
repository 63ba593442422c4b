"""Connects to the head over ssh: runs commands, opens tunnels to its ports, and lets other people and programs in."""

import atexit
import os
import pwd
import secrets
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from raymill import settings, state_files
from raymill.common import bucket, instances
from raymill.common.cluster_file import ClusterFile, target
from raymill.errors import UserError
from raymill.network import free_ports
from raymill.target import NotOnCluster

KNOWN_HOSTS = settings.PROJECT / ".cluster" / "known_hosts"
ENVIRONMENT = "export PATH=$HOME/env/bin:$PATH RAY_AUTH_MODE=token; "
"""Sets variables for a command run over ssh. Interactive shells get them from ~/.bashrc (see cluster.yaml)."""
TOKEN_UNTIL_EOF = "cat ~/.ray/auth_token && echo && exec cat > /dev/null"
"""Prints the token, and runs until its input is closed, which happens however the other end stops."""


@dataclass(frozen=True)
class SshHead:
    """The head, and how ssh connects to it."""

    instance_id: str
    address: str
    user: str
    key_file: Path | None
    """The cluster's private key. None: the private keys that ssh uses by default, on the machine of another person."""
    proxy_command: str = ""
    """Command that carries the connection, for example through SSM. Empty for a direct connection."""

    def options(self) -> dict[str, str]:
        """Return the options for each connection, as in ssh_config(5)."""
        KNOWN_HOSTS.parent.mkdir(exist_ok=True)
        options = {
            "HostKeyAlias": self.instance_id,  # AWS reuses addresses, but not instance ids
            "UserKnownHostsFile": _quoted(KNOWN_HOSTS),
            "StrictHostKeyChecking": "accept-new",
            "ConnectTimeout": "10",
            "ServerAliveInterval": "15",
            "ExitOnForwardFailure": "yes",
            "LogLevel": "ERROR",
        }
        if self.proxy_command:
            options["ProxyCommand"] = self.proxy_command
        if self.key_file:
            options |= {"IdentitiesOnly": "yes", "IdentityFile": _quoted(self.key_file)}
        return options

    def command(self, *options: str) -> list[str]:
        """Return the ssh command with all its options. You can append a command for the head."""
        options = (*options, *(word for name, value in self.options().items() for word in ("-o", f"{name}={value}")))
        return ["ssh", *options, f"{self.user}@{self.address}"]

    def run(self, command: str, text: str = "") -> str:
        """Run `command` on the head with `text` as its input, and return its output.

        Raises:
            UserError: ssh cannot connect, or the command failed. The message contains stderr's last line.
        """
        done = subprocess.run([*self.command("-T"), ENVIRONMENT + command], input=text, capture_output=True, text=True)
        if done.returncode == 255:
            raise UserError(self._unreachable(done.stderr))
        if done.returncode:
            raise UserError(f"`{command}` failed on the head: {_last_line(done.stderr)}")
        return done.stdout

    def tunnel(self, *ports: int) -> tuple[dict[int, int], str]:
        """Forward loopback ports of the head to this machine, until this process ends.

        Returns:
            The local port for each of the head's `ports`, and the cluster's token.

        Raises:
            UserError: ssh cannot connect.
        """
        local_ports = dict(zip(ports, free_ports(len(ports)), strict=True))
        forwards = [
            word for port, local in local_ports.items() for word in ("-L", f"127.0.0.1:{local}:127.0.0.1:{port}")
        ]
        return local_ports, self._forward(*forwards)

    def relay_metrics(self) -> str:
        """Start raymill/node/metrics_relay.py on the head, until this process ends. Return its HOST:PORT here.

        Raises:
            UserError: ssh cannot connect, or the relay does not start.
        """
        (port,) = free_ports(1)
        socket = f"/tmp/metrics-relay-{secrets.token_hex(8)}"
        self._forward(
            *("-L", f"127.0.0.1:{port}:{socket}"),
            command=f"{ENVIRONMENT}cd ~/project && exec python -m raymill.node.metrics_relay {socket}",
        )
        return f"127.0.0.1:{port}"

    def notebook(self) -> str:
        """Start raymill/node/notebook.py on the head, until this process ends. Return JupyterLab's URL here.

        Raises:
            UserError: ssh cannot connect, or JupyterLab does not start.
        """
        (port,) = free_ports(1)
        socket = f"/tmp/notebook-{secrets.token_hex(8)}"
        token = self._forward(
            *("-L", f"127.0.0.1:{port}:{socket}"),
            command=f"{ENVIRONMENT}cd ~/project && exec python -m raymill.node.notebook {socket}",
        )
        return f"http://127.0.0.1:{port}/lab?token={token}"

    def _forward(self, *options: str, command: str = TOKEN_UNTIL_EOF) -> str:
        """Run ssh with these options for forwarding until this process ends. Return the cluster's token.

        `command` prints the token when the tunnel is ready, and ends when its input is closed.
        """
        process = subprocess.Popen(
            [*self.command("-T", *options), command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C must not reach ssh: the verb still needs the tunnel
        )
        assert process.stdout
        assert process.stderr
        token = process.stdout.readline().strip()
        if not token:
            raise UserError(self._unreachable(process.stderr.read()))
        atexit.register(process.kill)
        return token

    def _unreachable(self, stderr: str) -> str:
        reason = f"ssh cannot connect to the head at {self.address} ({_last_line(stderr)})"
        if self.key_file is None and "Permission denied" in stderr:
            return (
                f"{reason}. Ask whoever started the cluster to add your public key to ssh_keys in [cluster.network] of "
                f"settings.toml, and to run: inv prepare --target {target()}"
            )
        return f"{reason}. If your address has changed, run: inv prepare --target {target()}"


def _quoted(path: Path) -> str:
    """Return a path as an ssh option. ssh splits some options at spaces, and replaces % and a letter."""
    return '"' + str(path).replace("%", "%%") + '"'


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no reason given"


def find_head(file: ClusterFile) -> SshHead:
    """Return the running head. Raises `NotOnCluster` if there is none."""
    instance = instances.head(file)
    if instance is None:
        raise NotOnCluster(
            f"no cluster {file.slug} runs in {file.region}{bucket.note(file)}. Run: inv up --target {target()}"
        )
    address = instance.public_address or instance.private_address
    return SshHead(
        instance_id=instance.id,
        address=instance.id if file.auth.get("ssh_proxy_use_node_id") else address,
        user=file.auth["ssh_user"],
        key_file=file.key_file if file.key_file.exists() else None,
        proxy_command=file.auth.get("ssh_proxy_command", ""),
    )


def write_config(head: SshHead, name: str) -> Path:
    """Write an entry with this name for the head, and return its file. Replaces an older entry of this name."""
    folder = _folder()
    folder.mkdir(mode=0o700, exist_ok=True)
    options = {"HostName": head.address, "User": head.user, **head.options()}
    lines = [f"Host {name}", *(f"    {option} {value}" for option, value in options.items())]
    state_files.replace(_file(name), "".join(f"{line}\n" for line in lines))
    config = folder / "config"
    text = config.read_text(encoding="utf-8") if config.exists() else ""
    if _include(name) not in text.splitlines():
        # At the top: below a Host or Match line, it would apply only to that host. ssh_config(5)
        state_files.replace(config, f"{_include(name)}\n{text}")
    return _file(name)


def remove_config(name: str) -> None:
    """Remove the entry with this name, if there is one. All other lines of ~/.ssh/config stay as they are."""
    _file(name).unlink(missing_ok=True)
    config = _folder() / "config"
    if not config.exists():
        return
    lines = config.read_text(encoding="utf-8").splitlines(keepends=True)
    if kept := [line for line in lines if line.strip() != _include(name)]:
        if kept != lines:
            state_files.replace(config, "".join(kept))
    elif lines:
        config.unlink()


def _folder() -> Path:
    """Return the folder that ssh reads. ssh ignores the variable HOME."""
    return Path(pwd.getpwuid(os.getuid()).pw_dir) / ".ssh"


def _file(name: str) -> Path:
    return _folder() / f"{name}.config"


def _include(name: str) -> str:
    return f'Include "{_file(name)}"'


MARK = "(from settings.toml)"
"""Ends the comment of each key that this module has added."""


def add_authorized_keys(head: SshHead, keys: Sequence[str]) -> None:
    """Let the owners of these public keys connect to the head. Remove keys that are no longer in the settings.

    Raises:
        UserError: ssh cannot connect.
    """
    mark, added = shlex.quote(MARK), shlex.quote("".join(f"{key} {MARK}\n" for key in keys))
    head.run(
        f"cd ~/.ssh && umask 077 && {{ grep -vF {mark} authorized_keys; printf %s {added}; }} > authorized_keys.new && "
        "mv authorized_keys.new authorized_keys"
    )
