"""Quantizes a model to 4 or 8 bits with llmcompressor, for serving with less memory.

The result is a folder that serve_llm and vLLM load without further settings.
"""

from raymill.job import Job, connect
from raymill.quantization.options import QuantizeOptions

JOB = Job(QuantizeOptions, "quantize")  # reads the options, before the slow imports below

import time

from raymill import settings
from raymill.errors import UserError
from raymill.model_config import other_parts
from raymill.quantization import quantization
from raymill.ray_support import capacity, job_lease, model_cache
from raymill.settings import inv
from raymill.training import preflight, weights_check
from raymill.training.dataset import PackedRows, read_manifest


def main(options: QuantizeOptions) -> None:
    """Quantize the model, with rows that it was trained on."""
    paths = {"data": settings.resolve(options.data), "output": settings.resolve(options.output)}
    options = options.model_copy(update=paths)
    quantization.check_output(options.output)
    read_manifest(options.data)  # an error if there is no data
    data = PackedRows(options.data, "train")
    rows = data.read(0, min(options.rows, len(data)))["input_ids"].numpy()
    connect()
    needs = {"GPU": float(options.num_gpus)} if options.num_gpus else {"CPU": 1.0}
    capacity.refuse_too_many_workers(1, needs, "num_gpus in [quantize]")
    location = model_cache.find(options.model)
    if parts := other_parts(preflight.load_config(location)):
        raise UserError(
            f"quantize would lose or damage the parts of {options.model} for {' and '.join(parts)}. Serve the model as "
            'it is, or set quantization = "fp8" in [serve.engine].'
        )
    weights_check.check(location)
    capacity.refuse_private_paths(paths | {"model": location}, (), "quantize")
    print(f"quantizing {options.model} to {options.scheme} with {len(rows)} rows", flush=True)
    started = time.monotonic()
    with job_lease.hold(options.output, "--output"):
        quantization.quantize(options, location, rows)
    print(f"wrote {options.output} after {time.monotonic() - started:.0f} s")
    print(f"next: {inv('submit serve_llm -- --model', options.output)}")


JOB.run(main)
