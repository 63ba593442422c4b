"""Test the accounting of requests: the access log, and `inv usage` from its files here and in the bucket."""

import datetime
import io
import json
import os
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace

import boto3
import pytest
from processes import verb_command
from rich.console import Console

from raymill import settings, usage
from raymill.aws.target import Aws
from raymill.common import bucket, cluster_file
from raymill.errors import UserError
from raymill.local import state
from raymill.local.target import Local
from raymill.node import log_shipping
from raymill.serving import accounting
from raymill.serving.accounting import AccessLog, RequestRecord

NOW = datetime.datetime.now(datetime.UTC)


def record(key: str = "alice", model: str = "tiny", status: int = 200, tokens: int = 5) -> RequestRecord:
    """Return the record of a request that has ended."""
    made = RequestRecord("POST /v1/completions")
    made.key, made.model, made.status = key, model, status
    answered = SimpleNamespace(num_output_tokens=lambda: tokens)
    made.sequences = [SimpleNamespace(prompt_len=3, num_cached_tokens=2, request_index=0, detokenizer=answered)]
    return made


def shown(logs: Iterable[str], since: datetime.datetime = NOW - datetime.timedelta(days=1)) -> str:
    console = Console(file=io.StringIO(), width=160)
    usage.show(logs, since, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


# ---------------------------------------------------------------- the access log


def test_a_line_has_what_is_billed_and_nothing_else(tmp_path: Path) -> None:
    log = AccessLog(tmp_path / "new")
    log.write(record())
    (file,) = (tmp_path / "new").iterdir()
    line = json.loads(file.read_text())
    assert datetime.datetime.fromisoformat(line.pop("time")) >= NOW - datetime.timedelta(milliseconds=1)
    assert line.pop("total_s") >= 0
    assert line == {
        **{"key": "alice", "model": "tiny", "route": "POST /v1/completions", "status": 200},
        **{"prompt_tokens": 3, "cached_tokens": 2, "completion_tokens": 5, "first_s": None},
    }


def test_files_have_a_maximum_size_and_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = iter(f"{number:03}" for number in range(100))
    monkeypatch.setattr(accounting.time, "strftime", lambda form: next(names))
    monkeypatch.setattr(accounting, "MAX_FILE_BYTES", 1000)
    monkeypatch.setattr(accounting, "MAX_FILES", 3)
    log = AccessLog(tmp_path)
    for _ in range(50):
        log.write(record(model="x" * 10_000))
    files = sorted(tmp_path.iterdir())
    assert len(files) == 3
    assert all(file.stat().st_size < 1500 for file in files)
    assert files[0].name > f"{accounting.PREFIX}008"


def test_a_log_that_cannot_be_written_stops_no_request(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    AccessLog(tmp_path / "file" / "folder").write(record())


# ---------------------------------------------------------------- the engine


@pytest.mark.parametrize("share", [True, False])
def test_each_key_has_its_own_salt_unless_keys_share_the_prefix_cache(share: bool) -> None:
    """test_serve.py tests the effect in the engine."""
    processor = SimpleNamespace(request_states={})
    processor.add_request = lambda request: processor.request_states.update({request.request_id: request})
    accounting.follow_sequences(SimpleNamespace(output_processor=processor), share_prefix_cache=share)
    salts, priorities = [], []
    for number, (key, own) in enumerate(
        [("alice", None), ("bob", None), ("alice", None), ("alice", "x"), ("bob", "x")]
    ):
        asking = RequestRecord("POST /v1/completions")
        asking.key = key
        accounting.current.set(asking)
        processor.add_request(request := SimpleNamespace(request_id=f"{number}", cache_salt=own, priority=-9))
        assert asking.sequences == [request]
        priorities.append(request.priority)
        salts.append(request.cache_salt)
    accounting.current.set(None)
    assert priorities == [0, 1, 0, 0, 1]  # the numbers of the keys, for the scheduler; clients cannot set them
    if share:
        assert salts == [None, None, None, "x", "x"]
    else:
        assert salts[0] == salts[2]
        assert len(set(salts)) == 4


# ---------------------------------------------------------------- inv usage


def test_usage_is_summed_by_key_and_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCESS_LOGS", str(tmp_path))
    log = AccessLog(Path("unused"))
    requests = record(), record(status=499), record("bob"), record(model="sql", tokens=2000), record(status=429)
    for one in requests:
        log.write(one)
    listing = record()
    listing.route = "GET /v1/models"
    old = record(tokens=77777)
    old.started_at -= 2 * 24 * 3600
    log.write(listing)
    log.write(old)
    (file,) = tmp_path.iterdir()
    text = file.read_text()
    rows = [line.split() for line in shown([text[:-10], text.splitlines()[0]]).splitlines()[2:]]
    assert [row[:-2] for row in rows] == [
        ["alice", "sql", "1", "0", "3", "2,000"],
        ["alice", "tiny", "4", "2", "12", "20"],
        ["bob", "tiny", "1", "0", "3", "5"],
    ]
    assert all(row[-2] == f"{NOW.astimezone():%Y-%m-%d}" for row in rows)


def test_no_request_gives_a_plain_sentence() -> None:
    assert shown([]).startswith("nothing was served since 20")


@pytest.mark.parametrize(
    ("days", "since", "sentence"),
    [
        (2, "2026-01-31", "--days and --since are both given"),
        (-1, "", "--days is -1. Use a positive number"),
        (0, "yesterday", "--since is 'yesterday'. Use a date, such as --since 2026-01-31"),
    ],
)
def test_a_period_that_cannot_be_read_gets_one_sentence(days: int, since: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        usage.start(days, since)
    assert usage.start(0, "2026-01-31").astimezone().day == 31


def test_the_local_target_reads_the_files_of_the_period(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "ACCESS_LOGS", tmp_path)
    for name, days in (("old", 9), ("new", 1)):
        file = tmp_path / f"{accounting.PREFIX}{name}.log"
        file.write_text(name)
        at = NOW.timestamp() - days * 24 * 3600
        os.utime(file, (at, at))
    assert list(Local().access_logs(usage.start(0, ""))) == ["new"]


@pytest.fixture
def session(tmp_path: Path, s3: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the folder of Serve's logs of a node whose logs are copied to the bucket."""
    own = boto3.resource("s3").Bucket(bucket.name(cluster_file.load()))
    if not bucket.exists(cluster_file.load()):  # another test may have made it
        own.create()
    folder = tmp_path / "session_2026-01-01_10-00-00_1_1"
    (folder / "logs" / "serve").mkdir(parents=True)
    monkeypatch.setattr(log_shipping, "SESSION", folder)
    monkeypatch.setattr(log_shipping.LogShipper, "_instance", "i-worker")
    monkeypatch.delenv("ACCESS_LOGS", raising=False)
    yield folder / "logs" / "serve"
    own.objects.filter(Prefix=bucket.LOGS).delete()


def test_on_aws_usage_outlives_the_nodes(session: Path) -> None:
    AccessLog(session).write(record())
    log_shipping.LogShipper("worker").ship()
    AccessLog(session).write(record("bob"))  # not copied yet
    command = verb_command("usage", "--target", "aws")
    done = subprocess.run(
        command, cwd=settings.PROJECT, env=os.environ | {"COLUMNS": "160"}, capture_output=True, text=True, check=True
    )
    assert [line.split()[:2] for line in done.stdout.splitlines()[2:]] == [["alice", "tiny"]]
    tomorrow = NOW + datetime.timedelta(days=1)
    assert shown(Aws().access_logs(tomorrow), tomorrow).startswith("nothing was served since")
    assert list(Aws().access_logs(tomorrow)) == [], "old logs are not even read"
