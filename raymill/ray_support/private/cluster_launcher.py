"""The cluster launcher (`ray up`): how it reads cluster.yaml and compares it with running nodes."""

import contextlib
import io
from typing import Any

from ray.autoscaler._private.aws.config import bootstrap_aws
from ray.autoscaler._private.util import hash_launch_conf, prepare_config, validate_config


def launch_hash(config: dict[str, Any], node_type: str) -> str:
    """Return the value that `ray up` stores in a node's tag `ray-launch-config`. This calls AWS.

    Relies on `prepare_config` and `hash_launch_conf` of ray.autoscaler._private.util and on
    `ray.autoscaler._private.aws.config.bootstrap_aws` (Ray 2.60). Their output is hidden.
    """
    with contextlib.redirect_stdout(io.StringIO()):
        complete = bootstrap_aws(prepare_config(config))
    return hash_launch_conf(complete["available_node_types"][node_type]["node_config"], complete["auth"])


def validate(config: dict[str, Any]) -> None:
    """Raise an exception if `ray up` would reject this configuration.

    Relies on `prepare_config` and `validate_config` of ray.autoscaler._private.util (Ray 2.60).
    """
    validate_config(prepare_config(config))


def main() -> None:
    """Run the command line of Ray in this process. Relies on `ray.scripts.scripts.main` (Ray 2.60)."""
    from ray.scripts.scripts import main  # imports all of Ray's commands, which takes a second

    main()
