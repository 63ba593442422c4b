"""The image that hosts boot from: this machine's root file system, with two small overlay layers on top.

One layer adds the user `ubuntu`, sshd's configuration, stand-ins for CUDA's driver and for programs such as `shutdown`,
the address of AWS's endpoint, and settings that make uv install packages from this machine's cache, because hosts
cannot reach the internet. The other layer makes that cache writable.
"""

import os
import subprocess
import sys
from pathlib import Path

from raymill import environment
from raymill.common import cluster_file

LIBCUDA = Path(__file__).with_name("libcuda.c")
UBUNTU = 1500  # user and group id
UV_SETTINGS = [
    *("UV_DEFAULT_INDEX", "UV_INDEX", "UV_INDEX_URL", "UV_EXTRA_INDEX_URL"),
    *("UV_FIND_LINKS", "UV_INDEX_STRATEGY", "UV_TORCH_BACKEND"),
]
SSHD_CONFIG = """\
HostKey /etc/ssh/ssh_host_ed25519_key
UsePAM no
PasswordAuthentication no
PermitRootLogin no
UseDNS no
PrintMotd no
MaxStartups 100
Subsystem sftp internal-sftp
"""
CURL = """\
#!/bin/bash
# Runs curl. Instead of downloading uv's installer, it prints one that copies this machine's uv.
case "$*" in
    *https://astral.sh/uv/*/install.sh*) echo 'mkdir -p ~/.local/bin && cp /opt/rehearsal/uv ~/.local/bin/uv' ;;
    *) exec /usr/bin/curl "$@" ;;
esac
"""
NVIDIA_SMI = """\
#!/bin/sh
# prints the driver's version and the memory errors of GPUs that this host does not have
for gpu in $(seq "$(cat /etc/gpus)"); do echo 580.95.05, 0; done
"""
SHUTDOWN = "#!/bin/sh\n# ends this host; the cloud then terminates the instance\nexec kill -USR1 1\n"


def build(layer: Path, endpoint: str) -> None:
    """Write the first layer to the empty folder `layer`, on a file system that overlayfs accepts as a lower layer."""
    variables = {
        cluster_file.REHEARSAL: "1",
        "AWS_ENDPOINT_URL": endpoint,
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # without DNS, torch logs a warning for each host
        # Ray's workers are nice to the other processes of their host. Here, all hosts share the CPUs of this machine.
        "RAY_worker_niceness": "0",
        **_package_variables(),
    }
    _write(layer / "etc/ssh/sshd_config", SSHD_CONFIG + _set_env(variables))
    _write(layer / "etc/rehearsal-environment", "".join(f"{name}='{value}'\n" for name, value in variables.items()))
    _write(layer / "etc/sudoers.d/ubuntu", "ubuntu ALL=(ALL) NOPASSWD:ALL\n", 0o440)
    _write(layer / "usr/local/bin/curl", CURL, 0o755)
    _write(layer / "usr/local/bin/nvidia-smi", NVIDIA_SMI, 0o755)
    _write(layer / "usr/local/sbin/shutdown", SHUTDOWN, 0o755)
    _compile(LIBCUDA, layer / "usr/lib/libcuda.so.1")
    _write(layer / "opt/rehearsal/uv", Path(environment.find_uv()).read_bytes(), 0o755)
    # a script, not a link: an environment made with a link would search for Python's library next to the link
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for command in (name, "python3"):
        _write(layer / "usr/local/bin" / command, f'#!/bin/sh\nexec {sys.base_prefix}/bin/{name} "$@"\n', 0o755)
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", layer / "etc/ssh/ssh_host_ed25519_key"], check=True
    )
    _add_user(layer)
    _open_parents(layer, Path(sys.base_prefix))


def lower_layers(layer: Path, scratch: Path) -> str:
    """Return the overlay's `lowerdir`: `layer`, a layer that makes uv's cache writable, and this machine's root."""
    cache = uv_cache()
    overlay = scratch / "cache"
    for name in ("upper", "work", "root"):
        (overlay / name).mkdir(parents=True)
    options = f"lowerdir=/,upperdir={overlay / 'upper'},workdir={overlay / 'work'}"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, overlay / "root"], check=True)
    # uv keeps lock files in its cache, so a host's user must be able to write to these files and to all folders, but
    # not to the packages' own folders, of which there are thousands
    packages = ["-path", "*/archive-v*/*/*", "-prune", "-o"]
    writable = ["(", "-type", "d", "-o", "-name", ".*", "-o", "-name", "*.lock", ")"]
    change = ["-exec", "chmod", "a+rwX", "{}", "+"]
    subprocess.run(["find", f"{overlay / 'root'}{cache}", *packages, *writable, *change], check=True)
    _open_parents(overlay / "root", cache)
    subprocess.run(["umount", overlay / "root"], check=True)
    return f"{layer}:{overlay / 'upper'}:/"


def shared_paths() -> list[str]:
    """Return the folders that hosts need but that an overlay of `/` lacks, because they are on other file systems."""
    paths = [Path(sys.base_prefix), uv_cache(), *map(Path, _local_package_folders())]
    return [str(path) for path in paths if path.exists() and path.stat().st_dev != Path("/").stat().st_dev]


def _package_variables() -> dict[str, str]:
    """Return variables that make uv on a host use this machine's cache, with the settings that filled it."""
    _, sources = environment.package_sources(environment.pip_settings())
    user_settings = {name: os.environ[name] for name in UV_SETTINGS if name in os.environ}
    return {
        **user_settings,
        **sources,
        "UV_OFFLINE": "1",
        "UV_CACHE_DIR": str(uv_cache()),
        "UV_LINK_MODE": "symlink",
        "UV_PYTHON_DOWNLOADS": "never",
    }


def _local_package_folders() -> list[str]:
    values = " ".join(_package_variables().values()).replace(",", " ").split()
    return [value.removeprefix("file://") for value in values if value.startswith(("file://", "/"))]


def uv_cache() -> Path:
    """Return uv's cache on this machine, from which hosts install packages."""
    listing = subprocess.run([environment.find_uv(), "cache", "dir"], check=True, capture_output=True, text=True)
    return Path(listing.stdout.strip())


def _set_env(variables: dict[str, str]) -> str:
    return "SetEnv " + " ".join(f'"{name}={value}"' for name, value in variables.items()) + "\n"


def _write(file: Path, content: str | bytes, mode: int = 0o644) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    file.chmod(mode)


def _compile(source: Path, library: Path) -> None:
    library.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["gcc", "-shared", "-fPIC", source, "-o", library], check=True)


def _add_user(layer: Path) -> None:
    lines = {
        "passwd": f"ubuntu:x:{UBUNTU}:{UBUNTU}::/home/ubuntu:/bin/bash\n",
        "group": f"ubuntu:x:{UBUNTU}:\n",
        "shadow": "ubuntu:*:19000:0:99999:7:::\n",
    }
    for name, line in lines.items():
        others = [old for old in Path("/etc", name).read_text().splitlines() if not old.startswith("ubuntu:")]
        _write(layer / "etc" / name, "\n".join(others) + "\n" + line, 0o640 if name == "shadow" else 0o644)
    (layer / "home/ubuntu/.ssh").mkdir(parents=True, mode=0o700)
    _write(layer / "home/ubuntu/.bashrc", "# setup_commands append here\n")
    for path in (layer / "home/ubuntu", *(layer / "home/ubuntu").rglob("*")):
        os.chown(path, UBUNTU, UBUNTU)


def _open_parents(root: Path, path: Path) -> None:
    """Let every user enter the parent folders of `path`, for example /root if the Python interpreter is there."""
    for parent in reversed(path.parents[:-1]):
        folder = root / parent.relative_to("/")
        folder.mkdir(exist_ok=True)
        folder.chmod(parent.stat().st_mode | 0o055)
