"""Test the launcher `inv` on nearly empty machines. Stubs replace what the launcher downloads."""

import contextlib
import os
import pty
import select
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import bake

COREUTILS = "cat chmod cksum cut dirname env grep ln mkdir mv rm sh sleep tr uname".split()  # noqa: SIM905 -- shorter
NOBODY = 65534
# stub of uv: `venv` and `sync` create a folder with the Python stub
UV = """\
#!/bin/sh
case $1 in
    --version) echo "uv 0.11.3 (2026-11-01)"; exit ;;
    python) exit 1 ;; # no Python of the right version is installed
    venv) for folder; do :; done ;;
    sync) folder=.venv ;;
esac
echo "uv $*" >&2
mkdir -p "$folder/bin" && cat "$PYTHON_STUB" > "$folder/bin/python" && chmod +x "$folder/bin/python"
"""
# stub of the environment's Python: prints its variables and the arguments of verbs
PYTHON = """\
#!/bin/sh
echo "python=$0 uv=$UV pythons=${UV_PYTHON_INSTALL_DIR:-} cache=${XDG_CACHE_HOME:-}" >&2
if [ "$2" = raymill.environment ]; then
    echo stamp > "${0%/bin/python}/installed-pins"
    exit
fi
shift 2
printf '[%s]' "$@"
case $1 in
    fail) exit 42 ;;
    read) cat ;;
    name) echo $$ ;;
    wait)
        trap 'echo interrupted; read -r go_on; exit 130' INT
        [ -t 0 ] && [ -t 1 ] && echo on a terminal
        while :; do sleep 1; done
        ;;
esac
"""
# stub of https://astral.sh/uv/install.sh
INSTALLER = """\
#!/bin/sh
for file; do :; done # the last argument is the file to write
echo 'mkdir -p "$UV_UNMANAGED_INSTALL" && cat "$UV_STUB" > "$UV_UNMANAGED_INSTALL/uv"' > "$file"
echo 'chmod +x "$UV_UNMANAGED_INSTALL/uv"' >> "$file"
"""


class Machine:
    """A nearly empty machine: an ordinary user, some coreutils, git and g++ on PATH, and a project in `a b é`."""

    def __init__(self, root: Path) -> None:
        self.root, self.bin, self.home = root, root / "bin", root / "home"
        self.project = bake.bake(root / "a b é" / "project")
        self.home.mkdir()
        self.bin.mkdir()
        for program in COREUTILS:
            (self.bin / program).symlink_to(str(shutil.which(program)))
        for program in ("git", "g++"):
            self.install(program, "#!/bin/sh\n")
        self.install("../uv-stub", UV)
        self.install("../python-stub", PYTHON)
        self.variables = {
            "PATH": str(self.bin),
            "HOME": str(self.home),
            "UV_STUB": str(root / "uv-stub"),
            "PYTHON_STUB": str(root / "python-stub"),
        }
        if os.geteuid() == 0:
            for path in (root, *root.rglob("*")):
                os.chown(path, NOBODY, NOBODY, follow_symlinks=False)

    def install(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def command(self, *words: str, folder: Path | None = None) -> list[str]:
        """Return the command that runs `inv` as the machine's user."""
        user = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"] if os.geteuid() == 0 else []
        program = shutil.which(user[0]) if user else None
        return [*filter(None, [program]), *user[1:], str((folder or self.project) / "inv"), *words]

    def inv(self, *words: str, folder: Path | None = None, typed: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*words, folder=folder),
            env=self.variables,
            cwd=self.root,
            input=typed,
            capture_output=True,
            text=True,
        )

    def refused(self, *words: str, folder: Path | None = None) -> str:
        """Run a verb that must fail, and return its error, which must be one line."""
        done = self.inv(*words, folder=folder)
        assert done.returncode == 1, done
        assert done.stdout == ""
        assert done.stderr.startswith("error: ")
        assert done.stderr.count("\n") == 1
        return done.stderr

    def kept(self) -> set[str]:
        """Return the paths in the home folder, up to two levels deep."""
        return {str(path.relative_to(self.home)) for path in (*self.home.glob("*"), *self.home.glob("*/*"))}


@pytest.fixture
def machine() -> Iterator[Machine]:
    if os.geteuid() == 0 and not shutil.which("setpriv"):
        pytest.skip("becoming another user needs setpriv, from util-linux")
    root = Path(tempfile.mkdtemp(prefix="launcher-"))  # other users cannot access pytest's own folders
    root.chmod(0o755)
    yield Machine(root)
    shutil.rmtree(root)


@pytest.fixture
def with_uv(machine: Machine) -> Machine:
    machine.install("uv", UV)
    return machine


@pytest.fixture(scope="module")
def marked_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Create a copy of this Python with pip and the marker file of PEP 668, as on Debian."""
    prefix = Path(tempfile.mkdtemp(prefix="python-"))
    prefix.chmod(0o755)
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    python, library = Path(sys.base_prefix, "bin", name), Path(sysconfig.get_path("stdlib"))
    pip = subprocess.run([python, "-c", "import pip; print(*pip.__path__)"], capture_output=True, text=True).stdout
    if not pip:
        pytest.skip("this Python has no pip")
    others = shutil.ignore_patterns("site-packages", "dist-packages", "test", "idlelib", "config-*", "__pycache__")
    shutil.copytree(library, prefix / "lib" / name, ignore=others)
    shutil.copytree(pip.strip(), prefix / "packages" / "pip")
    (prefix / "lib" / name / "EXTERNALLY-MANAGED").write_text("[externally-managed]\nError=This Python is Debian's.\n")
    for shared in Path(sys.base_prefix, "lib").glob("libpython*.so*"):
        shutil.copy(shared, prefix / "lib")
    (prefix / "bin").mkdir()
    shutil.copy(python.resolve(), prefix / "bin" / name)
    start = prefix / "python3"
    paths = f"LD_LIBRARY_PATH={prefix}/lib PYTHONPATH={prefix}/packages"
    start.write_text(f'#!/bin/sh\n{paths} exec {prefix}/bin/{name} "$@"\n')
    start.chmod(0o755)
    yield start
    shutil.rmtree(prefix)


@pytest.fixture
def with_pip(machine: Machine, marked_python: Path) -> Machine:
    """Return a machine with `marked_python`, whose pip finds only one wheel. The wheel contains the uv stub."""
    (machine.bin / "python3").symlink_to(marked_python)
    with zipfile.ZipFile(machine.root / "uv-1.0-py3-none-any.whl", "w") as wheel:
        program = zipfile.ZipInfo("uv-1.0.data/scripts/uv")
        program.external_attr = 0o100755 << 16
        wheel.writestr(program, UV)
        wheel.writestr("uv-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: uv\nVersion: 1.0\n")
        wheel.writestr("uv-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("uv-1.0.dist-info/RECORD", "")
    machine.variables |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(machine.root)}
    return machine


# ------------------------------------------------------------------------------------------ the file


def test_the_template_and_its_projects_have_the_same_launcher(project: Path) -> None:
    assert (project / "inv").read_bytes() == (bake.TEMPLATE / "inv").read_bytes()
    assert os.access(project / "inv", os.X_OK)
    assert os.access(bake.TEMPLATE / "inv", os.X_OK)


def test_the_launcher_is_posix_sh() -> None:
    subprocess.run(["sh", "-n", bake.TEMPLATE / "inv"], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", bake.TEMPLATE / "inv"], check=True)


# ------------------------------------------------------------------------------------------ the first run


def test_uv_is_installed_with_pip_on_an_externally_managed_python(with_pip: Machine) -> None:
    machine = with_pip
    plain = subprocess.run(
        [*machine.command()[:-1], str(machine.bin / "python3"), "-m", "pip", "install", "uv"],
        env=machine.variables,
        capture_output=True,
        text=True,
    )
    assert "externally-managed-environment" in plain.stderr, plain

    done = machine.inv("up")
    assert (done.returncode, done.stdout) == (0, "[up]"), done
    assert (machine.project / ".cluster" / "uv" / "bin" / "uv").is_file()
    assert machine.kept() <= {".cache", ".cache/raymill", ".cache/pip"}


def test_uv_is_installed_with_its_installer_without_pip(machine: Machine) -> None:
    machine.install("curl", INSTALLER)
    done = machine.inv("up")
    assert (done.returncode, done.stdout) == (0, "[up]"), done
    assert (machine.project / ".cluster" / "uv" / "bin" / "uv").is_file()
    assert machine.kept() == {".cache", ".cache/raymill"}


def test_uv_on_path_is_used(with_uv: Machine) -> None:
    done = with_uv.inv("up")
    assert (done.returncode, done.stdout) == (0, "[up]"), done
    assert f"uv={with_uv.bin / 'uv'} " in done.stderr
    assert f"pythons={with_uv.home}/.cache/raymill/python " in done.stderr
    assert not (with_uv.project / ".cluster").exists()


def test_the_environment_has_no_space_in_its_path(with_uv: Machine) -> None:
    done = with_uv.inv("up")
    environment = (with_uv.project / ".venv").readlink()
    assert environment.parent == with_uv.home / ".cache" / "raymill"
    assert environment.name.startswith("project-")
    assert f"python={environment}/bin/python " in done.stderr


def test_a_cache_that_links_to_a_path_with_a_space_is_not_used(with_uv: Machine) -> None:
    """The environment's resolved path would contain the space, so the launcher uses a cache in the project."""
    disk = with_uv.root / "My Passport"
    disk.mkdir(mode=0o777)
    disk.chmod(0o777)
    (with_uv.home / ".cache").symlink_to(disk)
    plain = with_uv.root / "plain"
    with_uv.project.rename(plain)
    assert with_uv.inv("up", folder=plain).returncode == 0
    assert (plain / ".venv").readlink().parent == plain / ".cluster" / "cache" / "raymill"


@pytest.mark.parametrize("name", ["CDPATH", "UV_PYTHON", "VIRTUAL_ENV", "UV_PROJECT_ENVIRONMENT"])
def test_variables_of_the_users_shell_change_nothing(with_uv: Machine, name: str) -> None:
    with_uv.variables[name] = {"CDPATH": f".:{with_uv.root}", "UV_PYTHON": "3.13"}.get(name, str(with_uv.home))
    done = with_uv.inv("up")
    assert "--python 3.11 " in done.stderr, done
    done = with_uv.inv("status")
    assert (done.returncode, done.stdout) == (0, "[status]"), done
    assert "uv venv" not in done.stderr, "the environment must be created only once"


def test_a_copied_project_gets_its_own_environment(with_uv: Machine) -> None:
    with_uv.inv("up")
    copy = with_uv.root / "copy"
    shutil.copytree(with_uv.project, copy, symlinks=True)
    if os.geteuid() == 0:
        os.chown(copy, NOBODY, NOBODY)
    assert with_uv.inv("status", folder=copy).returncode == 0
    assert (with_uv.project / ".venv").readlink() != (copy / ".venv").readlink()


@pytest.mark.parametrize("uv", ["echo uv 0.6.3", "echo pyenv: uv: command not found; exit 127", "exit 1"])
def test_a_uv_that_is_old_or_does_not_run_is_not_used(with_pip: Machine, uv: str) -> None:
    with_pip.install("uv", f"#!/bin/sh\n{uv}\n")
    done = with_pip.inv("up")
    assert (done.returncode, done.stdout) == (0, "[up]"), done
    assert f"uv={with_pip.project}/.cluster/uv/bin/uv " in done.stderr


def test_two_projects_with_the_same_name_have_two_environments(with_uv: Machine) -> None:
    with_uv.inv("up")
    other = with_uv.root / "other"
    shutil.copytree(with_uv.project, other / "project", ignore=shutil.ignore_patterns(".venv"))
    if os.geteuid() == 0:
        os.chown(other / "project", NOBODY, NOBODY)
    with_uv.inv("up", folder=other / "project")
    assert (with_uv.project / ".venv").readlink() != (other / "project" / ".venv").readlink()


def test_later_runs_need_nothing(with_uv: Machine) -> None:
    with_uv.inv("up")
    for program in ("uv", "g++", "git"):
        (with_uv.bin / program).unlink()
    done = with_uv.inv("status")
    assert (done.returncode, done.stdout) == (0, "[status]"), done


def test_a_folder_that_was_the_environment_becomes_a_link(with_uv: Machine) -> None:
    (with_uv.project / ".venv" / "bin").mkdir(parents=True)
    if os.geteuid() == 0:
        for path in (with_uv.project / ".venv", with_uv.project / ".venv" / "bin"):
            os.chown(path, NOBODY, NOBODY)
    assert with_uv.inv("up").returncode == 0
    assert (with_uv.project / ".venv").is_symlink()


def test_the_template_runs_its_own_verbs(with_uv: Machine) -> None:
    template = with_uv.root / "c d ü" / "template"
    template.mkdir(parents=True)
    shutil.copy(bake.TEMPLATE / "inv", template)
    shutil.copy(bake.TEMPLATE / "pyproject.toml", template)
    if os.geteuid() == 0:
        os.chown(template, NOBODY, NOBODY)
    for _ in range(2):
        done = with_uv.inv("demo", folder=template)
        assert (done.returncode, done.stdout) == (0, "[demo]"), done


def test_a_project_without_its_settings_is_still_a_project(with_uv: Machine) -> None:
    """Its verbs name the missing file. The template's environment would replace the project's."""
    (with_uv.project / "settings.toml").unlink()
    done = with_uv.inv("demo")
    assert "uv sync" not in done.stderr
    assert (with_uv.project / ".venv").is_symlink()


def test_signals_to_the_launcher_reach_the_verb(with_uv: Machine) -> None:
    """Signals also reach the template's verbs, where `uv run` would be a process between launcher and verb."""
    template = with_uv.root / "template"
    template.mkdir()
    for name in ("inv", "pyproject.toml"):
        shutil.copy(bake.TEMPLATE / name, template)
    if os.geteuid() == 0:
        os.chown(template, NOBODY, NOBODY)
    for folder in (template, with_uv.project):
        process = subprocess.Popen(
            with_uv.command("name", folder=folder), env=with_uv.variables, stdout=subprocess.PIPE, text=True
        )
        assert process.communicate()[0] == f"[name]{process.pid}\n"


# ------------------------------------------------------------------------------------------ unusual machines


def test_with_a_read_only_home_the_cache_is_in_the_project(with_uv: Machine) -> None:
    plain = with_uv.root / "plain"
    with_uv.project.rename(plain)
    with_uv.home.chmod(0o500)
    done = with_uv.inv("up", folder=plain)
    assert (done.returncode, done.stdout) == (0, "[up]"), done
    assert f"cache={plain}/.cluster/cache\n" in done.stderr
    assert f"pythons={plain}/.cluster/cache/raymill/python " in done.stderr
    assert (plain / ".venv").readlink().parent == plain / ".cluster" / "cache" / "raymill"


@pytest.mark.parametrize("home", ["closed", "with a space", "nowhere"])
def test_without_a_usable_cache_folder_it_says_what_to_type(with_uv: Machine, home: str) -> None:
    (with_uv.root / "with a space").mkdir(mode=0o777)
    (with_uv.root / "closed").mkdir(mode=0o500)
    with_uv.variables["HOME"] = str(with_uv.root / home) if home != "nowhere" else ""
    said = with_uv.refused("up")
    assert "Run: export XDG_CACHE_HOME=" in said
    assert not (with_uv.project / ".venv").is_symlink()

    with_uv.variables["XDG_CACHE_HOME"] = str(with_uv.home / "cache")
    assert with_uv.inv("up").returncode == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_of_another_user_is_reported(with_uv: Machine) -> None:
    (with_uv.project / ".cluster").mkdir(mode=0o755)
    with_uv.install("id", "#!/bin/sh\necho alice\n")
    assert "Run: sudo chown -R alice .cluster" in with_uv.refused("up")


def test_without_pip_and_curl_it_says_what_to_install(machine: Machine) -> None:
    assert "Run: sudo apt-get install curl" in machine.inv("up").stderr.splitlines()[-1]


def test_without_a_compiler_it_says_what_to_install(with_uv: Machine) -> None:
    (with_uv.bin / "g++").unlink()
    assert with_uv.refused("up") == "error: not installed: g++. Run: sudo apt-get install g++\n"
    assert not (with_uv.project / ".venv").is_symlink()


def test_without_git_a_clone_of_the_template_says_what_to_install(with_uv: Machine) -> None:
    template = with_uv.root / "template"
    (template / ".git").mkdir(parents=True)
    shutil.copy(bake.TEMPLATE / "inv", template)
    (with_uv.bin / "git").unlink()
    assert with_uv.refused("demo", folder=template) == "error: not installed: git. Run: sudo apt-get install git\n"
    (with_uv.bin / "g++").unlink()
    assert "Run: sudo apt-get install git g++\n" in with_uv.refused("demo", folder=template)


@pytest.mark.parametrize("system", ["MINGW64_NT-10.0-19045", "MSYS_NT-10.0", "CYGWIN_NT-10.0"])
def test_windows_is_rejected(with_uv: Machine, system: str) -> None:
    (with_uv.bin / "uname").unlink()
    with_uv.install("uname", f"#!/bin/sh\necho {system}\n")
    assert "Use WSL2" in with_uv.refused("up")


# ------------------------------------------------------------------------------------------ arguments and signals


def test_arguments_stdin_and_exit_code_are_passed_on(with_uv: Machine) -> None:
    words = ("read", "two words", "", "it's", "$HOME *", "--", "-é")
    done = with_uv.inv(*words, typed="typed\n")
    assert done.stdout == "".join(f"[{word}]" for word in words) + "typed\n"
    assert with_uv.inv("fail").returncode == 42


def test_without_a_verb_it_lists_them(with_uv: Machine) -> None:
    assert with_uv.inv().stdout == "[--list]"


def test_the_verb_gets_the_terminal_and_ctrl_c(with_uv: Machine) -> None:
    with_uv.inv("--list")  # creates the environment
    pid, terminal = pty.fork()
    if pid == 0:
        command = with_uv.command("wait")
        os.execve(command[0], command, with_uv.variables)
    assert "on a terminal" in _read(terminal, "on a terminal")
    os.write(terminal, b"\x03")
    assert "interrupted" in _read(terminal, "interrupted")
    os.write(terminal, b"\n")  # ends the verb only now, because a terminal may drop the output of a verb that has ended
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130


def _read(terminal: int, until: str) -> str:
    """Return the terminal's output up to these words, or until it ends or pauses for a minute."""
    text = ""
    with contextlib.suppress(OSError):
        while until not in text and select.select([terminal], [], [], 60)[0]:
            text += os.read(terminal, 4096).decode()
    return text
