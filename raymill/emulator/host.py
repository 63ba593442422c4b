"""An emulated instance: Linux namespaces with their own network card, addresses, processes, users, files and sshd."""

import contextlib
import os
import signal
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from raymill.emulator.addresses import GATEWAY
from raymill.node.state import BLOCK_END

INIT = Path(__file__).with_name("host_init.sh")
DISK_GB = 500
"""As in cluster.yaml. The disk takes only as much memory as there is on it."""
BOOT_TIMEOUT_S = 120  # booting usually takes a second, and failure is noticed immediately


@dataclass
class Host:
    """A host in its own namespaces. The namespaces end with the host's first process, which ends with the cloud."""

    folder: Path
    """The host's disk: a tmpfs of its own, which holds everything that the host writes."""
    instance_id: str
    private_ip: str
    public_ip: str
    """Empty if the instance has no public address."""
    has_internet: bool
    """Whether its subnet's route leads out of the VPC. If not, the host reaches only hosts of its VPC."""
    public_key: str
    user_data: bytes
    gpus: int
    has_nvme: bool
    layers: str
    shared_paths: list[str]
    process: subprocess.Popen | None = field(default=None, init=False)

    def boot(self) -> None:
        """Boot the host, and return when sshd answers. Raises RuntimeError with the end of the boot log on failure."""
        self.folder.mkdir(parents=True)
        self._mount_disk("-o", f"size={DISK_GB}G", "tmpfs")
        name = f"ip-{self.private_ip.replace('.', '-')}"
        for file, text in {
            "layers": self.layers,
            "shared": "".join(f"{path}\n" for path in self.shared_paths),
            "hostname": name,
            "hosts": f"127.0.0.1 localhost\n{self.private_ip} {name}\n",
            "authorized_keys": self.public_key,
            "gpus": str(self.gpus),
            "nvme": "yes" if self.has_nvme else "",
        }.items():
            (self.folder / file).write_text(text)
        (self.folder / "user-data").write_bytes(self.user_data)
        self._start()

    def reboot(self) -> None:
        """End all of the host's processes, and boot it again with the same disk."""
        self._kill()
        self._start()

    def _start(self) -> None:
        namespaces = ["unshare", "--net", "--mount", "--pid", "--ipc", "--uts", "--fork", "--kill-child"]
        gateway = GATEWAY if self.has_internet else ""
        with (self.folder / "boot.log").open("ab") as log:
            self.process = subprocess.Popen(
                [*namespaces, "bash", str(INIT), str(self.folder), self.private_ip, self.public_ip, gateway],
                env={"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._connect_network()
        self._wait_for_sshd()

    def is_alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def stop(self) -> None:
        """Kill all of the host's processes at once, and delete its files."""
        self._kill()
        subprocess.run(["umount", "--lazy", self.folder], check=True)
        self.folder.rmdir()

    def fill_disk(self) -> None:
        """Leave no space on the host's disk. This shrinks the disk, because a file of its size would take memory."""
        disk = os.statvfs(self.folder)
        used = (disk.f_blocks - disk.f_bfree) * disk.f_frsize
        self._mount_disk("-o", f"remount,size={used}")

    def _mount_disk(self, *arguments: str) -> None:
        subprocess.run(["mount", "-t", "tmpfs", *arguments, self.folder], check=True)

    def _kill(self) -> None:
        if self.process:
            self.process.send_signal(signal.SIGKILL)  # because of --kill-child, this also kills the host's PID 1
            self.process.wait()
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("link", "del", self._card())

    def age_lease(self, seconds: float) -> None:
        """Backdate the host's lease (see cluster.yaml), so that tests need not wait ten minutes."""
        lease = Path("/proc", self._first_process(), "root", "run/lease/renewed")
        renewed = lease.stat().st_mtime - seconds
        os.utime(lease, (renewed, renewed))

    def move_block_end(self, end: str) -> None:
        """Change when the host's Capacity Block ends (see launcher_file.py), so that tests need not wait for days."""
        Path("/proc", self._first_process(), "root", *BLOCK_END.parts[1:]).write_text(end)

    def log(self) -> str:
        return (self.folder / "boot.log").read_text(errors="replace")

    def _first_process(self) -> str:
        """Return the pid that the host's process 1 has in the cloud's namespace."""
        assert self.process
        return Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()[0]

    def _card(self) -> str:
        return f"v{self.instance_id[-12:]}"  # Linux allows 15 characters in a network card's name

    def _connect_network(self) -> None:
        assert self.process
        deadline = time.monotonic() + BOOT_TIMEOUT_S
        while not self._has_own_network() and time.monotonic() < deadline:
            time.sleep(0.02)
        _ip("link", "add", self._card(), "type", "veth", "peer", "name", "eth0", "netns", str(self.process.pid))
        _ip("link", "set", self._card(), "master", "br0", "up")
        if self.public_ip and self.has_internet:
            _ip("route", "replace", self.public_ip, "via", self.private_ip)

    def _has_own_network(self) -> bool:
        """Return whether `unshare` has entered its new network. After that, it forks the host's first process."""
        assert self.process
        return Path(f"/proc/{self.process.pid}/ns/net").readlink() != Path("/proc/self/ns/net").readlink()

    def _wait_for_sshd(self) -> None:
        deadline = time.monotonic() + BOOT_TIMEOUT_S
        while self.is_alive() and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                socket.create_connection((self.private_ip, 22), 1).close()
                return
            time.sleep(0.05)
        raise RuntimeError(f"{self.instance_id} did not boot: {self.log()[-500:]}")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
