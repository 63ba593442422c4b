"""Compares how fast a model's weights arrive in main memory from a bucket, from an S3 as slow as AWS's."""

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import boto3
import torch
from safetensors.torch import save_file

from benchmarks import harness, slow_s3
from benchmarks.report import Result, at_least

MIB = 2**20
TENSORS, TENSOR_MIB, ROUNDS = 64, 8, 3
STREAMER = "runai-model-streamer[s3]==0.17.1"
MODEL = "s3://bucket/models/made"
READ = """
for name, tensor in tensors:
    total += tensor.numel() * tensor.element_size()
print(total, time.perf_counter() - started)
"""
LOADED = """
import safetensors.torch
tensors = safetensors.torch.load(open(folder + "/model.safetensors", "rb").read()).items()
"""
BEGIN = "started, total = time.perf_counter(), 0\n"
WAYS = {
    "this project": "import time, safetensors.torch\nfrom raymill.ray_support import model_cache\n"
    + BEGIN
    + f"folder = model_cache.on_this_node({MODEL!r})"
    + LOADED
    + READ,
    "Ray Serve LLM": "import time, os, safetensors.torch\n"
    "from ray.llm._internal.common.utils.cloud_utils import CloudFileSystem\n"
    + BEGIN
    + "folder = os.environ['HF_HOME']\n"
    + f"CloudFileSystem.download_files(folder, {MODEL!r})"
    + LOADED
    + READ,
    "Run:ai streamer": "import time\nfrom runai_model_streamer import SafetensorsStreamer\n"
    + BEGIN
    + f"streamer = SafetensorsStreamer().__enter__()\nstreamer.stream_file({MODEL + '/model.safetensors'!r})\n"
    + "tensors = streamer.get_tensors()"
    + READ,
}


def measure() -> Result:
    """Time each way to read one file of weights. Each round starts new processes without a copy on disk."""
    with harness.scratch() as folder, slow_s3.serving() as url:
        variables = {
            "AWS_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",
            "HF_HOME": str(folder / "copies"),
        }
        os.environ |= variables
        file = folder / "model.safetensors"
        save_file({f"layer.{number}": torch.rand(TENSOR_MIB * MIB // 4) for number in range(TENSORS)}, file)
        client = boto3.client("s3")
        client.create_bucket(Bucket="bucket")
        client.upload_file(str(file), "bucket", "models/made/model.safetensors")
        ways = {name: functools.partial(_speed, name, folder / "copies") for name in WAYS}
        ways["this project"]()  # the first copy is not measured, because it also reads the weights from moto
        rounds = harness.alternate(ways, ROUNDS, "MiB/s")
    ratio = harness.median_ratio(rounds, "this project", "Ray Serve LLM")
    return {
        "bars": [at_least(1, "median ratio of MiB/s to Ray Serve LLM", ratio)],
        "rounds": [{"round": number, **made} for number, made in enumerate(rounds, 1)],
    }


def _speed(name: str, copies: Path) -> float:
    """Return MiB/s, as the process measures it, without its imports."""
    if name == "Run:ai streamer":
        uv = os.environ.get("UV", "uv")
        tool = [uv, "tool", "run", "--quiet", "--python", sys.executable, "--from", STREAMER]
        command = [*tool, "--with", f"torch=={torch.__version__.partition('+')[0]}", "python"]
    else:
        command = [sys.executable]
    copies.mkdir(exist_ok=True)
    done = subprocess.run([*command, "-c", WAYS[name]], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    size, seconds = done.stdout.split()[-2:]
    assert int(size) == TENSORS * TENSOR_MIB * MIB
    shutil.rmtree(copies)
    return int(size) / MIB / float(seconds)


if __name__ == "__main__":
    harness.main(measure)
