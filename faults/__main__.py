"""Start an emulated AWS, and run the fault tests in it.

python -m faults [WORDS]

This module must run in a project's folder and environment, with the template on PYTHONPATH. `./inv faults` does that.
"""

import sys

from faults import catalog
from raymill.emulator import sandbox
from raymill.errors import UserError


def main(only: str = "") -> None:
    """Run the tests of the faults that `catalog.choose` returns for `only`."""
    try:
        catalog.choose(only)  # fail before the cloud starts if a word matches no fault
        sandbox.run_in_fresh_cloud("faults.runner", only)
    except (ValueError, UserError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main(*sys.argv[1:])
