"""The verbs: inv VERB [--target T]. A job's own options come after --. `inv --list` shows all verbs."""

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from invoke import Context, Exit, task
from invoke.main import program

from cluster import environment, network

environment.enter()  # makes .venv on first use; from here on, everything that the pins name is there

from rich.console import Console

import settings
from cluster import job_scripts, words

network.keep_to_loopback()

# each verb imports what it needs: all together take seconds, which `inv --list` should not
CONSOLE = Console()
TARGET = {"target": "where the cluster is: local (this machine), rehearsal (AWS, emulated on this machine) or aws"}
VERBOSE = {"verbose": "also show Ray's own messages"}
JOB_ID = {"job": "id as `inv status` shows it; the latest when left out"}


def verb(*positional: str, **texts: str) -> Callable[..., Any]:
    """An invoke task whose refusals are one sentence on stderr and not a traceback."""

    def decorate(body: Callable[..., None]) -> Any:
        @functools.wraps(body)
        def checked(context: Context, *args: Any, **options: Any) -> None:
            try:
                body(context, *args, **options)
            except settings.UserError as refusal:
                raise Exit(f"error: {refusal}", refusal.exit_code) from None
            except Exit:
                raise
            except KeyboardInterrupt:
                raise Exit("\ninterrupted. See what it started: inv status   Stop that: inv down", 130) from None
            except _aws_errors() as error:
                from cluster.aws import aws_errors

                raise Exit(f"error: {aws_errors.explain(error)}", 1) from None

        return task(checked, positional=list(positional), help=texts)

    return decorate


def _aws_errors() -> Any:
    """What AWS's own library raises; it is imported where something has gone wrong."""
    from botocore.exceptions import BotoCoreError, ClientError

    return BotoCoreError, ClientError


def _job_options() -> list[str]:
    """What stands after --, word by word; invoke's own `remainder` has lost the quotes."""
    return sys.argv[sys.argv.index("--") + 1 :] if "--" in sys.argv else []


@verb()
def demo(context: Context) -> None:
    """The whole pipeline on this machine: data, training, serving, and the numbers that show that it works."""
    from demo import play

    play.play()
    print(f"next, in {settings.PROJECT}: ./inv chat   or: ./inv status   or: ./inv down")


@verb(message="one question; without it you converse until /quit", **TARGET)
def chat(context: Context, message: str = "", target: str = "local") -> None:
    """Talk to the served model; answers stream."""
    from cluster import chat as cluster_chat
    from cluster import status as cluster_status
    from cluster import targets

    connection = targets.get(target).connect()
    served = cluster_status.address(cluster_status.snapshot(connection), connection)
    cluster_chat.chat(f"{served}/v1", connection.job_variables, message)


@verb(**TARGET)
def doctor(context: Context, target: str = "local") -> None:
    """Check what can be known before anything is started; changes nothing."""
    from cluster import doctor as cluster_doctor
    from cluster import targets

    if not cluster_doctor.show(targets.get(target).doctor(), CONSOLE):
        raise Exit(f"error: some checks failed. Fix the problems marked ✗, then run: inv doctor --target {target}", 1)


@verb("model", model="a Hugging Face id or a folder; its configuration is all that is fetched", **TARGET)
def plan(context: Context, model: str, target: str = "local") -> None:
    """What a model takes to train and to serve: memory, A100s, hours; with --target aws dollars too. Starts nothing."""
    from cluster import targets
    from cluster.planner import plan as cluster_plan

    cluster_plan.plan(model, CONSOLE, targets.get(target).dollars_per_machine_hour())


@verb(**TARGET)
def prepare(context: Context, target: str = "local") -> None:
    """Make what the cluster stands on and what costs nothing: on AWS roles, group, bucket. `up` does it too."""
    from cluster import targets

    targets.get(target).prepare()


@verb(yes="agree to the price without being asked", **TARGET)
def up(context: Context, target: str = "local", yes: bool = False) -> None:
    """Start the cluster; when it is up already, say so."""
    from cluster import targets

    targets.get(target).up(yes)
    where = "" if target == "local" else f" --target {target}"
    print(f"next: inv submit{where} preprocess   or: inv status{where}   or: inv down{where}")


@verb()
def rehearse(context: Context) -> None:
    """Run the whole life of a cluster on an emulated AWS: up, fine-tuning on two A100 machines, down."""
    from cluster.emulator import sandbox

    sandbox.run_in_fresh_cloud("cluster.emulator.scenario")


@verb(
    seconds="how long each level of concurrency is measured",
    tokens="length of each answer",
    **TARGET,
)
def bench(context: Context, seconds: int = 10, tokens: int = 64, target: str = "local") -> None:
    """Measure the served model: time to the first token, between tokens, and throughput, with 1 to 32 clients."""
    from cluster import bench as cluster_bench
    from cluster import status as cluster_status
    from cluster import targets

    connection = targets.get(target).connect()
    served = cluster_status.address(cluster_status.snapshot(connection), connection)
    cluster_bench.bench(f"{served}/v1", connection.job_variables, cluster_bench.Load(seconds, tokens), CONSOLE)


@verb("job", job=f"one of: {', '.join(job_scripts.names())}", **VERBOSE, **TARGET)
def submit(context: Context, job: str, verbose: bool = False, target: str = "local") -> None:
    """Run a job on the cluster and follow its log; ends with the job's exit code."""
    _submit(job, verbose, target)


@verb(**TARGET)
def models(context: Context, target: str = "local") -> None:
    """Show the served models and their numbers. After `--`: change a canary's share, promote it, end a model."""
    _submit("models", False, target)


def _submit(job: str, verbose: bool, target: str) -> None:
    from cluster import targets

    options = _job_options()
    if not job_scripts.check(job, options, targets.profile(target)):
        return  # it was asked for help
    from cluster import submission  # imports Ray

    connection = targets.get(target).connect()
    job_id = submission.submit(connection, job, options)
    print(f"submitted {job_id}", flush=True)
    raise Exit(code=submission.follow(connection, job_id, verbose=verbose))


@verb(**TARGET)
def status(context: Context, target: str = "local") -> None:
    """Show nodes, resources, jobs and applications, and what is wrong."""
    from cluster import status as cluster_status
    from cluster import targets

    place = targets.get(target)
    cluster_status.show(cluster_status.snapshot(place.connect()), place.bill(), CONSOLE)


@verb(**JOB_ID, **VERBOSE, **TARGET)
def logs(context: Context, job: str = "", verbose: bool = False, target: str = "local") -> None:
    """Follow a job's log; ends with the job's exit code."""
    from cluster import submission, targets

    connection = targets.get(target).connect()
    raise Exit(code=submission.follow(connection, submission.find(connection, job), verbose=verbose))


@verb(**JOB_ID, **TARGET)
def stop(context: Context, job: str = "", target: str = "local") -> None:
    """Stop a job; one that has ended is left as it is."""
    from cluster import submission, targets

    connection = targets.get(target).connect()
    details = submission.stop(connection, submission.find(connection, job))
    print(f"{details.submission_id} is {details.status.value.lower()}")


@verb(command="what to run there; a shell for you when left out", **TARGET)
def ssh(context: Context, command: str = "", target: str = "local") -> None:
    """Go to the head, or run a command there."""
    from cluster import targets

    raise Exit(code=targets.get(target).shell(command))


@verb(runs="names of runs, with commas between; all when left out", **TARGET)
def report(context: Context, runs: str = "", target: str = "local") -> None:
    """Draw trainings beside each other, in results/report.html: losses, speed, checkpoints, restarts, cost, data."""
    from cluster import targets
    from cluster.common import prices
    from pipeline.training import report as training_report

    place = targets.get(target)
    os.environ |= place.files()
    price = functools.partial(prices.of_workers, place.dollars_per_machine_hour())
    training_report.draw([name.strip() for name in runs.split(",") if name.strip()], price, CONSOLE)


@verb(**TARGET)
def dashboard(context: Context, target: str = "local") -> None:
    """Show Ray's dashboard on this machine, through a tunnel where need be, until Ctrl-C."""
    from cluster import targets
    from cluster.local import TOKEN

    connection = targets.get(target).connect()
    told_by = f'inv ssh --target {target} --command "cat ~/.ray/auth_token"' if connection.forwarded else f"cat {TOKEN}"
    print(f"{connection.dashboard}   the token that it asks for: {told_by}")
    if connection.forwarded:
        print("the tunnel stays open until Ctrl-C", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()


@verb(**TARGET)
def down(context: Context, target: str = "local") -> None:
    """End the cluster, and prove that nothing of it is left."""
    from cluster import targets

    if left := targets.get(target).down():
        raise Exit(f"error: still there: {', '.join(left)}. Run again: inv down --target {target}", 1)


@verb()
def test(context: Context) -> None:
    """Lint, format, types and all tests of this project."""
    for command in ("ruff check", "ruff format --check", "pyrefly check", "pytest"):
        print(f"== {command}", flush=True)
        if context.run(f"python -m {command}", pty=False, warn=True).failed:
            raise Exit(f"error: `{command}` failed; its output is above", 1)


words.put_in_order(program)
