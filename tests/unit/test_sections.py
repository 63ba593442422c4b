"""Test that a section or key of settings.toml that nothing reads is an error, with its line and the nearest name."""

import ast
import re
import tomllib
import types
import typing
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from invoke import Collection, Context, Exit

from raymill import job, job_scripts, sections, settings, targets
from raymill.errors import UserError
from raymill.serving.options import ModelsOptions
from raymill.training.options import DDPOptions

CODE = [
    settings.PROJECT / "tasks.py",
    *(path for part in ("jobs", "raymill") for path in (settings.PROJECT / part).rglob("*.py")),
]
TEXT = settings.FILE.read_text()


def error(folder: Path, text: str) -> str:
    (folder / "settings.toml").write_text(text)
    with pytest.raises(UserError) as raised:
        sections.check(folder / "settings.toml")
    return str(raised.value)


def test_this_project_has_only_known_sections() -> None:
    sections.check()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        # a misspelled section, however it is written
        (
            "[cluster.netwrok]\nprivate = true",
            "line 1: there is no section [cluster.netwrok]. Did you mean [cluster.network]?",
        ),
        (
            "[cluster.bugdet]\nemail = 'a'",
            "line 1: there is no section [cluster.bugdet]. Did you mean [cluster.budget]?",
        ),
        ("[cluster.tran]\nseed = 1", "line 1: there is no section [cluster.tran]. Did you mean [cluster.train]?"),
        ("[clutser.train]\nseed = 1", "line 1: there is no section [clutser.train]. Did you mean [cluster.train]?"),
        ("[[clutser.train]]\nseed = 1", "line 1: there is no section [clutser.train]. Did you mean [cluster.train]?"),
        ("[trian]\nseed = 1", "line 1: there is no section [trian]. Did you mean [train]?"),
        ("[netwrok]\nprivate = true", "line 1: there is no section [netwrok]. Did you mean [cluster.network]?"),
        (
            "[cluster.Network]\nprivate = true",
            "line 1: there is no section [cluster.Network]. Did you mean [cluster.network]?",
        ),
        ("\n[ cluster . 'netwrok' ]", "line 2: there is no section [cluster.netwrok]. Did you mean [cluster.network]?"),
        (
            '["cluster"."netw\\u0072ok"]',
            "line 1: there is no section [cluster.netwrok]. Did you mean [cluster.network]?",
        ),
        (
            "cluster.netwrok.private = true",
            "line 1: there is no section [cluster.netwrok]. Did you mean [cluster.network]?",
        ),
        ("cluster = {netwrok = {}}", "line 1: there is no section [cluster.netwrok]. Did you mean [cluster.network]?"),
        (
            "[my_job]\nx = 1",
            "line 1: there is no section [my_job]. Correct that line, or declare it in the script that reads it: JOB =",
        ),
        ("[xyz]", "line 1: there is no section [xyz]. Correct that line, or declare"),
        # a section in a place where nothing reads it
        ("[local.network]\nprivate = true", "line 1: [local.network] is never read. Write [cluster.network]"),
        ("[train.cluster]\nseed = 1", "line 1, key train.cluster: no such key. Did you mean [cluster.train]?"),
        ("[[cluster.limits]]\nhours = 1", "line 1: [[cluster.limits]] is a list of tables. Write [cluster.limits]"),
        # a key outside of all sections
        ("private = true", "line 1: the key private is in no section. Move it to [cluster.network]"),
        ("[cluster]\nprivate = true", "line 2: the key private is in no section. Move it to [cluster.network]"),
        ("xyz = 1", "line 1: the key xyz is in no section. Move it below the header of one"),
        ("cluster = 1", "line 1: the key cluster is in no section. Move it below the header of one"),
        # a misspelled key, also of a nested table and after a value of several lines
        (
            "[evaluate]\nmodels = [\n'a',\n]\nbatch_row = 1",
            "line 5, key evaluate.batch_row: no such key. Did you mean batch_rows?",
        ),
        ("[evaluate]\nmodles = [\n'a',\n]", "line 2, key evaluate.modles: no such key. Did you mean models?"),
        (
            "[cluster.network]\nPrivate = true",
            "line 2, key cluster.network.Private: no such key. Did you mean private?",
        ),
        (
            "[tune]\nlearning_rates = {hihg = 1}",
            "line 2, key tune.learning_rates.hihg: no such key. Did you mean high?",
        ),
        (
            "[rag.ranker]\nmin_replica = 1",
            "line 2, key rag.ranker.min_replica: no such key. Did you mean min_replicas?",
        ),
        # a key of another section
        (
            "[cluster.train]\nzero_stage = 2",
            "line 2, key cluster.train.zero_stage: no such key, but [cluster.deepspeed] has one.",
        ),
        ("[train]\nhours = 2", "line 2, key train.hours: no such key, but [cluster.limits] has one."),
        ("[cluster.ray]\nnum_cpus = 2", "line 2, key cluster.ray.num_cpus: no such key, but [local.ray] has one."),
        # a table in place of a value
        ("[cluster.network.private]", "line 1, key cluster.network.private: this needs a value, not a table."),
        ("[train]\nseed = {a = 1}", "line 2, key train.seed: this needs a value, not a table."),
    ],
)
def test_what_nothing_reads_is_an_error(tmp_path: Path, text: str, sentence: str) -> None:
    assert error(tmp_path, text).startswith(f"settings.toml {sentence}")


def test_a_section_given_twice_is_an_error(tmp_path: Path) -> None:
    assert re.search(r"not valid TOML: .*train.* twice \(at line 3", error(tmp_path, "[train]\n\n[train]\n"))


def test_a_table_for_any_argument_of_vllm_has_any_keys(tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text("[serve.engine]\nquantization = 'fp8'\n[network]\nprivate = true\n")
    sections.check(tmp_path / "settings.toml")


def test_every_misspelled_line_of_the_file_is_an_error() -> None:
    lines = [line for line in TEXT.splitlines() if re.match(r"\[|\w+ = ", line)]
    assert len(lines) > 200
    for line in lines:
        name = re.findall(r"\w+", line.partition("=")[0].partition("]")[0])[-1]
        text = TEXT.replace(f"\n{line}\n", "\n" + line.replace(name, f"{name}_", 1) + "\n", 1)
        (problem,) = sections.problems(tomllib.loads(text), ".".join, sections.SECTIONS)
        assert problem.partition(":")[0].endswith(f"{name}_")
        assert "Did you mean" in problem


# ------------------------------------------------------------------------------------------ the registry


@pytest.mark.parametrize("entry", sections.SECTIONS, ids=lambda entry: entry.type)
def test_the_keys_are_the_fields_of_the_class(entry: sections.Entry) -> None:
    assert sections.keys(entry.type) == fields(entry.load_type())


def fields(section: type[settings.Section]) -> dict[str, Any]:
    """Return the keys of a class as `sections.keys` does, but from the imported class."""
    return {name: nested(field.annotation) for name, field in section.model_fields.items()}


def nested(annotation: Any) -> dict[str, Any] | None:
    if typing.get_origin(annotation) is dict:
        return {}
    if isinstance(annotation, types.UnionType):
        return next((found for one in typing.get_args(annotation) if (found := nested(one)) is not None), None)
    is_section = isinstance(annotation, type) and issubclass(annotation, settings.Section)
    return fields(annotation) if is_section else None


def calls() -> list[tuple[str, tuple[str, ...]]]:
    """Return the class and the sections of each call that reads settings.toml."""
    found = []
    for file in CODE:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("settings.load", "Job"):
                first, *names = node.args
                if all(isinstance(name, ast.Constant) for name in names):
                    found.append(
                        (ast.unparse(first).rpartition(".")[2], tuple(ast.literal_eval(name) for name in names))
                    )
    return found


def test_every_section_that_the_code_reads_is_registered_and_the_other_way_round() -> None:
    registered = {(entry.type.rpartition(".")[2], entry.names) for entry in sections.SECTIONS}
    read = {call for call in calls() if call[1]}
    assert read == registered


def test_a_job_of_ones_own_declares_its_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "jobs").mkdir()
    script = "import torch_of_mine\nfrom raymill.settings import Section\nclass Options(Section):\n    rows: int\n"
    (tmp_path / "jobs" / "mine.py").write_text(script)
    (tmp_path / "raymill").mkdir()
    (tmp_path / "raymill" / "settings.py").write_text("class Section: ...\n")
    monkeypatch.setattr(settings, "PROJECT", tmp_path)
    text = "[mine]\nrow = 1\n"
    monkeypatch.setattr(sections, "SECTIONS", ())

    def change(script: str) -> None:
        (tmp_path / "jobs" / "mine.py").write_text(script)
        sections._parsed.cache_clear()
        sections.keys.cache_clear()
        sections._keys.cache_clear()

    assert 'declare it in the script that reads it: JOB = Job(Options, "mine")' in error(tmp_path, text)
    change(script + 'JOB = Job(Options, "mine")\n')
    (tmp_path / "settings.toml").write_text("[mine]\nrows = 1\n[cluster.mine]\nrows = 2\n")
    sections.check(tmp_path / "settings.toml")
    assert (
        error(tmp_path, text) == "settings.toml line 2, key mine.row: no such key. Did you mean rows? Correct that line"
    )
    change(script + 'JOB = job.Job(Option, "train", "mine")\n')
    assert "mine.py line 5: the class Option is not in this file. Import it by its name" in error(tmp_path, text)
    change("from raymill.settings import Other\nJOB = job.Job(Other, 'mine')\n")
    assert "there is no such class" in error(tmp_path, text)
    change(script + "JOB = (\n")
    assert "mine.py line 5 is not valid Python" in error(tmp_path, text)
    (tmp_path / "settings.toml").write_text("")
    sections.check(tmp_path / "settings.toml")  # a script that is just being edited matters only if it has to be read


# ------------------------------------------------------------------------------------------ where it is checked


@pytest.fixture
def misspelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "settings.toml").write_text(TEXT.replace("[cluster.network]", "[cluster.netwrok]"))
    monkeypatch.setattr(settings, "FILE", tmp_path / "settings.toml")


@pytest.mark.usefixtures("misspelled")
def test_every_verb_refuses_a_misspelled_section(tasks: ModuleType) -> None:
    for verb in Collection.from_module(tasks).tasks.values():
        # the doctor shows it among its findings: see test_doctor.py and test_aws_doctor.py
        if verb.name not in ("doctor", "down"):
            with pytest.raises(Exit, match=r"there is no section \[cluster\.netwrok\]"):
                verb.body(Context())


@pytest.mark.usefixtures("misspelled")
def test_down_only_warns_because_it_ends_what_costs_money(
    tasks: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    local = SimpleNamespace(down=lambda owner, drain_s: [])
    monkeypatch.setattr(targets, "get", lambda name: local)
    tasks.down.body(Context())
    assert "warning: " in (said := capsys.readouterr().err)
    assert "there is no section [cluster.netwrok]" in said


@pytest.mark.usefixtures("misspelled")
def test_every_job_refuses_a_misspelled_section(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in job_scripts.names():
        assert "\nJOB = Job(" in job_scripts.find(name).read_text(), name
    monkeypatch.setattr("sys.argv", ["jobs/finetune_ddp.py"])
    for parse in (lambda: job.parse(DDPOptions, "train"), lambda: job.parse(ModelsOptions)):
        with pytest.raises(SystemExit, match=r"there is no section \[cluster\.netwrok\]"):
            parse()
