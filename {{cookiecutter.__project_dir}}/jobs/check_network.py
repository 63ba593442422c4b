"""Measures the bandwidth between the workers before an expensive training run, and shows whether they use EFA."""

from pipeline.ray_support import cli
from pipeline.training.options import NetworkOptions

if __name__ == "__main__":
    cli.parse(NetworkOptions, "train")  # before the slow imports below

from pipeline.ray_support import capacity, network_check


def main(options: NetworkOptions) -> None:
    """Measure the network between the workers of a training run, and print the bandwidth for each message size."""
    cli.connect()
    options = options.model_copy(update={"num_workers": options.max_workers})
    capacity.refuse_too_many_workers(options.max_workers, options.worker_resources)
    nodes, network, measurements = network_check.measure(options)
    print(f"{options.max_workers} workers on {nodes} node{'s' * (nodes > 1)}, over {network}", flush=True)
    print("   MiB        ms   GB/s (bus)")
    for measurement in measurements:
        print(f"{measurement.mib:>6} {1000 * measurement.seconds:>9.2f} {measurement.gigabytes_per_s:>12.2f}")
    print(network_check.verdict(nodes, network, options.device), flush=True)


if __name__ == "__main__":
    cli.run(main)
