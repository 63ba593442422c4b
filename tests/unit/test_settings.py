"""Test settings.toml: profiles override shared values, and errors name the line and the key."""

import re
from pathlib import Path

import pytest

from raymill import job, settings
from raymill.errors import UserError
from raymill.training.options import DeepSpeedOptions


class Example(settings.Section):
    cores: int
    name: str = "unnamed"


def write(folder: Path, text: str) -> Path:
    file = folder / "settings.toml"
    file.write_text(text)
    return file


def test_the_profile_overrides_shared_values(tmp_path: Path) -> None:
    file = write(
        tmp_path, '[machine]\ncores = 1\nname = "shared"\n[local.machine]\ncores = 2\n[cluster.machine]\ncores = 3\n'
    )
    assert settings.load(Example, "machine", profile="local", file=file) == Example(cores=2, name="shared")
    assert settings.load(Example, "machine", profile="cluster", file=file) == Example(cores=3, name="shared")


class Length(settings.Section):
    ALTERNATIVES = ("meters", "feet")
    meters: int = 0
    feet: int = 0
    name: str = ""


@pytest.mark.parametrize(
    ("shared", "own", "length"),
    [
        ("meters = 1", "", Length(meters=1)),
        ("meters = 1", "feet = 2", Length(feet=2)),
        ("feet = 1", "meters = 2", Length(meters=2)),
        ("meters = 1", 'name = "a"', Length(meters=1, name="a")),
        ("meters = 1", "meters = 2\nfeet = 3", Length(meters=2, feet=3)),  # which a validator of the type may refuse
    ],
)
def test_a_table_that_sets_an_alternative_unsets_the_others(
    shared: str, own: str, length: Length, tmp_path: Path
) -> None:
    file = write(tmp_path, f"[road]\n{shared}\n[local.road]\n{own}\n")
    assert settings.load(Length, "road", profile="local", file=file) == length


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[machine]\ncores = 1\n\n[local.machine]\ncores = 'two'\n", "settings.toml line 5, key local.machine.cores: "),
        ("[machine]\ncores = 1\ncoers = 2\n", "settings.toml line 3, key machine.coers: no such key"),
        ("[machine]\nname = 'a'\n", "settings.toml: the key cores is missing. Add it to [machine] or [local.machine]"),
        ("[machine]\ncores = \n", "settings.toml is not valid TOML: Invalid value (at line 2"),
    ],
)
def test_an_error_names_line_and_key(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(UserError, match="^" + re.escape(sentence)):
        settings.load(Example, "machine", profile="local", file=write(tmp_path, text))


def test_a_missing_file_and_an_unknown_profile_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"git checkout settings\.toml"):
        settings.load(Example, "machine", file=tmp_path / "settings.toml")
    with pytest.raises(UserError, match="unknown profile 'laptop'"):
        settings.load(Example, "machine", profile="laptop")


def test_a_file_of_a_windows_editor_is_read_or_named(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_bytes(b"\xef\xbb\xbf[machine]\r\nregion = 1\r\n")  # with a byte order mark
    assert settings.parse(file) == {"machine": {"region": 1}}
    file.write_bytes("# café".encode("latin-1"))
    with pytest.raises(UserError, match=r"settings\.toml is not UTF-8: .* Save it as UTF-8"):
        settings.parse(file)


def test_relative_paths_are_resolved_and_uris_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROJECT_DIR", "/somewhere/project")
    assert settings.resolve("data/packed") == "/somewhere/project/data/packed"
    assert settings.resolve("/shared/data") == "/shared/data"
    assert settings.resolve("s3://bucket/data") == "s3://bucket/data"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            "--micro-batch-rows 0",
            "error: --micro-batch-rows: Input should be greater than 0 (found 0). Details: ",
        ),
        ("--zero-stage 2 --offload-parameters", "error: offload_parameters needs zero_stage = 3; add --zero-stage 3."),
        ("--num-workers 3 2", "error: num_workers = [MIN, MAX] needs the smaller number first."),
    ],
)
def test_a_bad_option_on_the_command_line_gives_a_one_sentence_error(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture, options: str, sentence: str
) -> None:
    monkeypatch.setattr("sys.argv", ["jobs/finetune_deepspeed.py", *options.split()])
    with pytest.raises(SystemExit, match="^" + re.escape(sentence)):
        job.parse(DeepSpeedOptions, "train", "deepspeed")
    assert "".join(capfd.readouterr()) == ""  # nothing else is printed: Python prints the sentence when it exits


def test_the_command_line_overrides_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["jobs/finetune_deepspeed.py", "--zero-stage", "1", "--num-workers", "2", "4"])
    found = []
    script = 'JOB = Job(DeepSpeedOptions, "train", "deepspeed")\nJOB.run(main)'
    names = {"Job": job.Job, "DeepSpeedOptions": DeepSpeedOptions, "main": found.append}
    exec(script, names | {"__name__": "jobs.finetune_deepspeed"})
    assert not found, "only the program runs"
    exec(script, names | {"__name__": "__main__"})
    defaults = settings.load(DeepSpeedOptions, "train", "deepspeed")
    assert found == [defaults.model_copy(update={"zero_stage": 1, "num_workers": (2, 4)})]
