"""List the served models with their metrics; change, promote or roll back a canary; stop a model.

inv models                            shows requests, errors and latencies since a canary last started or ended
inv models -- --canary-percent 20     changes the canary's share of requests
inv models -- --promote               replaces the main model with the canary
inv models -- --roll-back             stops the canary
inv models -- --end NAME              stops an additional model, or `rag`
inv models -- --end-all --drain 600   stops everything; running answers get up to 600 s (default: 20)
"""

from raymill.job import Job, connect
from raymill.serving.options import ModelsOptions

JOB = Job(ModelsOptions)  # reads the options, before the slow imports below

from raymill.serving import served_models


def main(options: ModelsOptions) -> None:
    """List the served models, or change them."""
    connect(log_to_driver=False)
    if options.canary_percent is not None:
        served_models.set_canary_percent(options.canary_percent)
    elif options.promote:
        served_models.promote(options.drain)
    elif options.roll_back:
        served_models.roll_back(options.drain_s)
    elif options.end:
        served_models.end(options.end, options.drain_s)
    elif options.end_all:
        served_models.end_all(options.drain_s)
    else:
        served_models.show()


JOB.run(main)
