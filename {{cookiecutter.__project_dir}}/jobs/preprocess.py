"""Turn conversations or text into packed rows of tokens. One Ray Data pipeline reads, shuffles, packs and writes.

The shuffle is global: a hash of the seed and the row's content assigns each row to a partition, and determines its
position there.
The result depends only on the input and the settings, not on workers, blocks or timing.
"""

from raymill.data.options import PreprocessOptions
from raymill.job import Job, connect

JOB = Job(PreprocessOptions, "preprocess")  # reads the options, before the slow imports below

from raymill.data import manifest, preprocessing, preview, row_formats, row_sources
from raymill.data.filters.gate import Gate
from raymill.data.packed_folder import PackedFolder
from raymill.data.tokenization import DocumentTokenizer
from raymill.ray_support import capacity, job_lease

FORMATS = row_formats.FORMATS  # (MINE, *row_formats.FORMATS) adds a format of your own: docs/data.md
FILTERS = ()  # (mine,) adds a function that keeps, changes or drops a row: docs/filters.md


def main(options: PreprocessOptions) -> None:
    """Turn conversations or text into packed rows of tokens. Labels mark what the model should learn to write."""
    sources = row_sources.find_all(options.input, options.mix, row_formats.for_task(options.task, FORMATS))
    tokenizer = DocumentTokenizer.from_options(options)
    gate = Gate.of(options.filters, FILTERS, options.eval_share)
    for source in sources:
        preview.show(source, tokenizer, options.show, gate)
    plan = preprocessing.plan_shards(options, sources)
    configuration = manifest.configuration(sources, plan, options, tokenizer, gate)
    output = PackedFolder(plan.output)
    if output.is_complete(configuration):
        print(f"{plan.output} was already made from this input with these settings; nothing to do.")
        return
    connect()
    for setting, name in (*row_sources.names_by_setting(sources), ("output", plan.output)):
        capacity.refuse_private_paths({setting: name}, options.shared_paths, "preprocess")
    with job_lease.hold(plan.output, "--output") as lease:
        output.begin(options.overwrite)
        partitions = preprocessing.write_shards(sources, plan, tokenizer, gate)
        complete = configuration | manifest.results(partitions, sources)
        manifest.check(complete, options, plan)
        lease.confirm()
        output.finish(complete)
    manifest.print_summary(complete, plan)
    preview.show_dropped(plan.output, options.show)


JOB.run(main)
