"""Test the README's table "To change X, edit Y": in a generated project, changes of the user's own files have effects.

Where the documentation shows code for a change, the code is put into the file that it names.
"""

import ast
import importlib.util
import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import skeleton

from raymill import settings
from raymill.data import manifest, preprocessing, row_sources
from raymill.data.filters.gate import Gate
from raymill.data.options import PreprocessOptions
from raymill.data.packed_folder import PackedFolder
from raymill.data.tokenization import DocumentTokenizer

MARKS = {
    ("data.md", "jobs/preprocess.py"): "FORMATS = ",
    ("filters.md", "jobs/preprocess.py"): "FILTERS = ",
    ("serving.md", "jobs/serve_llm.py"): "CHECKS: ",
    ("rag.md", "jobs/serve_rag.py"): "PARTS = ",
    ("training.md", "jobs/evaluate.py"): "METRICS: ",
    ("training.md", "jobs/finetune_ddp.py"): "STRATEGY = ",
}
"""For each page and script: the start of the line that the page's code replaces."""
VERB = '''
@verb(name="whom to greet")
def greet(context: Context, name: str = "world") -> None:
    """Greet somebody."""
    print(f"welcome {name}")


start('''


def documented(page: str, mark: str) -> str:
    """Return the Python code of a page of the documentation that has a line with this start."""
    text = (settings.PROJECT / "docs" / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    [code] = [block for block in blocks if re.search(f"^{mark}", block, re.MULTILINE)]
    return code


def hello() -> tuple[str, str]:
    """Return the script that jobs/__init__.py shows, and its section of settings.toml."""
    example = ast.get_docstring(ast.parse((settings.PROJECT / "jobs" / "__init__.py").read_text(encoding="utf-8")))
    assert example
    script, section = re.findall(r"(?:^(?:    .*)?\n)+", example.partition("\n")[2], re.MULTILINE)[:2]
    return textwrap.dedent(script), textwrap.dedent(section)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a generated project with all documented changes, an own job with its section, and an own verb."""
    folder = skeleton.make(tmp_path_factory.mktemp("a b é") / "project")
    for (page, script), mark in MARKS.items():
        code = documented(page, mark)
        lines = (folder / script).read_text(encoding="utf-8").splitlines(keepends=True)
        names = set(re.findall(r"^([A-Z]+)(?:: [^=]+)? = ", code, re.MULTILINE))
        replaced = [number for number, line in enumerate(lines) if re.split("[: ]", line)[0] in names]
        lines[replaced[0] : replaced[-1] + 1] = [code]
        (folder / script).write_text("".join(lines), encoding="utf-8")
    script, section = hello()
    (folder / "jobs" / "hello.py").write_text(script)
    with (folder / "settings.toml").open("a") as file:
        file.write(f'{section}\n[cluster.hello]\nname = "Grace"\n')
    tasks = (folder / "tasks.py").read_text()
    (folder / "tasks.py").write_text(tasks.replace("\nstart(", VERB, 1))
    cluster = (folder / "cluster" / "cluster.yaml").read_text(encoding="utf-8")
    (folder / "cluster" / "cluster.yaml").write_text(
        cluster.replace("setup_commands:\n", "setup_commands:\n  - echo mine\n", 1)
    )
    return folder


def python(project: Path, *arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run the environment's Python in the project, and return the ended process."""
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(Path.home()), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(project)}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=project, env=environment | variables, capture_output=True, text=True, check=False
    )


def test_the_changed_files_pass_the_checks_of_the_project(project: Path) -> None:
    sort = ["ruff", "check", "--no-cache", "--select", "I", "--fix", "jobs", "tasks.py"]  # the pages show only a part
    for check in (sort, ["ruff", "check", "--no-cache", "jobs", "tasks.py"], ["pyrefly", "check"]):
        done = python(project, "-m", *check)
        assert done.returncode == 0, done.stdout


def test_a_row_format_of_ones_own_is_read_and_a_change_of_it_is_seen(
    project: Path, assets: Path, tmp_path: Path
) -> None:
    tickets = [{"ticket": f"Number {n} is broken", "reply": f"Replace {n}.", "title": "Help"} for n in range(30)]
    tickets.append({"ticket": "Number 30 is broken", "reply": "I cannot help with that.", "title": "Help"})
    asked = [
        {"question": "2+2?", "answer": "4"},
        {"ticket": "No reply", "reply": " "},
        {"ticket": "A number", "reply": 5},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in tickets + asked))
    arguments = ["-m", "jobs.preprocess", "--input", str(tmp_path), "--output", str(tmp_path / "packed")]
    arguments += ["--model", str(assets / "model"), "--max-bad-share", "0.5"]
    done = python(project, *arguments)
    assert done.returncode == 0, done.stderr
    assert f"{tmp_path}: instructions and answers and tickets" in done.stdout
    made = json.loads((tmp_path / "packed" / "manifest.json").read_text())
    assert made["rows_rejected"] == 2
    assert made["dropped_by_reason"] == {str(tmp_path): {"a refusal": 1}}, "by the filter of docs/filters.md"
    reasons = made["rejected_by_reason"]
    assert "the reply is empty" in reasons
    assert any("tickets" in reason and "AttributeError" in reason for reason in reasons)
    assert "nothing to do" in python(project, *arguments).stdout
    script = (project / "jobs" / "preprocess.py").read_text(encoding="utf-8")
    changed = script.replace("{row.get('title', 'Ticket')}: ", "", 1)
    unfiltered = script.replace("FILTERS = (without_refusals,)", "FILTERS = ()")
    removed = script.replace("FORMATS = (TICKETS, *row_formats.FORMATS)", "FORMATS = row_formats.FORMATS")
    options = settings.load(PreprocessOptions, "preprocess", profile="local").model_copy(
        update={"input": str(tmp_path), "output": str(tmp_path / "packed"), "model": str(assets / "model")}
    )
    for text, same in ((script, True), (changed, False), (removed, False), (unfiltered, False)):
        assert is_complete(text, options, tmp_path) is same


def is_complete(script: str, options: PreprocessOptions, folder: Path) -> bool:
    """Return whether `preprocess` with this script would accept the output for its own."""
    (folder / "own.py").write_text(script, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("own", folder / "own.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sources = row_sources.find_all(options.input, options.mix, module.FORMATS)
    plan, tokenizer = preprocessing.plan_shards(options, sources), DocumentTokenizer.from_options(options)
    gate = Gate.of(options.filters, module.FILTERS, options.eval_share)
    return PackedFolder(plan.output).is_complete(manifest.configuration(sources, plan, options, tokenizer, gate))


@pytest.mark.parametrize(("profile", "name"), [("local", "Ada"), ("cluster", "Grace")])
def test_a_job_of_ones_own_reads_its_own_section(project: Path, profile: str, name: str) -> None:
    asked = "from jobs import hello; print(hello.JOB.load().name)"
    assert python(project, "-c", asked, PROFILE=profile).stdout == f"{name}\n"


def test_a_job_of_ones_own_runs(project: Path) -> None:
    helped = python(project, "-m", "jobs.hello", "--help")
    assert "Whom to greet" in helped.stdout, helped.stderr
    done = python(project, "-m", "jobs.hello", "--name", "Alan")
    assert (done.returncode, done.stdout) == (0, "hello Alan\n"), done.stderr


def test_a_misspelled_key_of_ones_own_section_is_an_error_in_every_verb(project: Path) -> None:
    file = project / "settings.toml"
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace("[cluster.hello]\nname =", "[cluster.hello]\nnmae ="), encoding="utf-8")
    done = python(project, "-m", "jobs.hello")
    file.write_text(text, encoding="utf-8")
    assert "key cluster.hello.nmae: no such key. Did you mean name?" in done.stderr


def test_a_verb_of_ones_own_and_the_librarys(project: Path) -> None:
    done = python(project, "-m", "invoke", "greet", "--name", "Ada")
    assert done.stdout == "welcome Ada\n", done.stderr
    listed = python(project, "-m", "invoke", "--list").stdout
    assert {"greet", "submit"} <= set(listed.split())
    jobs = python(project, "-m", "invoke", "submit", "--help")
    assert "hello" in jobs.stdout


def test_setup_commands_of_ones_own_run_on_the_nodes(project: Path) -> None:
    read = "from raymill.common import cluster_file; print(cluster_file.load().content['setup_commands'][0])"
    assert python(project, "-c", read).stdout == "echo mine\n"
