"""Runs llmcompressor on a node, in an environment of its own: it needs an older transformers than the project."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import ray

from raymill.errors import UserError
from raymill.quantization.options import QuantizeOptions
from raymill.ray_support import model_cache
from raymill.settings import inv
from raymill.training import storage

LLMCOMPRESSOR = "llmcompressor==0.14.0.1"
SCRIPT = Path(__file__).with_name("compress.py")
NODE_UV = Path("~/.local/bin/uv")  # where cluster.yaml installs it
CONFIG = "config.json"
UNFINISHED = ".unfinished"  # file in a folder that `quantize` is replacing


def check_output(output: str) -> None:
    """Refuse an output folder that `quantize` did not write, because it replaces the folder.

    Raises:
        UserError: the folder has other files.
    """
    names = storage.list_names(output)
    config = storage.read_text(f"{output}/{CONFIG}") or ""
    if names and UNFINISHED not in names and "quantization_config" not in config:
        raise UserError(f"{output} holds other files; pass another --output, or remove them.")


def quantize(options: QuantizeOptions, location: str, rows: np.ndarray) -> None:
    """Quantize the model at `location` on a node with the necessary GPUs, and write it to `options.output`.

    Raises:
        UserError: uv is missing, or llmcompressor fails.
    """
    remote = ray.remote(num_cpus=1, num_gpus=options.num_gpus, max_retries=0)(_on_this_node)
    if problem := ray.get(remote.remote(location, rows, options.scheme, options.output)):
        raise UserError(problem)


def _on_this_node(location: str, rows: np.ndarray, scheme: str, output: str) -> str:
    """Quantize a model on this node. Return what went wrong, or an empty string."""
    uv = os.environ.get("UV") or shutil.which("uv") or shutil.which(NODE_UV.expanduser())
    if not uv:
        return "uv is not installed on this node. Run: python3 -m pip install uv"
    torch = importlib.metadata.version("torch").partition("+")[0]
    tool = [uv, "tool", "run", "--python", sys.executable, "--from", LLMCOMPRESSOR, "--with", f"torch=={torch}"]
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    with tempfile.TemporaryDirectory() as scratch:
        np.save(file := f"{scratch}/rows.npy", rows)
        model = model_cache.on_this_node(location)
        command = [*tool, "python", str(SCRIPT), model, file, scheme, f"{scratch}/model"]
        done = subprocess.run(command, env=variables, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode:
            print(done.stderr, flush=True)
            reason = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "")
            return (
                f"llmcompressor could not quantize {location} ({reason.strip()}). Its output: {inv('logs --verbose')}"
            )
        replace(Path(scratch, "model"), output)
    return ""


def replace(model: Path, output: str) -> None:
    """Replace the model in `output`, a path or URI. Nothing loads a folder without config.json, so it comes last."""
    storage.write_text(f"{output}/{UNFINISHED}", "")
    storage.delete_file(f"{output}/{CONFIG}")
    for name in storage.list_names(output):
        if name != UNFINISHED:
            storage.delete_file(f"{output}/{name}")
    for file in sorted(model.iterdir(), key=lambda file: file.name == CONFIG):
        model_cache.copy_file(file, f"{output}/{file.name}")
    storage.delete_file(f"{output}/{UNFINISHED}")
