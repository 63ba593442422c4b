"""Runs `ray start`, whose workers are forks. The first argument is the cluster's folder, and the others are Ray's."""

import sys

from ray.scripts.scripts import main

from raymill.job_context import JobContext
from raymill.ray_support.private import forks

if __name__ == "__main__":
    SERVER = forks.start(sys.argv.pop(1), JobContext.names())  # ends with this process
    main()
