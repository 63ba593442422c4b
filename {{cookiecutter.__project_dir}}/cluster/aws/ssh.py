"""The way to the head: commands on it, and a tunnel to its dashboard."""

import atexit
import subprocess
from dataclasses import dataclass
from pathlib import Path

import settings
from cluster.common import bucket, instances
from cluster.common.cluster_file import TARGET, ClusterFile
from cluster.network import free_ports

KNOWN_HOSTS = settings.PROJECT / ".cluster" / "known_hosts"
DASHBOARD_PORT = 8265
ENVIRONMENT = "export PATH=$HOME/env/bin:$PATH RAY_AUTH_MODE=token; "
"""What cluster.yaml's setup_commands write for login shells, for a command that runs in none."""


@dataclass(frozen=True)
class Head:
    """The head as ssh reaches it."""

    instance_id: str
    address: str
    user: str
    key_file: Path
    proxy_command: str = ""
    """What carries the connection, such as SSM; empty where the address itself is reached."""

    def command(self, *options: str) -> list[str]:
        """`ssh` with all that it needs; a command for the head may follow."""
        KNOWN_HOSTS.parent.mkdir(exist_ok=True)
        given = {
            "IdentitiesOnly": "yes",
            "HostKeyAlias": self.instance_id,  # addresses are used again; instances are not
            "UserKnownHostsFile": str(KNOWN_HOSTS),
            "StrictHostKeyChecking": "accept-new",
            "ConnectTimeout": "10",
            "ServerAliveInterval": "15",
            "ExitOnForwardFailure": "yes",
            "LogLevel": "ERROR",
        }
        if self.proxy_command:
            given["ProxyCommand"] = self.proxy_command
        options = (*options, *(word for name, value in given.items() for word in ("-o", f"{name}={value}")))
        return ["ssh", "-i", str(self.key_file), *options, f"{self.user}@{self.address}"]

    def run(self, command: str) -> str:
        """Run `command` on the head and return what it prints.

        Raises:
            settings.UserError: the head is not reached, or the command failed; with ssh's last line.
        """
        done = subprocess.run(
            [*self.command("-T"), ENVIRONMENT + command], stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        if done.returncode == 255:
            raise settings.UserError(self._unreachable(done.stderr))
        if done.returncode:
            raise settings.UserError(f"`{command}` failed on the head: {_last_line(done.stderr)}")
        return done.stdout

    def tunnel(self, *ports: int) -> tuple[dict[int, int], str]:
        """Forward each of the head's loopback ports to one of this machine's; ends with this process.

        Returns:
            this machine's port for each of `ports`, and the cluster's token.
        """
        here = dict(zip(ports, free_ports(len(ports)), strict=True))
        forwards = [word for port, local in here.items() for word in ("-L", f"127.0.0.1:{local}:127.0.0.1:{port}")]
        # The first line answers that the tunnel stands; `cat` then waits for its input to end, which happens with this
        # process, however it ends.
        process = subprocess.Popen(
            [*self.command("-T", *forwards), "cat ~/.ray/auth_token && echo && exec cat > /dev/null"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for this process: a log is followed through the tunnel while it asks
        )
        assert process.stdout
        assert process.stderr
        token = process.stdout.readline().strip()
        if not token:
            raise settings.UserError(self._unreachable(process.stderr.read()))
        atexit.register(process.kill)
        return here, token

    def _unreachable(self, stderr: str) -> str:
        return (
            f"ssh does not reach the head at {self.address} ({_last_line(stderr)}); if your own address has changed, "
            f"let it in with: inv prepare --target {TARGET}"
        )


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no reason given"


def reach(file: ClusterFile) -> Head:
    """The way to the head. Raises `settings.UserError` when no head runs."""
    machine = instances.head(file)
    if machine is None:
        raise settings.UserError(
            f"no cluster {file.slug} runs in {file.region}{bucket.note(file)}; start it with: inv up --target {TARGET}"
        )
    if not file.key_file.exists():
        raise settings.UserError(
            f"the cluster's private key {file.key_file} is not on this machine; copy it from where `inv up` ran."
        )
    address = machine.public_address or machine.private_address
    return Head(
        instance_id=machine.id,
        address=machine.id if file.auth.get("ssh_proxy_use_node_id") else address,
        user=file.auth["ssh_user"],
        key_file=file.key_file,
        proxy_command=file.auth.get("ssh_proxy_command", ""),
    )
