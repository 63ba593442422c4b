"""Test that an emulated GPU machine is as late as one on AWS, and that its disk can be full."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from raymill import settings
from raymill.emulator import sandbox

pytestmark = pytest.mark.skipif(bool(sandbox.unsupported_reason()), reason=sandbox.unsupported_reason() or "supported")
IN_CLOUD = (
    "from raymill.emulator import packages, sandbox; packages.fill_cache = lambda: 'requirements/local.txt'; "
    "sandbox.run_in_fresh_cloud('tests_of_a_host')"
)
SCRIPT = """
import json, subprocess, time, urllib.request
import boto3
from raymill.emulator import moto_instances, scenario
from raymill.node import gpu_check

ec2 = boto3.client("ec2")
key = "/tmp/key.pem"
with open(key, "w") as file:
    file.write(ec2.create_key_pair(KeyName="own")["KeyMaterial"])
subprocess.run(["chmod", "600", key], check=True)
card = {"DeviceIndex": 0, "SubnetId": ec2.describe_subnets()["Subnets"][0]["SubnetId"], "DeleteOnTermination": True}
launch = {"ImageId": moto_instances.IMAGE, "InstanceType": "p4d.24xlarge", "KeyName": "own"}
(machine,) = ec2.run_instances(**launch, NetworkInterfaces=[card], MinCount=1, MaxCount=1)["Instances"]
ssh = ["ssh", "-i", key, "-o", "StrictHostKeyChecking=no", "-o", "LogLevel=ERROR", "-o", "ConnectTimeout=2"]
ssh.append("ubuntu@" + machine["PrivateIpAddress"])

def run(command):
    return subprocess.run([*ssh, command], capture_output=True, text=True)

def wait_for(command):
    deadline = time.monotonic() + 60
    while run(command).returncode:
        assert time.monotonic() < deadline, command
        time.sleep(0.2)

wait_for("true")
print("mounted at first:", run("mountpoint -q /opt/dlami/nvme").returncode == 0)
wait_for("mountpoint -q /opt/dlami/nvme")
probe = "python3 -c '" + gpu_check.COUNT_GPUS.replace("'", '"') + "'"
print("CUDA:", run(probe).stdout.strip(), "then", run(probe).stdout.strip())
body = json.dumps({"fill_disk": machine["InstanceId"]}).encode()
urllib.request.urlopen(urllib.request.Request(scenario.CONTROL_URL, data=body, method="PUT")).close()
for folder in ("~", "/tmp"):
    full = run(f"head -c 100000 /dev/zero > {folder}/file")
    print(folder, full.returncode, full.stderr.strip()[-23:])
print("memory:", run("echo 1 > /dev/shm/file").returncode)
print("free:", run("df --output=avail / | tail -n 1").stdout.strip())
"""


@pytest.mark.nightly
def test_a_gpu_machine_is_late_and_its_disk_can_be_full(tmp_path: Path) -> None:
    (tmp_path / "tests_of_a_host.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.append({str(tmp_path)!r}); {IN_CLOUD}"],
        cwd=settings.PROJECT,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{settings.PROJECT}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    shown = done.stdout
    assert "mounted at first: False" in shown
    assert "CUDA: 802 0 then 0 8" in shown
    assert "~ 1 No space left on device" in shown
    assert "/tmp 1 No space left on device" in shown
    assert "memory: 0\nfree: 0" in shown
