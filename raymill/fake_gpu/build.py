"""Builds the fake GPU against the packages of an environment: python -m raymill.fake_gpu.build SITE_PACKAGES FOLDER.

Needs gcc and readelf. Uses CUDA's headers from the environment.
"""

import hashlib
import re
import subprocess
import sys
from pathlib import Path

from raymill.errors import UserError
from raymill.instance_types import Gpu

SOURCE = Path(__file__).parent
RUNTIME, DRIVERS = "libfakegpu.so", ("libcuda.so.1", "libnvidia-ml.so.1")
LIBRARIES = (
    "torch/lib/*.so",
    "torch/lib/*.so.*",
    "bitsandbytes/*cuda13*.so",
    "deepspeed/**/*.so",
    "vllm/**/*.so",
)
NAMING = ("triton/backends/nvidia/driver.c", "vllm/third_party/pynvml.py", "torch/lib/libc10_cuda.so")
"""Files that look up functions of the driver and of NVML by name at run time, so they contain these names."""


def for_environment(environment: Path) -> Path:
    """Return the folder with the fake GPU for the packages of an environment. The first call builds it."""
    sources = b"".join(file.read_bytes() for file in (Path(__file__), *sorted(SOURCE.glob("*.[ch]"))))
    folder = environment / f"fake_gpu-{hashlib.sha256(sources).hexdigest()[:12]}"
    if not (folder / DRIVERS[-1]).exists():
        (site_packages,) = environment.glob("lib/python*/site-packages")
        build(site_packages, folder)
    return folder


def build(site_packages: Path, folder: Path) -> None:
    """Write the fake GPU's libraries to `folder`.

    Raises:
        UserError: gcc or readelf is missing, or the compilation failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    called = _called_functions(site_packages)
    runtime = {name for name in called if re.fullmatch(r"(__)?cuda[A-Z]\w*|cublas\w+", name)}
    driver = {name for name in called if re.fullmatch(r"cu[A-Z](?!BLAS|FFT)\w*|nvml\w+", name)}
    for name in NAMING:
        text = (site_packages / name).read_text(encoding="latin-1")
        driver |= set(re.findall(r"\b(cu[A-Z]\w+|nvml[A-Z]\w+)", text, re.ASCII))
    include = f"-I{site_packages}/nvidia/cu13/include"
    sources = (SOURCE / "runtime.c", SOURCE / "main_memory.c", _placeholders("runtime.c", runtime, folder))
    _compile(folder / RUNTIME, sources, include)
    for name in DRIVERS:
        sources = (SOURCE / "driver.c", _placeholders("driver.c", driver, folder))
        _compile(folder / name, sources, f"-Wl,-soname,{name}")


def variables(folder: Path, gpu: Gpu, *, mib: int) -> dict[str, str]:
    """Return the environment variables with which a process sees this GPU with `mib` MiB."""
    return {
        "LD_PRELOAD": str(folder / RUNTIME),
        "LD_LIBRARY_PATH": str(folder),
        "TRITON_LIBCUDA_PATH": str(folder),
        "FAKE_GPU_MIB": str(mib),
        "FAKE_GPU_CAPABILITY": str(gpu.capability),
        "FAKE_GPU_NAME": gpu.device,
    }


def _called_functions(site_packages: Path) -> set[str]:
    """Return the names of the functions that the libraries import from other libraries."""
    names = set()
    for library in sorted({file for pattern in LIBRARIES for file in site_packages.glob(pattern)}):
        for line in _run("readelf", "--wide", "--dyn-syms", str(library)).splitlines():
            columns = line.split()
            if len(columns) >= 8 and columns[6] == "UND":
                names.add(columns[7].partition("@")[0])
    return names


def _placeholders(source: str, called: set[str], folder: Path) -> Path:
    """Write a C file with the functions that `source` lacks. They do nothing and report success."""
    defined = set(re.findall(r"\b(\w+)\([^;{]*\)\s*\{", (SOURCE / source).read_text()))
    file = folder / f"placeholders_{source}"
    file.write_text("".join(f"int {name}() {{ return 0; }}\n" for name in sorted(called - defined)))
    return file


def _compile(library: Path, sources: tuple[Path, ...], option: str) -> None:
    flags = ("-shared", "-fPIC", "-O1", "-w", "-std=gnu11", "-fno-builtin", "-pthread", option)
    _run("gcc", *flags, *map(str, sources), "-o", str(library), "-ldl")


def _run(*command: str) -> str:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except FileNotFoundError:
        package = "gcc" if command[0] == "gcc" else "binutils"
        raise UserError(f"{command[0]} is missing. Run: sudo apt-get install {package}") from None
    except subprocess.CalledProcessError as error:
        raise UserError(f"{command[0]} could not build the fake GPU: {error.stderr.strip()}") from None


if __name__ == "__main__":
    build(Path(sys.argv[1]), Path(sys.argv[2]))
