"""Measures the bandwidth between the workers before an expensive training run, and shows whether they use EFA."""

from raymill.job import Job, connect
from raymill.training.options import NetworkOptions

JOB = Job(NetworkOptions, "train", "check_network")  # reads the options, before the slow imports below

from raymill.ray_support import capacity, network_check


def main(options: NetworkOptions) -> None:
    """Measure the network between the workers of a training run, and print the bandwidth for each message size."""
    connect()
    options = options.model_copy(update={"num_workers": options.max_workers})
    capacity.refuse_too_many_workers(options.max_workers, options.worker_resources)
    network = network_check.measure(options)
    nodes = f"{network.nodes} node{'s' * (network.nodes > 1)}"
    print(f"{options.max_workers} workers on {nodes}, over {network.name}", flush=True)
    print("   MiB        ms   GB/s (bus)")
    for measurement in network.measurements:
        print(f"{measurement.mib:>6} {1000 * measurement.seconds:>9.2f} {measurement.gigabytes_per_s:>12.2f}")
    print(network_check.verdict(network, options.device), flush=True)


JOB.run(main)
