"""Fine-tunes a language model with the `Trainer` of transformers, as an example of your own Hugging Face script.

`fine_tune` is what a script for one GPU has. Its metrics, checkpoints and trained model are those of a run of this
project, because of `RunCallback` in raymill/training/hf_trainer.py. docs/huggingface.md says how to use a trainer of
TRL, DeepSpeed or FSDP.
"""

from raymill.job import Job, connect
from raymill.training.options import HFOptions

JOB = Job(HFOptions, "train", "hf")  # reads the options, before the slow imports below

import json
from functools import partial
from typing import Any

import torch
from ray.train.torch import TorchConfig, TorchTrainer
from transformers import PrinterCallback, Trainer

from raymill import code_identity
from raymill.errors import UserError
from raymill.ray_support import capacity, gang, job_lease, ray_logging
from raymill.training import hf_trainer, model_io, preflight, transport
from raymill.training.hf_trainer import PackedDataset, RunCallback
from raymill.training.optimizers import BETAS
from raymill.training.runtimes import ray_train
from raymill.training.runtimes.ray_train import RayTrainRuntime
from raymill.training.runtimes.runtime import Runtime
from raymill.training.schedule import check_batches, peak_learning_rate, spread


def main(options: HFOptions) -> None:
    """Fine-tune a language model on packed rows with the Trainer of transformers."""
    options = preflight.with_steps(preflight.with_absolute_paths(options))
    check_batches(options.global_batch_rows, options.micro_batch_rows, options.min_workers, options.max_workers)
    hf_trainer.check_arguments(options.arguments, fixed(options, options.max_workers))
    identity = preflight.check_packed(options)
    connect()
    ray_logging.driver()
    capacity.refuse_too_many_workers(options.min_workers, options.worker_resources)
    paths = {"model": options.model, "data": options.data, "output": options.output}
    capacity.refuse_private_paths(paths, options.shared_paths, "train")
    with job_lease.hold(f"{options.output}/{options.name}", "--name"):  # many: no other job may write to this folder
        own = {"arguments": json.dumps(options.arguments), "code": code_identity.name(fine_tune)}
        preflight.claim(options, identity | {"launcher": "Ray Train"} | own)
        ray_train.check_list_of_checkpoints(options)
        trainer = TorchTrainer(
            partial(train, options),
            torch_config=TorchConfig(backend=torch.distributed.get_default_backend_for_device(options.device)),
            scaling_config=gang.scaling(options),
            run_config=ray_train.run_config(options),
        )
        failure = trainer.fit().return_value
    if failure:
        raise UserError(failure)
    print(f"the trained model is in {options.output}/{options.name}/model", flush=True)


def train(options: HFOptions) -> str | None:
    """Train in one worker. All workers run this at the same time. Return why the workers cannot train, or None."""
    ray_logging.worker()
    runtime = RayTrainRuntime(options.device)
    try:  # many: the network between machines can be slow without an error
        transport.require_efa(runtime.device, runtime.world_size, runtime.local_world_size)
        fine_tune(model_io.with_supported_precision(options, runtime.device), runtime)
    except UserError as error:
        return str(error)  # Ray would start the workers again if they raised it
    return None


def fine_tune(options: HFOptions, runtime: Runtime) -> None:
    """Train from the newest complete checkpoint or from the base model, and export the trained model."""
    # first, because with ZeRO-3 it decides how the model is loaded
    arguments = hf_trainer.training_arguments(
        defaults(options) | options.arguments,
        # many: the Trainer writes checkpoints to this machine, and the callback stores them in the run's folder
        fixed(options, runtime.world_size) | {"output_dir": f"{runtime.scratch}-trainer"},
    )
    model = model_io.load_model(options)  # AutoModelForCausalLM.from_pretrained, with the options in [train]
    hf_trainer.keep_documents_apart(model)
    callback = RunCallback(options, runtime, model)
    trainer = Trainer(
        model,
        arguments,
        train_dataset=PackedDataset(options, runtime.world_size),
        data_collator=PackedDataset.collate,
        callbacks=[callback],
    )
    trainer.remove_callback(PrinterCallback)  # the callback prints the progress
    trainer.train(resume_from_checkpoint=callback.newest_checkpoint())
    callback.finish()


def fixed(options: HFOptions, workers: int) -> dict[str, Any]:
    """Return the TrainingArguments that follow from [train]. The arguments in [hf] cannot change them."""
    rows, micro_rows = options.global_batch_rows, options.micro_batch_rows
    return {
        "max_steps": options.steps,
        "per_device_train_batch_size": micro_rows,
        # many: the global batch does not depend on the number of workers
        "gradient_accumulation_steps": spread(rows, micro_rows, workers).accumulation,
        "learning_rate": peak_learning_rate(options.learning_rate, rows, options.reference_batch_rows),
        "warmup_steps": options.warmup_steps,
        "weight_decay": options.weight_decay,
        "max_grad_norm": options.max_grad_norm,
        "bf16": options.precision == "bf16",
        "seed": options.seed,
        "use_cpu": options.device == "cpu",
    }


def defaults(options: HFOptions) -> dict[str, Any]:
    """Return the TrainingArguments that the arguments in [hf] can change."""
    schedule = {
        "lr_scheduler_type": "cosine_warmup_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr_rate": options.min_lr_ratio},
    }
    return {
        "adam_beta2": BETAS[1],
        "ddp_find_unused_parameters": False,  # many: the search would take time in each step
        "dataloader_pin_memory": options.device == "cuda",
        **({} if "lr_scheduler_type" in options.arguments else schedule),
    }


JOB.run(main)
