"""Test that nodes unpack the packages that the head has packed, and do not use missing, partial or damaged ones."""

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from sleeping import in_this_thread

from raymill import settings
from raymill.aws.target import Aws
from raymill.common import bucket, cluster_file
from raymill.errors import UserError
from raymill.local.target import Local
from raymill.node import bake, metadata, unpack

pytestmark = pytest.mark.skipif(not shutil.which("zstd"), reason="zstd is not installed")
CREDENTIALS = {"AccessKeyId": "AKIAEXAMPLE", "SecretAccessKey": "secret", "Token": "token"}


class Machine:
    """A machine, and the bucket. `replace` makes it a new one, whose home folder has the same path."""

    def __init__(self, home: Path, objects: Any) -> None:
        self.home, self.objects = home, objects
        self.home.mkdir()

    def install(self) -> None:
        """Write an environment that resembles those that uv makes."""
        files = {
            "env/bin/python3.11": "#!/bin/sh\n",
            "env/lib/python3.11/site-packages/ray/__init__.py": "",
            "env/lib/python3.11/site-packages/torch/lib/libtorch.so": "x" * 2_000_000,
            "env/lib/python3.11/site-packages/a package/ü \n.py": "odd",
            "env/lib/python3.11/site-packages/ray/__pycache__/__init__.cpython-311.pyc": "compiled",
            ".local/share/uv/python/cpython-3.11/lib/os.py": "import sys",
            ".local/bin/uv": "uv itself, which `quantize` runs",
            "unrelated/notes.txt": "not packed",
        }
        for number in range(400):  # so that all parts have files in the same folders
            files[f"env/lib/python3.11/site-packages/package{number % 50}/deep/{number}.py"] = str(number)
        for name, text in files.items():
            path = self.home / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        (self.home / "env/bin/python3.11").chmod(0o755)
        (self.home / "env/bin/python").symlink_to(self.home / "env/bin/python3.11")
        (self.home / "env/lib64").symlink_to("lib")

    def replace(self) -> None:
        shutil.rmtree(self.home)
        self.home.mkdir()

    def packages(self) -> dict[str, Any]:
        """Return the content and mode of each file that belongs to the environment, and the target of each link."""
        return {
            str(path.relative_to(self.home)): path.readlink()
            if path.is_symlink()
            else (path.read_bytes(), path.stat().st_mode)
            for path in bake.find_files(self.home)
        }

    def keys(self) -> list[str]:
        return sorted(one.key for one in self.objects.filter(Prefix=unpack.FOLDER))

    def unpack(self) -> str:
        """Unpack as the setup commands do, and return why it failed, or "" if it did not."""
        try:
            unpack.main(cluster_file.load().slug, "3.11")
        except SystemExit as failed:
            assert not unpack.ENVIRONMENT.exists()
            assert not list(unpack.ON_NVME.iterdir())
            return str(failed)
        return ""


@pytest.fixture
def machine(tmp_path: Path, s3: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    file = cluster_file.load()
    name = bucket.name(file)
    own = boto3.resource("s3").Bucket(name)
    if not bucket.exists(file):  # another test may have made it
        own.create()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(unpack, "ENVIRONMENT", tmp_path / "home/env")
    monkeypatch.setattr(unpack, "ON_NVME", tmp_path / "nvme/packages/env")
    monkeypatch.setattr(unpack, "COMPLETE", tmp_path / "nvme/packages/complete")
    monkeypatch.setattr(unpack, "PINS", tmp_path / "pins.txt")
    unpack.PINS.write_text("a-package==1.0\n")
    identity = {"accountId": boto3.client("sts").get_caller_identity()["Account"], "region": file.region}
    monkeypatch.setattr(metadata, "identity", lambda: identity)
    monkeypatch.setattr(metadata, "read", lambda path: json.dumps(CREDENTIALS) if path.endswith("/role") else "role")
    yield Machine(tmp_path / "home", own.objects)
    own.objects.filter(Prefix=unpack.FOLDER).delete()


def test_a_new_node_unpacks_what_the_head_packed(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.install()
    packed = machine.packages()
    bake.main()
    assert "dollars per month. New nodes unpack them" in capsys.readouterr().out
    machine.replace()
    assert machine.unpack() == ""
    assert (machine.home / ".local/bin/uv").exists()
    assert machine.packages() == packed
    assert not any("__pycache__" in name or "unrelated" in name for name in packed)
    assert unpack.ENVIRONMENT.readlink() == unpack.ON_NVME
    assert "of packages from the bucket in" in capsys.readouterr().out


def test_the_packages_are_in_the_users_bucket(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = boto3.resource("s3").Bucket("our-packages")
    own.create()
    text = settings.FILE.read_text(encoding="utf-8").replace('bucket = ""', 'bucket = "our-packages"')
    monkeypatch.setattr(unpack, "SETTINGS", tmp_path / "settings.toml")
    unpack.SETTINGS.write_text(text, encoding="utf-8")
    monkeypatch.setattr(settings.load, "__kwdefaults__", {"profile": None, "file": unpack.SETTINGS})
    machine.install()
    packed = machine.packages()
    bake.main()
    assert machine.keys() == []
    machine.replace()
    assert machine.unpack() == ""
    assert machine.packages() == packed
    own.objects.delete()
    own.delete()


def test_a_node_can_be_set_up_again(machine: Machine) -> None:
    machine.install()
    bake.main()
    packed = machine.packages()
    for _ in range(2):  # first over the installed environment, then over the unpacked one
        (unpack.ENVIRONMENT / "left over").touch()
        unpack.COMPLETE.unlink(missing_ok=True)
        assert machine.unpack() == ""
        assert machine.packages() == packed


def test_a_complete_environment_is_not_unpacked_again(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.install()
    bake.main()
    assert machine.unpack() == ""
    machine.objects.filter(Prefix=unpack.FOLDER).delete()
    capsys.readouterr()
    assert machine.unpack() == ""
    assert capsys.readouterr().out == "the packages are already unpacked\n"
    unpack.PINS.write_text("ray==2.61.0\n")
    assert "the bucket has no packages for these pins" in machine.unpack()


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_without_stored_packages_nothing_is_left_in_the_way_of_the_installation(machine: Machine) -> None:
    machine.install()
    assert "the bucket has no packages for these pins" in machine.unpack()


def test_packages_for_other_pins_are_not_used_and_are_deleted_by_the_next_bake(machine: Machine) -> None:
    machine.install()
    bake.main()
    earlier = machine.keys()
    unpack.PINS.write_text("ray==2.61.0\n")
    assert "the bucket has no packages for these pins" in machine.unpack()
    machine.install()
    bake.main()
    assert len(machine.keys()) == len(earlier)
    assert not set(machine.keys()) & set(earlier)


def test_an_incomplete_archive_is_not_used(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.install()
    bake.main()
    monkeypatch.setattr(bake.Store, "put", interrupt)  # before it has stored the manifest
    with pytest.raises(KeyboardInterrupt):
        bake.main()
    assert "the bucket has no packages for these pins" in machine.unpack()


@pytest.mark.parametrize("damage", ["changed", "cut off", "missing"])
def test_a_damaged_archive_is_not_used(machine: Machine, damage: str) -> None:
    machine.install()
    bake.main()
    part = next(one.Object() for one in machine.objects.filter(Prefix=unpack.FOLDER) if one.key.endswith("0.tar.zst"))
    content = bytearray(part.get()["Body"].read())
    content[len(content) // 2] ^= 0xFF
    if damage == "missing":
        part.delete()
    else:
        part.put(Body=bytes(content if damage == "changed" else content[: len(content) // 2]))
    assert "the packages in the bucket cannot be used" in machine.unpack()


def test_an_interpreter_that_does_not_run_is_not_used(machine: Machine) -> None:
    machine.install()
    (machine.home / "env/bin/python3.11").write_text("#!/bin/sh\nexit 1\n")
    bake.main()
    machine.replace()
    assert "the packages in the bucket cannot be used" in machine.unpack()


def test_a_broken_connection_is_continued(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    content, starts = os.urandom(3_000_000), []

    class Answer(io.BytesIO):
        headers: dict[str, str]

    def answer(_: unpack.Bucket, __: str, first: int) -> Answer:
        starts.append(first)
        if len(starts) == 2:
            raise ConnectionResetError
        made = Answer(content[first : first + 2_000_000])
        made.headers = {"Content-Length": str(len(content) - first)}
        return made

    monkeypatch.setattr(unpack.Bucket, "_open", answer)
    monkeypatch.setattr(unpack.time, "sleep", in_this_thread(lambda _: None))
    assert b"".join(unpack.Bucket("project").read("key")) == content
    assert starts == [0, 2_000_000, 2_000_000]


def test_the_signature_is_the_one_of_boto3() -> None:
    url = "https://s3.us-east-1.amazonaws.com/my-llm-123456789012-us-east-1/environments/0123456789abcdef/0.tar.zst"
    signed = unpack.sign(url, "us-east-1", CREDENTIALS, "20260131T235959Z")
    headers = {name: value for name, value in signed.items() if name.startswith("x-amz")}
    request = AWSRequest("GET", url, headers=headers)
    auth = S3SigV4Auth(Credentials(*CREDENTIALS.values()), "s3", "us-east-1")
    request.context["timestamp"] = "20260131T235959Z"
    signature = auth.signature(auth.string_to_sign(request, auth.canonical_request(request)), request)
    assert signed["authorization"].endswith(f"Signature={signature}")


def test_unpacking_needs_no_packages() -> None:
    code = f"import sys; sys.path.insert(0, {str(settings.PROJECT)!r}); from raymill.node import unpack"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True)  # without site-packages


def test_parts_have_about_the_same_size(tmp_path: Path) -> None:
    for number in range(100):
        (tmp_path / str(number)).write_bytes(b"x" * number * 1000)
    files = sorted(tmp_path.iterdir())
    parts = bake.split(files, 16)
    sizes = [sum(path.stat().st_size for path in part) for part in parts]
    assert sorted(path for part in parts for path in part) == files
    assert max(sizes) < 1.1 * min(sizes)


def test_a_failure_on_the_head_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Aws, "shell", lambda _, command: subprocess.call(["false", command]))
    with pytest.raises(UserError, match="Run again: inv bake --target aws"):
        Aws().bake()


def test_local_has_no_nodes() -> None:
    with pytest.raises(UserError, match="Run: inv bake --target aws"):
        Local().bake()
