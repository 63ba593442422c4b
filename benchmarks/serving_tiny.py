"""Runs `serving` with a model of a million parameters, to show the overhead around the engine more clearly."""

import functools

from benchmarks import harness, serving

if __name__ == "__main__":
    harness.main(functools.partial(serving.measure, serving.SMALL))
