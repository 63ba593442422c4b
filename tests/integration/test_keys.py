"""Test `inv keys`: what it stores in .env and on AWS, and which keys a server then accepts."""

import contextlib
import datetime
import hashlib
import io
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import boto3
import pytest
from rich.console import Console

from raymill import env_file, keys, settings
from raymill.aws import secrets_manager
from raymill.aws.target import Aws
from raymill.common import cluster_file
from raymill.env_file import EnvFile, locked
from raymill.errors import UserError
from raymill.serving import keys as server_keys
from raymill.serving.keys import ApiKeys
from raymill.target import KeyStore

ENV = "# my secrets\nSERVE_API_KEY=the-owner\nexport SERVE_API_KEYS='bob:for-bob'\nHF_TOKEN=hf_x # token\n"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the project's .env, which the server reads too."""
    file = tmp_path / ".env"
    file.write_text(ENV)
    file.chmod(0o600)
    monkeypatch.setattr(settings, "PROJECT", tmp_path)
    monkeypatch.setenv("SECRETS_FILE", str(file))
    monkeypatch.delenv("SECRETS_PREFIX", raising=False)
    return file


def add(name: str, days: int = 0, models: str = "") -> str:
    return keys.add([EnvFile()], name, days, models)


def name_of(key: str) -> str | None:
    return ApiKeys().name_of(f"Bearer {key}".encode())


def shown(store: KeyStore) -> list[list[str]]:
    console = Console(file=io.StringIO(), width=160)
    keys.show(store, console)
    return [line.split() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def test_a_key_is_valid_until_it_is_revoked_and_is_stored_as_a_digest(file: Path) -> None:
    key = add("alice")
    assert key not in file.read_text()
    assert hashlib.sha256(key.encode()).hexdigest() in file.read_text()
    assert [name_of(each) for each in (key, "for-bob", "the-owner", key[:-1])] == ["alice", "bob", "owner", None]
    keys.revoke([EnvFile()], "alice")
    assert [name_of(each) for each in (key, "for-bob")] == [None, "bob"]
    keys.revoke([EnvFile()], "bob")
    assert [name_of(each) for each in ("for-bob", "the-owner")] == [None, "owner"]


def test_the_rest_of_env_stays(file: Path) -> None:
    add("alice")
    keys.revoke([EnvFile()], "alice")
    assert file.read_text() == ENV.replace("export ", "")
    assert file.stat().st_mode & 0o777 == 0o600


def test_keys_that_are_added_and_revoked_at_the_same_time_are_all_kept(file: Path) -> None:
    names = [f"user-{number}" for number in range(32)]
    with ThreadPoolExecutor(8) as threads:
        revoked = threads.submit(keys.revoke, [EnvFile()], "bob")
        added = dict(zip(names, threads.map(add, names), strict=True))
    revoked.result()
    assert {name: name_of(key) for name, key in added.items()} == {name: name for name in names}
    assert [name_of(each) for each in ("for-bob", "the-owner")] == [None, "owner"]
    assert "HF_TOKEN=hf_x" in file.read_text()


def test_two_projects_with_the_same_env_keep_all_keys(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / ".env").symlink_to(file)
    with locked():
        monkeypatch.setattr(settings, "PROJECT", tmp_path / "other")
        monkeypatch.setattr(env_file, "LOCK_TIMEOUT_S", 0.1)
        with pytest.raises(UserError, match=r"another process has been changing .*env for 0 s. End that"):
            add("alice")
    assert name_of(add("alice")) == "alice"


def test_one_of_two_inv_up_writes_the_env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "PROJECT", tmp_path)
    (tmp_path / ".env.example").write_text("SERVE_API_KEY=\nHF_TOKEN=\n")

    def make(_: int) -> str:
        env_file.create()
        return (tmp_path / ".env").read_text()

    with ThreadPoolExecutor(8) as threads:
        (only,) = set(threads.map(make, range(8)))
    assert re.fullmatch(r"SERVE_API_KEY=\S{40,}\nHF_TOKEN=\n", only)
    assert (tmp_path / ".env").stat().st_mode & 0o777 == 0o600


def in_thirty_days() -> datetime.date:
    return datetime.datetime.now(datetime.UTC).date() + datetime.timedelta(days=30)


def test_a_key_expires_at_the_end_of_its_last_day(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = add("alice", days=30)
    last = in_thirty_days()
    end = datetime.datetime(last.year, last.month, last.day, tzinfo=datetime.UTC).timestamp() + 24 * 3600
    for now, name in ((end - 1, "alice"), (end, None)):
        monkeypatch.setattr(server_keys.time, "time", lambda now=now: now)
        assert name_of(key) == name


def test_a_list_shows_names_and_days_but_no_key(file: Path) -> None:
    add("alice", days=30, models="tiny,sql")
    file.write_text(file.read_text().replace("'bob", "'old:sha256=" + "0" * 64 + ":expires=2026-01-31,bob"))
    day = str(in_thirty_days())
    assert shown(EnvFile())[2:] == [
        ["old", "2026-01-31,", "expired", "all", "digest"],
        ["bob", "revoked", "all", "clear", "text"],
        ["alice", day, "sql,", "tiny", "digest"],
    ]
    for name in ("old", "bob", "alice"):
        keys.revoke([EnvFile()], name)
    assert " ".join(shown(EnvFile())[0]) == "only the owner has a key. To add one, run: inv keys add NAME"


@pytest.mark.parametrize(
    ("name", "days", "models", "sentence"),
    [
        ("bob", 0, "", "there already is a key of bob. Use another name, or first run: inv keys revoke bob"),
        ("owner", 0, "", "there already is a key of owner"),
        ("a:b", 0, "", "'a:b' is not a name for a key. Use letters"),
        ("a,b", 0, "", "'a,b' is not a name for a key"),
        ("", 0, "", "'' is not a name for a key"),
        ("alice", -1, "", "--days is -1. Use a positive number"),
        ("alice", 0, "a|b", r"--models is 'a\|b'"),
    ],
)
def test_a_wrong_new_key_gets_one_sentence_and_changes_nothing(
    file: Path, name: str, days: int, models: str, sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        add(name, days, models)
    assert file.read_text() == ENV


def test_a_wrong_name_to_revoke_gets_one_sentence(file: Path) -> None:
    with pytest.raises(UserError, match=r"there is no key of 'carol' \(found: bob\). Run: inv keys"):
        keys.revoke([EnvFile()], "carol")
    with pytest.raises(UserError, match="the key of owner is SERVE_API_KEY"):
        keys.revoke([EnvFile()], "owner")
    file.unlink()
    with pytest.raises(UserError, match=r"there is no \.env, which stores the keys. Run: inv up"):
        keys.revoke([EnvFile()], "bob")


@pytest.mark.parametrize(
    ("words", "output"),
    [
        (["keys"], "API keys|only the owner has a key"),
        (["keys", "revoke", "nobody"], "error: there is no key of 'nobody'"),
    ],
)
def test_the_verb_accepts_a_name_without_a_flag(words: list[str], output: str) -> None:
    command = [sys.executable, "-m", "invoke", *words]
    done = subprocess.run(command, cwd=settings.PROJECT, capture_output=True, text=True)
    assert re.search(f"{output}|there is no .env", done.stdout + done.stderr)  # tests may run without a .env


# ---------------------------------------------------------------- AWS


@pytest.fixture
def secret(s3: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Store the owner's key on AWS, and return the name of the secret with the other keys, which does not exist."""
    project = cluster_file.load()
    client = boto3.client("secretsmanager")
    client.create_secret(Name=f"{project.slug}/SERVE_API_KEY", SecretString="the-owner")
    monkeypatch.setenv("SECRETS_PREFIX", f"{project.slug}/")
    yield f"{project.slug}/SERVE_API_KEYS"
    for name in ("SERVE_API_KEY", "SERVE_API_KEYS"):
        client.delete_secret(SecretId=f"{project.slug}/{name}", ForceDeleteWithoutRecovery=True)


def test_on_aws_a_key_is_valid_at_once_and_for_the_next_cluster(secret: str, file: Path) -> None:
    stores = Aws().key_stores()
    key = keys.add(stores, "alice", 0, "")
    assert name_of(key) == "alice"
    assert name_of("for-bob") is None, "it is only in .env"
    assert [row[0] for row in shown(stores[0])[2:]] == ["alice"]
    assert [row[0] for row in shown(EnvFile())[2:]] == ["bob", "alice"]
    keys.revoke(stores, "alice")
    assert name_of(key) is None
    assert name_of("the-owner") == "owner"
    assert [row[0] for row in shown(EnvFile())[2:]] == ["bob"]
    with pytest.raises(UserError, match=r"there is no key of 'bob' \(found: none\)"):
        keys.revoke(stores, "bob")


@pytest.mark.parametrize("has_keys", [False, True])
def test_two_machines_that_change_the_keys_at_the_same_time_keep_all(
    secret: str, file: Path, monkeypatch: pytest.MonkeyPatch, has_keys: bool
) -> None:
    stores = [secrets_manager.KeyList(cluster_file.load()) for _ in range(2)]
    if has_keys:
        keys.add(stores[:1], "bob", 0, "")
    monkeypatch.setattr(env_file, "locked", contextlib.nullcontext)  # a lock does not reach another machine
    monkeypatch.setattr(secrets_manager, "UPDATE_RETRY_S", 0.1)
    start = threading.Barrier(2)

    def add_six(machine: int) -> dict[str, str]:
        names = [f"user-{machine}-{number}" for number in range(6)]
        start.wait()
        return {name: keys.add([stores[machine]], name, 0, "") for name in names}

    with ThreadPoolExecutor(2) as threads:
        if has_keys:
            keys.add(stores[:1], "old", 0, "")
        first, second = threads.map(add_six, range(2))
    added = first | second
    assert len(added) == 12
    assert {name: name_of(key) for name, key in added.items()} == {name: name for name in added}


def test_a_key_that_is_revoked_on_another_machine_stays_revoked(
    secret: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine reads the list, another one revokes a key and adds two, and then the first one writes."""
    here, there = (secrets_manager.KeyList(cluster_file.load()) for _ in range(2))
    monkeypatch.setattr(env_file, "locked", contextlib.nullcontext)
    monkeypatch.setattr(secrets_manager, "UPDATE_RETRY_S", 0.01)
    stolen = keys.add([here], "alice", 0, "")
    others: list[str] = []
    parse_entries = keys._entries

    def meanwhile(value: str) -> list[str]:
        if not others:
            others.append("")
            keys.revoke([there], "alice")
            others[:] = [keys.add([there], name, 0, "") for name in ("carol", "dave")]
        return parse_entries(value)

    monkeypatch.setattr(keys, "_entries", meanwhile)
    mine = keys.add([here], "erin", 0, "")
    assert [name_of(key) for key in (stolen, *others, mine)] == [None, "carol", "dave", "erin"]


def test_one_of_two_keys_of_the_same_name_is_refused(secret: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = (secrets_manager.KeyList(cluster_file.load()) for _ in range(2))
    monkeypatch.setattr(env_file, "locked", contextlib.nullcontext)
    monkeypatch.setattr(secrets_manager, "UPDATE_RETRY_S", 0.01)

    def add_alice(store: KeyStore) -> str:
        try:
            return keys.add([store], "alice", 0, "")
        except UserError as error:
            return str(error)

    with ThreadPoolExecutor(2) as threads:
        results = list(threads.map(add_alice, (here, there)))
    (key,) = (result for result in results if "there already is a key of alice" not in result)
    assert name_of(key) == "alice"


def test_a_list_that_others_keep_changing_is_given_up(secret: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = secrets_manager.KeyList(cluster_file.load())
    keys.add([store], "alice", 0, "")
    monkeypatch.setattr(secrets_manager, "UPDATE_TIMEOUT_S", 0.0)
    monkeypatch.setattr(store, "_try_to_update", lambda change: False)
    with pytest.raises(UserError, match=r"AWS has refused to change the secret .*SERVE_API_KEYS for 0 s"):
        keys.add([store], "bob", 0, "")


def test_an_old_env_brings_no_revoked_key_back_to_aws(
    secret: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    secrets_manager.upload(cluster_file.load())
    assert name_of("for-bob") == "bob"
    keys.revoke(Aws().key_stores(), "bob")
    file.write_text(ENV)
    secrets_manager.upload(cluster_file.load())
    assert name_of("for-bob") is None
    assert "SERVE_API_KEYS in .env differs from that on AWS, which stays" in capsys.readouterr().out


def test_without_a_cluster_on_aws_there_are_no_keys_to_change(s3: str, file: Path) -> None:
    with pytest.raises(UserError, match=r"aws is not up, so it has no keys. Run: inv up --target aws"):
        keys.add(Aws().key_stores(), "alice", 0, "")
    assert file.read_text() == ENV
