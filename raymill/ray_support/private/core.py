"""Ray Core: starts Ray in a given folder."""

from typing import Any

import ray


def init(folder: str, **options: Any) -> None:
    """Call `ray.init`. Ray keeps its sockets, logs and spilled objects in `folder`.

    Relies on the parameter `_temp_dir` of `ray.init` (Ray 2.60).
    """
    ray.init(_temp_dir=folder, **options)
