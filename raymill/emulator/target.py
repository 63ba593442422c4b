"""The `rehearsal` target, which starts the emulated cloud and runs the current verb inside it."""

import datetime
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NoReturn

from raymill.common import cluster_file
from raymill.doctor import Finding
from raymill.emulator import sandbox
from raymill.target import CloudStatus, Connection, KeyStore, PastJob, PastLog, WantedBlock


class Rehearsal:
    """The target of verbs that you run outside the cloud. Inside the cloud, `targets.get` returns `Aws`."""

    name = "rehearsal"
    profile = "cluster"

    def doctor(self) -> list[Finding]:
        sandbox.start(cluster_file.load().region)
        _run_verb_inside()

    def prepare(self, owner: str = "") -> None:
        sandbox.start(cluster_file.load().region)
        _run_verb_inside()

    def up(self, yes: bool, wait: bool = False, owner: str = "") -> None:
        sandbox.start(cluster_file.load().region)
        _run_verb_inside()

    def show_capacity(self, wanted: WantedBlock) -> None:
        sandbox.start(cluster_file.load().region)
        _run_verb_inside()

    def buy_capacity(self, offering: str, yes: bool) -> None:
        _run_verb_inside()

    def show_limits(self) -> None:
        _run_verb_inside()

    def change_limits(self, given: Mapping[str, str], yes: bool) -> None:
        _run_verb_inside()

    def bake(self) -> None:
        _run_verb_inside()

    def connect(self) -> Connection:
        _run_verb_inside()

    def storage_variables(self) -> dict[str, str]:
        _run_verb_inside()

    def shell(self, command: str) -> int:
        _run_verb_inside()

    def configure_ssh(self) -> None:
        _run_verb_inside()

    def notebook(self) -> str:
        _run_verb_inside()

    def dollars_per_instance_hour(self, types: Collection[str] = ()) -> dict[str, float]:
        sandbox.start(cluster_file.load().region)
        _run_verb_inside()

    def cloud_status(self) -> CloudStatus:
        _run_verb_inside()

    def past_jobs(self) -> list[PastJob]:
        _run_verb_inside()

    def past_log(self, job_id: str) -> PastLog | None:
        _run_verb_inside()

    def access_logs(self, since: datetime.datetime) -> Iterable[str]:
        _run_verb_inside()

    def key_stores(self) -> Sequence[KeyStore]:
        _run_verb_inside()

    def down(self, owner: str = "", drain_s: int = 0) -> list[str]:
        if not sandbox.is_running():
            print("rehearsal is not up, so there is nothing to stop")
            return sandbox.stop()
        code = sandbox.run(_current_verb())
        if code:
            sys.exit(code)
        left = sandbox.stop()
        if not left:
            print("the emulated AWS is gone, with its network, mounts and hosts")
        return left


def _run_verb_inside() -> NoReturn:
    sys.exit(sandbox.run(_current_verb()))


def _current_verb() -> list[str]:
    return [sys.executable, "-m", "invoke", *sys.argv[1:]]
