"""Runs the trainer under Ray Train: the driver, which starts the workers, and the `Runtime` in each worker."""

import hashlib
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from pyarrow.fs import FileSelector
from ray.train import (
    Checkpoint,
    CheckpointConfig,
    CheckpointUploadMode,
    FailureConfig,
    LoggingConfig,
    RunConfig,
    ScalingConfig,
    WorkerGroupError,
)
from ray.train.torch import TorchConfig, TorchTrainer, get_device, prepare_model
from ray.tune.integration.ray_train import TuneReportCallback
from ray.util.metrics import Gauge
from torch import nn

from raymill import code_identity, job, state_files
from raymill.data import row_formats, row_sources, streaming
from raymill.errors import UserError
from raymill.ray_support import capacity, gang, job_lease, ray_logging
from raymill.ray_support.private.train import LIST_OF_CHECKPOINTS, is_in_trial
from raymill.state_files import DamagedFile
from raymill.training import failures, preflight, storage, transport, weights_check
from raymill.training.options import TrainOptions
from raymill.training.runtimes.runtime import SCORE, Metrics, WriteCheckpoint
from raymill.training.schedule import check_batches
from raymill.training.strategy import MakeStrategy
from raymill.training.trainer import train

SPOT_NOTICE_S = 120
"""How long before it takes back a spot machine AWS gives notice."""


class RayTrainRuntime:
    """The `Runtime` of a Ray Train worker."""

    def __init__(self, device: str) -> None:
        context = ray.train.get_context()
        self.rank = context.get_world_rank()
        self.world_size = context.get_world_size()
        self.local_world_size = context.get_local_world_size()
        self.device = torch.device("cpu") if device == "cpu" else get_device()
        self._storage = context.get_storage()
        reported = ray.train.get_all_reported_checkpoints()
        self._names = {Path(report.checkpoint.path).name for report in reported}
        self._stored = threading.Event()
        self._stored.set()
        self._preempted_nodes: set[str] = set()
        self._noted_slow_storage = False
        self._run = context.get_experiment_name()
        self._gauges: dict[str, Gauge] = {}
        run_id = hashlib.sha256(self._storage.experiment_fs_path.encode()).hexdigest()[:12]
        self.scratch = Path(tempfile.gettempdir(), f"checkpoint-{run_id}", f"rank-{self.rank}")
        self._delete_incomplete()

    def wrap(self, model: nn.Module) -> nn.Module:
        options = {"gradient_as_bucket_view": True}  # no second copy of the gradients
        return prepare_model(model, move_to_device=self.device, parallel_strategy_kwargs=options)

    def show_metrics(self, metrics: Metrics) -> None:
        """Set a gauge of Ray for each metric. Prometheus adds the prefix `ray_` to its name."""
        for name, value in metrics.items():
            if name not in self._gauges:
                description = f"{name} of the last logged step"
                self._gauges[name] = Gauge(f"finetune_{name.replace('/', '_')}", description, tag_keys=("run",))
            self._gauges[name].set(value, {"run": self._run})

    def report(self, metrics: Metrics, write: WriteCheckpoint) -> None:
        """Start storing a checkpoint. Ray merges the ranks' folders, and keeps the best and the last checkpoint."""
        self._stored.clear()
        self.scratch.mkdir(parents=True)
        started = time.monotonic()
        is_written = False

        def store(checkpoint: Checkpoint, name: str) -> Checkpoint:
            nonlocal is_written
            if not is_written:  # Ray calls `store` again if S3 is busy
                write(self.scratch)
                is_written = True
            stored = self._storage.persist_current_checkpoint(checkpoint, name)
            shutil.rmtree(self.scratch)
            self._note_slow_storage(time.monotonic() - started)
            self._stored.set()
            return stored

        ray.train.report(
            metrics,
            checkpoint=Checkpoint.from_directory(self.scratch),
            checkpoint_dir_name=self._new_name(int(metrics["step"])),
            checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
            delete_local_checkpoint_after_upload=False,  # the next checkpoint may already be in that folder
            checkpoint_upload_fn=store,
        )

    def _note_slow_storage(self, seconds: float) -> None:
        """Print a note if a checkpoint takes longer to store than AWS's notice for a spot machine. Print it once."""
        if self.rank == 0 and seconds > SPOT_NOTICE_S and not self._noted_slow_storage:
            self._noted_slow_storage = True
            print(
                f"note: a checkpoint takes {seconds:.0f} s to store, but AWS takes back a spot machine "
                f"{SPOT_NOTICE_S} s after its notice, so training would resume from the checkpoint before. With a "
                "smaller checkpoint_every, it would repeat fewer steps.",
                flush=True,
            )

    def wait(self) -> None:
        self._stored.wait()

    def checkpoints(self, step: int | None = None) -> Iterator[Path]:
        all_steps = ray.train.get_all_reported_checkpoints()  # waits until Ray has listed what this rank reported
        for reported in sorted(all_steps, key=lambda checkpoint: checkpoint.metrics["step"], reverse=True):
            if step in (None, reported.metrics["step"]):
                with reported.checkpoint.as_directory() as folder:
                    yield Path(folder)

    def should_stop(self) -> bool:
        """Return False, because Ray ends workers without asking. The next start resumes from the last checkpoint."""
        return False

    def should_save(self) -> bool:
        """Return True once for each node of the run that AWS is about to take back."""
        notice = ray.train.get_preemption_info()
        nodes = set(notice.preempted_node_ids) if notice else set()
        is_new = not nodes <= self._preempted_nodes
        self._preempted_nodes |= nodes
        return is_new

    def _new_name(self, step: int) -> str:
        """Return a folder name that this run has not used yet.

        Ray also counts incomplete checkpoints, and deletes checkpoints by name. A new checkpoint with an old name might
        be deleted.
        """
        name = f"step-{step:08d}"
        while name in self._names:
            name += "-again"
        self._names.add(name)
        return name

    def _delete_incomplete(self) -> None:
        """Delete the incomplete checkpoints that killed workers left on this node's disk and in the run's folder."""
        shutil.rmtree(self.scratch.parent, ignore_errors=True)  # the parts of all ranks that were on this node
        if self.rank == 0:
            files = self._storage.storage_filesystem
            for entry in files.get_file_info(FileSelector(self._storage.experiment_fs_path)):
                if entry.base_name.startswith("step-") and entry.base_name not in self._names:
                    files.delete_dir(entry.path)


def fit(options: TrainOptions, make_strategy: MakeStrategy) -> None:
    """Check options, data, model and cluster, start the workers, and wait for the trained model.

    Raises:
        UserError: options, data, model and cluster do not match, or training failed.
    """
    options = preflight.with_steps(preflight.with_absolute_paths(options))
    check_batches(options.global_batch_rows, options.micro_batch_rows, options.min_workers, options.max_workers)
    stream = streaming.find_input(options.model) if options.stream else None
    objective = make_strategy.make_objective(options)
    identity = _check_stream(options, stream) if stream else preflight.check_packed(options, objective)
    job.connect()
    ray_logging.driver()
    _check_cluster(options, stream)
    with job_lease.hold(f"{options.output}/{options.name}", "--name"):
        preflight.claim(options, identity | {"launcher": "Ray Train"} | code_identity.identify(make_strategy))
        check_list_of_checkpoints(options)
        storage.delete_file(_failure_file(options))
        trainer = _torch_trainer(options, make_strategy, stream, gang.scaling(options))
        try:
            failure = trainer.fit().return_value
        except WorkerGroupError:
            failure = storage.read_text(_failure_file(options))
            if not failure:
                raise
        storage.delete_file(_failure_file(options))
    if failure:
        sentence, _, details = failure.partition("\n")
        print(details, end="", file=sys.stderr, flush=True)
        raise UserError(sentence)
    print(f"the trained model is in {options.output}/{options.name}/model", flush=True)


def _check_stream(options: TrainOptions, stream: streaming.StreamInput) -> preflight.Identity:
    print(streaming.NOTICE, flush=True)
    config = preflight.load_config(options.model)
    preflight.check_context(options.model, config, stream.tokenizer.sequence_length)
    weights_check.check(options.model)
    names = ", ".join(source.name for source in stream.sources)
    found = row_formats.identity(stream.sources[0].formats)
    formats = "" if found == row_formats.PUBLISHED else f" in the formats {found}"
    return preflight.identify(options, config, f"stream of {names}{formats}")


def check_list_of_checkpoints(options: TrainOptions) -> None:
    """Refuse a run with a damaged list of checkpoints, which Ray Train writes after each checkpoint and reads first."""
    file = f"{options.output}/{options.name}/{LIST_OF_CHECKPOINTS}"
    remedy = "Ray Train finds no checkpoint without it. Start over with --fresh, or use another --name."
    if (text := storage.read_text(file)) is not None:
        state_files.parse_or_refuse(text, dict[str, Any], file, remedy)


def _check_cluster(options: TrainOptions, stream: streaming.StreamInput | None) -> None:
    capacity.refuse_too_many_workers(options.min_workers, options.worker_resources)
    paths = {"model": options.model, "output": options.output} | ({} if stream else {"data": options.data})
    capacity.refuse_private_paths(paths, options.shared_paths, "train")
    for setting, name in row_sources.names_by_setting(stream.sources) if stream else ():
        capacity.refuse_private_paths({setting: name}, options.shared_paths, "preprocess")
    if stream:
        capacity.refuse_workers_on_every_cpu(options.max_workers * options.cpus_per_worker)


def _torch_trainer(
    options: TrainOptions, make_strategy: MakeStrategy, stream: streaming.StreamInput | None, scaling: ScalingConfig
) -> TorchTrainer:
    return TorchTrainer(
        _train_worker,
        # passed by reference, so that Ray's controller does not import torch and transformers to unpack the values
        train_loop_config={"arguments": ray.put((options, make_strategy, stream))},
        datasets={"train": streaming.dataset(stream)} if stream else None,
        torch_config=TorchConfig(backend=torch.distributed.get_default_backend_for_device(options.device)),
        scaling_config=scaling,
        run_config=run_config(options),
    )


def run_config(options: TrainOptions) -> RunConfig:
    """Return where a run is stored, which checkpoints are kept, and how often dead workers are replaced."""
    return RunConfig(
        name=options.name,
        storage_path=options.output,
        callbacks=[TuneReportCallback()] if is_in_trial() else [],
        logging_config=LoggingConfig(log_level="WARNING"),  # the trainer prints its own progress
        failure_config=FailureConfig(max_failures=options.max_failures),
        worker_runtime_env={"env_vars": transport.LOG_VARIABLES} if options.device == "cuda" else None,
        checkpoint_config=CheckpointConfig(
            num_to_keep=options.keep_checkpoints,
            checkpoint_score_attribute=SCORE,
            checkpoint_score_order="min",
        ),
    )


def _failure_file(options: TrainOptions) -> str:
    """Return the location of the file that describes a final failure. The driver deletes the file after reading it."""
    return f"{options.output}/{options.name}/failure.txt"


def _train_worker(config: dict[str, Any]) -> str | None:
    """Train in one worker. Return the message of a final failure, because Ray replaces workers that raise an error.

    If only this worker failed, the others wait for it in a collective, so this worker has to raise its error. Ray then
    replaces all workers, and the new ones return the message that they find in the failure file.
    """
    ray_logging.worker()
    options, make_strategy, stream = ray.get(config["arguments"])
    if failure := storage.read_text(_failure_file(options)):
        return failure
    runtime = RayTrainRuntime(options.device)
    source = streaming.StreamSource(stream, options.global_batch_rows // runtime.world_size) if stream else None
    try:
        transport.require_efa(runtime.device, runtime.world_size, runtime.local_world_size)
        train(options, runtime, make_strategy, source)
    except DamagedFile as error:  # perhaps only this worker reads the file
        storage.write_text(_failure_file(options), str(error))
        raise
    except UserError as error:  # all workers raise it
        return str(error)
    except Exception as error:
        if failures.is_final(error):
            storage.write_text(_failure_file(options), failures.describe(error, options))
        raise
    return None
