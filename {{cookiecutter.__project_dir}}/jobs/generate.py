"""Answer many prompts with vLLM engines on Ray Data. At temperature 0, the answers equal the server's.

Each run answers only the rows that are new or have changed since an earlier run.
"""

from raymill.generation.options import GenerateOptions
from raymill.job import Job, connect

JOB = Job(GenerateOptions, "generate")  # reads the options, before the slow imports below

from raymill import settings
from raymill.data import row_sources
from raymill.generation import generation
from raymill.generation.answer_folder import AnswerFolder
from raymill.generation.prompts import PromptTokenizer
from raymill.ray_support import capacity, job_lease
from raymill.serving import preflight
from raymill.serving.options import ServeOptions


def main(options: GenerateOptions) -> None:
    """Answer the prompts of all rows that are not answered yet. Bad rows are saved, each with the reason."""
    serving = settings.load(ServeOptions, "serve")
    serving = serving.model_copy(update={"model": options.model or serving.model})
    preflight.check_model(serving)
    source = row_sources.find(settings.resolve(options.input), "generate")
    tokenizer = PromptTokenizer(serving.model, options.id_column, serving.max_model_len, options.skip_ids)
    connect(log_to_driver=False)  # vLLM prints pages of messages, which are also in Ray's log files
    output = AnswerFolder(settings.resolve(options.output))
    _check_cluster(options, serving, source.name, output.uri)
    with job_lease.hold(output.uri, "--output"):
        answered = output.begin(generation.recipe(options, serving), options.overwrite)
        generation.answer_remaining(source, answered, tokenizer, output, options, serving)
        generation.print_summary(output)


def _check_cluster(options: GenerateOptions, serving: ServeOptions, source: str, output: str) -> None:
    device = "CPU" if serving.accelerator == "cpu" else "GPU"
    needs = {device: float(serving.tensor_parallel_size * serving.pipeline_parallel_size)}
    if serving.accelerator_type:
        needs[f"accelerator_type:{serving.accelerator_type}"] = 0.001  # as Ray requests it
    capacity.refuse_too_many_workers(options.num_workers, needs, "accelerator in [serve]")
    paths = {"input": source, "output": output, "model": serving.source}
    capacity.refuse_private_paths(paths, options.shared_paths, "generate")


JOB.run(main)
