"""Like `serving`, with a model of a million parameters, for which the overhead around the engine matters most."""

import functools

from benchmarks import harness, serving

if __name__ == "__main__":
    harness.main(functools.partial(serving.measure, serving.SMALL))
