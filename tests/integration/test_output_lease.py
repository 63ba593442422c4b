"""Test that only one job at a time writes to an output folder, in a local folder and on S3."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import boto3
import packed_rows
import pytest
from botocore.exceptions import ClientError, ReadTimeoutError

from raymill import job as jobs
from raymill import job_scripts, output_lease, settings
from raymill.demo import assets as demo_assets
from raymill.errors import UserError
from raymill.output_lease import Holder, Lease, NoLease, S3Store
from raymill.ray_support import capacity, job_lease, ray_logging
from raymill.training.runtimes import torchrun

LONG_S = 1e6
ENDED: set[str] = set()


@pytest.fixture(params=["folder", "bucket"])
def place(request: pytest.FixtureRequest, s3: str, tmp_path: Path) -> str:
    """Return a folder that does not exist, or the URI of an empty prefix."""
    return str(tmp_path / "results") if request.param == "folder" else f"{s3}/{tmp_path.name}/results"


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return a set, to which tests add the jobs that have ended. Only jobs of the same cluster know it."""
    monkeypatch.setattr(output_lease, "RETRY_INTERVAL_S", 0.02)
    ENDED.clear()
    return ENDED


def has_ended(holder: Holder) -> bool:
    return holder.job in ENDED


def job(name: str, cluster: str = "this") -> Holder:
    return Holder(cluster=cluster, job=name, name=name, is_submitted=True, token=os.urandom(8).hex())


def acquire(place: str, holder: Holder) -> Lease | NoLease:
    store, path = output_lease._find(place, "--output")
    return output_lease._acquire(store, path, holder, has_ended, "--output")


def leave(place: str, holder: Holder) -> Callable[[], None]:
    """Create the lease of a job that does not renew it any more. Return what the job would call before a write."""
    store, path = output_lease._find(place, "--output")
    version = store.create(path, holder)
    assert version
    lease = object.__new__(Lease)
    lease.__dict__ |= {"_store": store, "_path": path, "_holder": holder, "_version": version}
    lease.__dict__ |= {"_renewed": time.monotonic(), "_lock": threading.Lock()}
    return lease.confirm


def files(place: str) -> list[str]:
    if "://" not in place:
        return [file.name for file in Path(place).rglob("*") if file.is_file()]
    bucket, _, folder = place.removeprefix("s3://").partition("/")
    return [
        entry["Key"] for entry in boto3.client("s3").list_objects_v2(Bucket=bucket, Prefix=folder).get("Contents", ())
    ]


def test_one_of_many_jobs_gets_the_folder(place: str, ended: set[str]) -> None:
    def try_to(number: int) -> Lease | NoLease | str:
        try:
            return acquire(place, job(f"job-{number}"))
        except UserError as error:
            return str(error)

    with ThreadPoolExecutor(8) as threads:
        outcomes = list(threads.map(try_to, range(8)))
    (winner,) = [each for each in outcomes if isinstance(each, Lease)]
    refused = [each for each in outcomes if isinstance(each, str)]
    name = winner._holder.name
    assert len(refused) == 7
    assert set(refused) == {f"{name} is writing to {place}; stop it: inv stop {name}, or pass another --output."}
    winner.confirm()
    winner.release()
    assert files(place) == []
    acquire(place, job("next")).release()


@pytest.mark.parametrize(
    ("one", "two", "collide"),
    [
        ("a", "a", True),
        ("a", "a/b/c", True),
        ("a/b/c", "a", True),
        ("a", "a/", True),
        ("a/b", "a//b", True),
        ("a", "ab", False),
        ("a/b", "a/c", False),
    ],
)
def test_folders_above_and_below_collide(place: str, ended: set[str], one: str, two: str, collide: bool) -> None:
    held = acquire(f"{place}/{one}", job("first"))
    if collide:
        with pytest.raises(UserError, match="first is writing to"):
            acquire(f"{place}/{two}", job("second"))
    else:
        acquire(f"{place}/{two}", job("second")).release()
    held.confirm()
    held.release()
    assert files(place) == []


@pytest.mark.parametrize("way", ["link", "dots", "uri"])
def test_two_names_of_a_folder_collide(tmp_path: Path, ended: set[str], way: str) -> None:
    (tmp_path / "real folder").mkdir()
    (tmp_path / "link").symlink_to("real folder")
    other = {"link": f"{tmp_path}/link", "dots": f"{tmp_path}/x/../link", "uri": f"file://{tmp_path}/real%20folder"}
    held = acquire(str(tmp_path / "real folder" / "new"), job("first"))
    with pytest.raises(UserError, match="first is writing to"):
        acquire(f"{other[way]}/new", job("second"))
    held.release()


def test_a_link_into_the_folder_of_another_job_collides(tmp_path: Path, ended: set[str]) -> None:
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    (tmp_path / "link").symlink_to("runs/demo")
    held = acquire(str(tmp_path / "runs"), job("first"))
    with pytest.raises(UserError, match=f"first is writing to {tmp_path}/runs"):
        acquire(f"{tmp_path}/link/new", job("second"))
    held.release()


def test_the_lease_of_a_job_that_ended_is_free_at_once(
    place: str, ended: set[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output_lease, "EXPIRY_S", LONG_S)
    for folder in (place, f"{place}/below", place.rpartition("/")[0]):
        confirm_of_ended = leave(folder, job("killed"))
        with pytest.raises(UserError, match="killed is writing to"):
            acquire(place, job("early"))
        ended.add("killed")
        held = acquire(place, job("second"))
        with pytest.raises(UserError, match="so this job stopped"):
            confirm_of_ended()
        held.confirm()
        held.release()
        ended.clear()
    assert capsys.readouterr().out == ""


def test_a_job_of_another_cluster_keeps_its_lease_while_it_renews_it(
    place: str, ended: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_lease, "EXPIRY_S", LONG_S)
    monkeypatch.setattr(output_lease, "RENEW_INTERVAL_S", 0.1)
    held = acquire(place, job("alive", "other"))
    for folder in (place, f"{place}/below", place.rpartition("/")[0]):
        with pytest.raises(UserError, match=r"alive, on another cluster, is writing to .*results; wait until it ends"):
            acquire(folder, job("second"))
    held.confirm()
    held.release()
    acquire(place, job("second")).release()


def test_the_lease_of_a_cluster_that_is_gone_is_taken_over(
    place: str, ended: set[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output_lease, "EXPIRY_S", 0.5)
    for folder in (place, f"{place}/below", place.rpartition("/")[0]):
        confirm_of_gone = leave(folder, job("gone", "other"))
        held = acquire(place, job("second"))
        assert "was written by gone, on another cluster; if that is gone, this job starts in" in capsys.readouterr().out
        with pytest.raises(UserError, match=r"so this job stopped\. Run the same command again"):
            confirm_of_gone()
        held.confirm()
        held.release()


def test_one_of_many_jobs_takes_a_free_lease_over(place: str, ended: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_lease, "EXPIRY_S", 0.5)
    leave(place, job("gone", "other"))
    leases: list[Lease | NoLease] = []

    def try_to(number: int) -> None:
        with contextlib.suppress(UserError):
            leases.append(acquire(place, job(f"job-{number}")))

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(try_to, range(8)))
    (winner,) = leases
    winner.confirm()
    winner.release()


def test_a_damaged_lease_is_taken_over_after_a_while(
    place: str, ended: set[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output_lease, "EXPIRY_S", 0.5)
    leave(place, job("gone"))
    if "://" in place:
        boto3.client("s3").put_object(Bucket="bucket", Key=f"{place.removeprefix('s3://bucket/')}/.lease", Body=b"\0")
    else:
        Path(place, ".lease").write_bytes(b"")
    acquire(place, job("second")).release()
    assert "was written by an unknown job" in capsys.readouterr().out


def test_a_trial_needs_no_lease_below_that_of_its_search(place: str, ended: set[str]) -> None:
    search = acquire(place, job("tune"))
    trial = acquire(f"{place}/trial-01", job("tune"))
    trial.confirm()
    trial.release()
    search.confirm()
    search.release()


def test_a_store_that_fails_for_a_while_stops_nothing(s3: str, tmp_path: Path, ended: set[str]) -> None:
    """S3 answers a conditional write with 409 if it works on another one. An answer may be lost after a write."""
    place, holder = f"{s3}/{tmp_path.name}", job("first")
    store, path = output_lease._find(place, "--output")
    assert isinstance(store, S3Store)
    put, failures = store._client.put_object, iter([conflict(), None, lost(), None, conflict(), lost(), None])

    def put_object(**arguments: Any) -> Any:
        failure = next(failures, None)
        answer = None if isinstance(failure, ClientError) else put(**arguments)
        if failure:
            raise failure
        return answer

    store._client.put_object = put_object
    held = output_lease._acquire(store, path, holder, has_ended, "--output")  # 409, then success
    for _ in range(5):
        held.confirm()
    assert next(failures, "none") == "none"
    held.release()
    assert files(place) == []


def conflict() -> ClientError:
    error = {"Code": "ConditionalRequestConflict", "Message": "Conflict"}
    return ClientError({"Error": error, "ResponseMetadata": {"HTTPStatusCode": 409}}, "PutObject")  # type: ignore[arg-type]


def lost() -> ReadTimeoutError:
    return ReadTimeoutError(endpoint_url="s3")


def test_a_job_that_cannot_renew_stops_before_the_lease_expires(
    place: str, ended: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped: list[str] = []
    ends = threading.Event()
    monkeypatch.setattr(output_lease, "_end_this_job", lambda reason: (stopped.append(reason), ends.set()))
    monkeypatch.setattr(output_lease, "RENEW_INTERVAL_S", 0.05)
    held = acquire(place, job("first"))
    assert isinstance(held, Lease)

    def fail(*_: Any) -> None:
        raise OSError("the disk is gone")

    for name in ("replace", "read"):
        monkeypatch.setattr(held._store, name, fail)
    time.sleep(0.3)
    held.confirm()  # a short failure stops nothing
    assert not stopped
    monkeypatch.setattr(output_lease, "GIVE_UP_S", 0.3)
    assert ends.wait(60)
    with pytest.raises(UserError, match=r"could not renew its lease on .* \(the disk is gone\), so it stopped before"):
        held.confirm()
    held.release()


def test_the_limits_leave_no_time_with_two_writers() -> None:
    longest_call = 2 * output_lease.CALL_TIMEOUT_S
    assert output_lease.GIVE_UP_S + longest_call < output_lease.EXPIRY_S
    assert output_lease.RENEW_INTERVAL_S + longest_call < output_lease.GIVE_UP_S


WRITER = """
import sys, time
from raymill import output_lease
from raymill.output_lease import Holder
output_lease.RENEW_INTERVAL_S = float(sys.argv[2])
me = Holder(cluster="other", job="1", name="first", token="t")
with output_lease.hold(sys.argv[1], "--output", me, lambda holder: False) as lease:
    try:
        while True:
            if sys.argv[3] == "confirms":
                lease.confirm()
            with open(sys.argv[4], "a") as file:
                file.write("first")
            time.sleep(0.01)
    finally:
        if sys.argv[3] != "confirms":
            with open(sys.argv[4], "a") as file:
                file.write("finally")
"""


@pytest.mark.parametrize("way", ["confirms", "is renewed by its thread"])
def test_a_suspended_job_writes_nothing_after_its_lease_was_taken_over(
    place: str, ended: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(output_lease, "EXPIRY_S", 0.5)
    written = tmp_path / "written"
    interval = LONG_S if way == "confirms" else 0.05
    command = [sys.executable, "-c", WRITER, place, f"{interval}", way, str(written)]
    with subprocess.Popen(command, cwd=settings.PROJECT, stderr=subprocess.PIPE, text=True) as first:
        try:
            deadline = time.monotonic() + 120
            while not (written.exists() and written.stat().st_size > 20):
                assert first.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.01)
            first.send_signal(signal.SIGSTOP)
            held = acquire(place, job("second"))
            size = written.stat().st_size
            first.send_signal(signal.SIGCONT)
            _, stderr = first.communicate(timeout=120)
        finally:
            first.kill()
    assert first.returncode == 1
    assert "second has taken over this job's lease on" in stderr
    if way == "confirms":
        assert written.stat().st_size == size
    else:
        assert "finally" not in written.read_text(), "code that writes at the end must not run"
    held.confirm()
    held.release()


def test_a_folder_that_cannot_be_written_gets_one_sentence(s3: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for location in (str(tmp_path / "file"), "s3://no-such-bucket/results"):
        with (
            pytest.raises(UserError, match=rf"{location} cannot be written \(.*; pass another --index\."),
            output_lease.hold(location, "--index", job("first"), has_ended),
        ):
            raise AssertionError
    with pytest.raises(UserError, match="gs://a/b is neither a folder nor an s3:// URI; pass another --index"):
        output_lease._find("gs://a/b", "--index")


def test_a_process_that_torchrun_starts_again_keeps_the_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_lease, "EXPIRY_S", LONG_S)
    monkeypatch.setattr(output_lease, "RENEW_INTERVAL_S", LONG_S)  # a thread that loses its lease ends the process
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run-1")
    with torchrun._lease(str(tmp_path)) as killed, torchrun._lease(str(tmp_path)) as restarted:
        restarted.confirm()
        with pytest.raises(UserError, match="has taken over this job's lease"):
            killed.confirm()


# ------------------------------------------------------------------------------------------ jobs of a cluster


DRIVER = """
import sys, time
from raymill.job import connect
from raymill.ray_support import job_lease
connect()
with job_lease.hold(sys.argv[1], "--output"):
    print("holds", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def driver(ray_session: None, place: str) -> Iterator[subprocess.Popen]:
    """Start another job of the cluster, which holds the lease on `place`."""
    import ray

    environment = os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    command = [sys.executable, "-c", DRIVER, place]
    with subprocess.Popen(command, env=environment, cwd=settings.PROJECT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert any(line == "holds\n" for line in process.stdout)
        yield process
        process.kill()


def test_a_killed_job_of_the_same_cluster_frees_its_folder_at_once(
    driver: subprocess.Popen, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_lease, "EXPIRY_S", LONG_S)
    with (
        pytest.raises(UserError, match=rf"process {driver.pid} on .* is writing to {place}; wait until it ends, or"),
        job_lease.hold(place, "--output"),
    ):
        raise AssertionError
    driver.kill()
    driver.wait(120)
    deadline = time.monotonic() + 60
    while True:  # Ray may take a moment to notice
        try:
            with job_lease.hold(place, "--output") as lease:
                lease.confirm()
            break
        except UserError:
            assert time.monotonic() < deadline
            time.sleep(0.1)


JOBS = (
    "embed",
    "finetune_ddp",
    "finetune_deepspeed",
    "finetune_fsdp",
    "generate",
    "preprocess",
    "quantize",
    "train_classifier",
    "train_hf",
    "tune",
)
"""The jobs that write a folder."""

OTHERS = {"check_network", "evaluate", "evaluate_rag", "models", "serve_llm", "serve_rag"}
"""The jobs that write nothing, or one file at the end."""


def test_each_job_is_in_a_list() -> None:
    assert set(job_scripts.names()) == {*JOBS, *OTHERS}


@pytest.fixture
def start(assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Return a function that starts a job. It writes to `tmp_path/output`, and expects that the lease is refused."""
    monkeypatch.setattr(jobs, "connect", lambda **_: None)
    monkeypatch.setattr(ray_logging, "driver", lambda: None)
    monkeypatch.setattr(capacity, "nodes", lambda: [capacity.NodeGroup({"CPU": 64.0}, 1)])
    packed, embedder, output = tmp_path / "packed", tmp_path / "embedder", tmp_path / "output"
    packed.mkdir()
    packed_rows.write(packed, packed_rows.tokenize(assets, assets / "model", 128), assets / "model", 128, [8], 4)
    demo_assets.write_embedder(embedder)

    def start(name: str) -> str:
        given = {
            "input": str(assets / "data"),
            "data": str(packed),
            "model": str(embedder if name == "embed" else assets / "model"),
            "questions": "",
            "name": "run",
            "output": str(output),
            "index": str(output),
        }
        script = jobs.load(name)
        monkeypatch.setattr(script, "connect", lambda **_: None, raising=False)
        options = script.JOB.load()
        fields = type(options).model_fields
        options = options.model_copy(update={key: value for key, value in given.items() if key in fields})
        with pytest.raises(UserError) as error:
            script.main(options)
        return str(error.value)

    return start


def folder_of(name: str, output: Path) -> str:
    """Return the folder that a job leases."""
    return f"{output}/run" if "name" in jobs.load(name).JOB.options_type.model_fields else str(output)


@pytest.mark.parametrize("name", JOBS)
def test_a_job_holds_the_lease_before_it_writes(
    name: str, start: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(location: str, option: str) -> None:
        raise UserError(f"another job is writing to {location}; pass another {option}")

    monkeypatch.setattr(job_lease, "hold", refuse)
    folder = folder_of(name, tmp_path / "output")
    option = "--name" if folder.endswith("/run") else r"--\w+"
    assert re.fullmatch(rf"another job is writing to {folder}; pass another {option}", start(name))
    assert not (tmp_path / "output").exists()


@pytest.mark.parametrize("name", JOBS)
def test_a_second_run_of_a_job_is_refused_while_the_first_one_writes(
    name: str, ended: set[str], start: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C stops following a job, and the same command then starts a second one."""
    output, second = tmp_path / "output", job(f"{name}-2")
    monkeypatch.setattr(job_lease, "hold", lambda folder, option: output_lease.hold(folder, option, second, has_ended))
    first = acquire(folder_of(name, output), job(f"{name}-1"))
    before = sorted(files(str(output)))
    assert f"{name}-1 is writing to {folder_of(name, output)}; stop it: inv stop {name}-1, or pass" in start(name)
    assert sorted(files(str(output))) == before
    first.confirm()
    first.release()
