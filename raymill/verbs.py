"""The verbs of the library: inv VERB [--target TARGET]. tasks.py takes them over and may add others."""

import contextlib
import functools
import os
import shlex
import sys
import threading
from collections.abc import Callable
from typing import Any

from invoke import Collection, Context, Exit, task
from invoke.main import program

from raymill import command_line, environment, job_scripts, network, old_layout, sections, settings
from raymill.console import Console
from raymill.errors import UserError
from raymill.job_context import JobContext
from raymill.printable import printable

# each verb imports only what it needs, because all imports together take seconds
CONSOLE = Console()
TARGET = {"target": "where the cluster runs: local (this machine), rehearsal (AWS emulated on this machine) or aws"}
OWNER = {"owner": "agree to use the cluster of this owner, as the verb names it; default: ask, unless it is yours"}
VERBOSE = {"verbose": "also show Ray's messages"}
JOB_ID = {"job": "id as in `inv status`; default: your latest job"}


def verb(*positional: str, **texts: str) -> Callable[..., Any]:
    """Turn a function into an invoke task that prints errors as one sentence on stderr, without a traceback."""

    def decorate(body: Callable[..., None]) -> Any:
        @functools.wraps(body)
        def checked(context: Context, *args: Any, **options: Any) -> None:
            try:
                os.environ |= JobContext(
                    inv_target=options.get("target", "local")
                ).variables()  # for commands in messages, also of jobs
                if body.__name__ != "doctor":  # which lists a wrong section with all other problems
                    _check_sections(is_fatal=body.__name__ != "down")  # which must end what costs money
                body(context, *args, **options)
            except UserError as error:
                raise Exit(printable(f"error: {error}"), error.exit_code) from None
            except Exit:
                raise
            except KeyboardInterrupt:
                started, end = settings.inv("status"), settings.inv("down")
                raise Exit(f"\ninterrupted. See what was started: {started}   End it: {end}", 130) from None
            except _aws_errors() as error:
                from raymill.aws import aws_errors

                raise Exit(printable(f"error: {aws_errors.explain(error)}"), 1) from None

        return task(checked, positional=list(positional), help=texts)

    return decorate


def _check_sections(*, is_fatal: bool) -> None:
    try:
        sections.check()
    except UserError as error:
        if is_fatal:
            raise
        print(printable(f"warning: {error}"), file=sys.stderr)


def _aws_errors() -> Any:
    """Return the exceptions of botocore, which is imported only after an error."""
    from botocore.exceptions import BotoCoreError, ClientError

    return BotoCoreError, ClientError


def _job_options() -> list[str]:
    """Return the words after `--`. invoke's own `remainder` joins them into one string."""
    return sys.argv[sys.argv.index("--") + 1 :] if "--" in sys.argv else []


@verb()
def demo(context: Context) -> None:
    """Run the whole pipeline on this machine: data, training, serving, and a check of the results."""
    from raymill.demo import play

    play.play()
    print(f"next, in {settings.PROJECT}: ./inv chat   or: ./inv status   or: ./inv down")


@verb(message="ask one question; default: chat until /quit", **TARGET)
def chat(context: Context, message: str = "", target: str = "local") -> None:
    """Chat with the served model."""
    from raymill import status as cluster_status
    from raymill import targets
    from raymill.clients import chat as cluster_chat

    connection = targets.get(target).connect()
    served = cluster_status.address(cluster_status.snapshot(connection), connection)
    cluster_chat.chat(f"{served}/v1", connection.job_variables, message)


@verb(**TARGET)
def doctor(context: Context, target: str = "local") -> None:
    """Check everything that can be checked before the cluster starts. Changes nothing."""
    from raymill import doctor as cluster_doctor
    from raymill import targets

    if not cluster_doctor.show(targets.get(target).doctor(), CONSOLE):
        raise Exit(f"error: some checks failed. Fix the problems marked ✗, then run: inv doctor --target {target}", 1)


@verb(
    "model",
    model="Hugging Face id or folder; only its configuration is downloaded",
    write="write the recommended settings to settings.toml",
    **TARGET,
)
def plan(context: Context, model: str, target: str = "local", write: bool = False) -> None:
    """Estimate the memory, GPUs, hours and, with --target aws, dollars to train and serve a model. Runs no job."""
    from raymill import targets
    from raymill.planner import plan as cluster_plan

    cluster_plan.plan(model, CONSOLE, targets.get(target).dollars_per_instance_hour, writes=write)


@verb("job", job=f"one of: {', '.join(job_scripts.fine_tuning())}")
def fit(context: Context, job: str) -> None:
    """Measure the GPU memory of a fine-tuning job on a fake GPU, without AWS. Job options come after --."""
    from raymill.fake_gpu import fit as fake_gpu_fit

    options = _job_options()
    if job_scripts.check(job, options, "cluster"):
        fake_gpu_fit.fit(job, options, CONSOLE)


@verb(**OWNER, **TARGET)
def prepare(context: Context, owner: str = "", target: str = "local") -> None:
    """Create the security group, roles and bucket that the cluster needs on AWS. `up` does this too."""
    from raymill import targets

    targets.get(target).prepare(owner)


@verb(
    instances="number of instances; default: max_workers of cluster.yaml",
    days="1 to 14, or a multiple of 7 up to 182",
    instance_type="default: the GPU type of cluster.yaml",
    earliest="first day, as YYYY-MM-DD",
    latest="day by which it ends, as YYYY-MM-DD",
    buy="id of an offering to buy",
    yes="accept the price without a prompt",
    **TARGET,
)
def capacity(
    context: Context,
    instances: int = 0,
    days: int = 1,
    instance_type: str = "",
    earliest: str = "",
    latest: str = "",
    buy: str = "",
    yes: bool = False,
    target: str = "aws",
) -> None:
    """Search for Capacity Blocks: GPU instances that AWS reserves for days, paid in advance. With --buy, buy one."""
    from raymill import targets
    from raymill.target import WantedBlock

    chosen = targets.get(target)
    if buy:
        chosen.buy_capacity(buy, yes)
    else:
        chosen.show_capacity(
            WantedBlock(instances=instances, days=days, instance_type=instance_type, earliest=earliest, latest=latest)
        )


@verb(
    yes="accept the price without a prompt",
    wait="wait until the reservation in [cluster.capacity] starts",
    **OWNER,
    **TARGET,
)
def up(context: Context, target: str = "local", yes: bool = False, wait: bool = False, owner: str = "") -> None:
    """Start the cluster. On AWS, also apply changed settings to a running cluster."""
    from raymill import targets

    targets.get(target).up(yes, wait, owner)
    print(f"next: {settings.inv('submit preprocess')}   or: {settings.inv('status')}   or: {settings.inv('down')}")


@verb(
    hours="hours since the start of the head; default: no change",
    dollars="dollars for all instances since then; default: no change",
    idle_hours="hours without a job and without a request, or 0 for any number; default: no change",
    yes="accept the price without a prompt",
    **TARGET,
)
def limits(
    context: Context,
    hours: str = "",
    dollars: str = "",
    idle_hours: str = "",
    yes: bool = False,
    target: str = "aws",
) -> None:
    """Show the limits of the running cluster, or change those given as options. Running jobs continue."""
    from raymill import targets

    chosen = targets.get(target)
    given = {"hours": hours, "dollars": dollars, "idle_hours": idle_hours}
    if changed := {name: value for name, value in given.items() if value}:
        chosen.change_limits(changed, yes)
    else:
        chosen.show_limits()


@verb(**TARGET)
def bake(context: Context, target: str = "aws") -> None:
    """Store the head's packages in the bucket. New nodes then unpack them, which is faster than installing them."""
    from raymill import targets

    targets.get(target).bake()


@verb()
def rehearse(context: Context) -> None:
    """Run a cluster's full life cycle on an emulated AWS: up, training on two GPU instances, down."""
    from raymill.emulator import sandbox

    sandbox.run_in_fresh_cloud("raymill.emulator.scenario")


@verb(
    seconds="seconds per level of concurrency",
    tokens="tokens per answer",
    **TARGET,
)
def bench(context: Context, seconds: int = 10, tokens: int = 64, target: str = "local") -> None:
    """Measure the latency and throughput of the served model with 1 to 32 clients."""
    from raymill import status as cluster_status
    from raymill import targets
    from raymill.clients import bench as cluster_bench

    connection = targets.get(target).connect()
    served = cluster_status.address(cluster_status.snapshot(connection), connection)
    cluster_bench.bench(f"{served}/v1", connection.job_variables, cluster_bench.Load(seconds, tokens), CONSOLE)


@verb(
    "tasks",
    tasks="comma-separated names of tasks, such as gsm8k,ifeval",
    model="name of a served model; default: the main model",
    completions="use /v1/completions without a chat template: for base models, and for tasks that compare answers",
    write_questions="only write the questions to a file, to keep them out of the training data",
    **TARGET,
)
def lm_eval(
    context: Context,
    tasks: str,
    model: str = "",
    completions: bool = False,
    write_questions: bool = False,
    target: str = "local",
) -> None:
    """Run tasks of the lm-evaluation-harness against the served model. lm-eval's own options come after --."""
    from raymill import status as cluster_status
    from raymill import targets
    from raymill.clients import lm_eval as cluster_lm_eval

    request = cluster_lm_eval.Request(tasks, model, completions, tuple(_job_options()))
    if write_questions:
        cluster_lm_eval.write_questions(request)
        return
    chosen = targets.get(target)
    connection = chosen.connect()
    served = cluster_status.address(cluster_status.snapshot(connection), connection)
    os.environ |= chosen.storage_variables()
    cluster_lm_eval.run(f"{served}/v1", connection.job_variables, request, CONSOLE)


@verb("job", job=f"one of: {', '.join(job_scripts.names())}", **VERBOSE, **TARGET)
def submit(context: Context, job: str, verbose: bool = False, target: str = "local") -> None:
    """Run a job on the cluster and follow its log. Exits with the job's exit code."""
    _submit(job, verbose, target)


@verb(**TARGET)
def models(context: Context, target: str = "local") -> None:
    """Show the served models and their metrics. With options after `--`, change or end a canary, or stop a model."""
    _submit("models", False, target)


def _submit(job: str, verbose: bool, target: str) -> None:
    from raymill import targets

    options = _job_options()
    if not job_scripts.check(job, options, targets.profile(target)):
        return  # the job has printed its help
    if target == "aws" and job in job_scripts.fine_tuning():
        from raymill.fake_gpu import fit as fake_gpu_fit

        print(fake_gpu_fit.last_result(job, options), flush=True)
    from raymill import submission  # imports Ray

    connection = targets.get(target).connect()
    job_id = submission.submit(connection, job, options)
    print(f"submitted {job_id}", flush=True)
    raise Exit(code=submission.follow(connection, job_id, verbose=verbose))


@verb(past="show the jobs of all clusters instead, also of those that have ended", **TARGET)
def status(context: Context, past: bool = False, target: str = "local") -> None:
    """Show nodes, resources, jobs, applications and problems."""
    from raymill import status as cluster_status
    from raymill import targets

    chosen = targets.get(target)
    if past:
        cluster_status.show_past(chosen.past_jobs(), CONSOLE)
        return
    cluster_status.show(cluster_status.snapshot(chosen.connect()), chosen.cloud_status(), CONSOLE)


@verb(
    days="days until now; default: 7",
    since="start of the period, as YYYY-MM-DD",
    **TARGET,
)
def usage(context: Context, days: int = 0, since: str = "", target: str = "local") -> None:
    """Show the requests and tokens of each API key and model, also of clusters that have ended."""
    from raymill import targets
    from raymill import usage as cluster_usage

    start = cluster_usage.start(days, since)
    cluster_usage.show(targets.get(target).access_logs(start), start, CONSOLE)


@verb(
    "action",
    action="list, add or revoke",
    name="name of the person or program that gets the key",
    days="days for which a new key is valid; default: until it is revoked",
    models="comma-separated models that a new key may use; default: all",
    **TARGET,
)
def keys(context: Context, action: str, name: str = "", days: int = 0, models: str = "", target: str = "local") -> None:
    """List the API keys of other people, add one, or revoke one: inv keys [list|add NAME|revoke NAME]."""
    from raymill import keys as cluster_keys
    from raymill import targets

    stores = targets.get(target).key_stores()
    if action == "list":
        cluster_keys.show(stores[0], CONSOLE)
    elif action == "add":
        print(cluster_keys.add(stores, name, days, models))
        print("this is the only time that the key is shown. It is valid within ten seconds", file=sys.stderr)
    elif action == "revoke":
        cluster_keys.revoke(stores, name)
        print(f"the key of {name} is no longer valid within ten seconds")
    else:
        raise UserError(f"keys has no action {action!r}. Run: {settings.inv('keys')} list, add NAME or revoke NAME")


@verb(**JOB_ID, **VERBOSE, **TARGET)
def logs(context: Context, job: str = "", verbose: bool = False, target: str = "local") -> None:
    """Follow the log of a job. Exits with the job's exit code. Without the job's cluster, print the bucket's copy."""
    from raymill import submission, targets
    from raymill.target import NotOnCluster

    chosen = targets.get(target)
    try:
        connection = chosen.connect()
        job_id = submission.find(connection, job)
    except NotOnCluster:
        if (log := chosen.past_log(job)) is None:
            raise
        raise Exit(code=submission.print_past(log, verbose=verbose)) from None
    raise Exit(code=submission.follow(connection, job_id, verbose=verbose))


@verb(**JOB_ID, **TARGET)
def stop(context: Context, job: str = "", target: str = "local") -> None:
    """Stop a job."""
    from raymill import submission, targets

    connection = targets.get(target).connect()
    details = submission.stop(connection, submission.find(connection, job))
    print(f"{details.submission_id} is {details.status.value.lower()}")


@verb(
    command="command to run; default: a shell",
    config="instead, add the head to your ssh configuration, for VS Code and other programs",
    **TARGET,
)
def ssh(context: Context, command: str = "", config: bool = False, target: str = "local") -> None:
    """Open a shell on the head, or run a command there."""
    from raymill import targets

    chosen = targets.get(target)
    if config:
        chosen.configure_ssh()
    else:
        raise Exit(code=chosen.shell(command))


@verb(**TARGET)
def notebook(context: Context, target: str = "aws") -> None:
    """Start JupyterLab on the head, and keep a tunnel to it open until Ctrl-C. Notebooks are lost at `inv down`."""
    from raymill import targets

    print(f"JupyterLab: {targets.get(target).notebook()}")
    _wait_for_ctrl_c("JupyterLab and the tunnel end with Ctrl-C; the files in ~/notebooks stay until `inv down`")


@verb(runs="comma-separated names of runs; default: all", **TARGET)
def report(context: Context, runs: str = "", target: str = "local") -> None:
    """Compare training runs in results/report.html: losses, speed, checkpoints, restarts, cost and data."""
    from raymill import targets
    from raymill.common import prices
    from raymill.training import report as training_report

    chosen = targets.get(target)
    os.environ |= chosen.storage_variables()
    price = functools.partial(prices.of_workers, chosen.dollars_per_instance_hour())
    training_report.draw([name.strip() for name in runs.split(",") if name.strip()], price, CONSOLE)


@verb(folder="a folder that preprocess wrote; default: output in [preprocess]", **TARGET)
def data(context: Context, folder: str = "", target: str = "local") -> None:
    """Show what preprocess made in results/data.html: documents, lengths, languages, and the rows left out."""
    from raymill import settings, targets
    from raymill.data import report as data_report
    from raymill.data.options import PreprocessOptions

    os.environ |= targets.get(target).storage_variables()
    output = folder or settings.load(PreprocessOptions, "preprocess").output
    data_report.draw(settings.resolve(output), CONSOLE)


@verb(
    "run",
    run="name of the run",
    to="repository on the hub, as OWNER/NAME",
    license="license of your model, as an id such as apache-2.0; the base model's license limits your choice",
    public="create a public repository; default: a private one",
    **TARGET,
)
def publish(context: Context, run: str, to: str, license_: str, public: bool = False, target: str = "local") -> None:
    """Upload the model of a training run to the Hugging Face hub, with a model card: data, settings, results."""
    from raymill import publish as cluster_publish
    from raymill import targets

    os.environ |= targets.get(target).storage_variables()
    print(cluster_publish.publish(run, to, license_, public=public))


@verb(**TARGET)
def dashboard(context: Context, target: str = "local") -> None:
    """Show the address of Ray's dashboard. Keep the tunnel to a remote cluster open until Ctrl-C."""
    from raymill import targets
    from raymill.local.state import TOKEN_FILE

    connection = targets.get(target).connect()
    is_remote = bool(connection.forwarded_ports)
    command = f'inv ssh --target {target} --command "cat ~/.ray/auth_token"' if is_remote else f"cat {TOKEN_FILE}"
    print(f"{connection.dashboard}   It asks for a token. To show the token, run: {command}")
    if is_remote:
        _wait_for_ctrl_c("the tunnel stays open until Ctrl-C")


def _wait_for_ctrl_c(note: str) -> None:
    print(note, flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        threading.Event().wait()


@verb(**TARGET)
def metrics(context: Context, target: str = "local") -> None:
    """Collect the cluster's metrics with Prometheus until Ctrl-C."""
    from raymill import prometheus, targets

    prometheus.run(targets.get(target).connect())


@verb(drain="seconds that running answers of served models get; 0: end them at once", **OWNER, **TARGET)
def down(context: Context, drain: int = 20, owner: str = "", target: str = "local") -> None:
    """Stop the cluster, and check that nothing is left behind. On AWS, the bucket is kept."""
    from raymill import targets

    if left := targets.get(target).down(owner, drain):
        raise Exit(f"error: left behind: {', '.join(left)}. Run again: inv down --target {target}", 1)


@verb(all="also ask a trained model with vLLM, and run the rehearsal: 6 minutes on 2 cores")
def test(context: Context, all_: bool = False) -> None:  # noqa: PT028 -- a verb, not a test
    """Check style, formatting and types, and test your settings, jobs and cluster files, and one training run."""
    tests = "pytest" if all_ else 'pytest -m "not slow"'
    for command in ("ruff check", "ruff format --check", "pyrefly check", tests):
        print(f"== {command}", flush=True)
        if context.run(f"python -m {command}", pty=False, warn=True).failed:
            raise Exit(f"error: `{command}` failed. Its output is above", 1)


@verb()
def upgrade(context: Context) -> None:
    """Merge the changes of this project's template into the project, and run the quick tests. Needs git."""
    from raymill import upgrade as cluster_upgrade

    if not cluster_upgrade.upgrade():
        return
    if context.run(f"{shlex.quote(str(environment.LAUNCHER))} test", pty=False, warn=True).failed:  # with the new code
        raise Exit(f"error: the tests fail after the upgrade. Fix them, or undo it: {cluster_upgrade.UNDO}", 1)
    print("clusters keep their old packages until `inv down` and `inv up`")
    print(f"next: git diff HEAD   then: {cluster_upgrade.COMMIT}")


def start(module: str) -> None:
    """Prepare this process for a verb of the module, and check the command line, before invoke reads it."""
    network.keep_to_loopback()
    if notes := list(old_layout.notes()):
        notes.append("you will see these notes until you have made these changes. Then run: inv test")
        print("\n".join(printable(f"note: {note}") for note in notes), file=sys.stderr)
    command_line.normalize(program, Collection.from_module(sys.modules[module]))
