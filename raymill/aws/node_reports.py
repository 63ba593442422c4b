"""What each node last reported to the bucket: the use of its GPUs and disks, and that its logs reach the bucket."""

import json
from dataclasses import dataclass

from raymill.aws.saved_logs import SavedLogs
from raymill.common import bucket
from raymill.common.cluster_file import ClusterFile
from raymill.node import log_shipping
from raymill.node.gpu_use import GpuUse


@dataclass(frozen=True)
class NodeReport:
    """The report of one node (see log_shipping.py)."""

    saved: float
    """When the node saved it, in seconds since 1970."""
    gpus: list[GpuUse]
    """The last sample of each GPU."""
    disk: str
    """A sentence if a disk of the node is nearly full, or else ""."""


def read(file: ClusterFile, session: str) -> dict[str, NodeReport]:
    """Return the report of each node in a session of Ray, by the id of its instance."""
    copies = SavedLogs(file).of_all_nodes(f"{bucket.LOGS}{session}/", log_shipping.REPORT)
    reports = ((json.loads(copy.text), copy.saved.timestamp()) for copy in copies)
    return {
        report["instance"]: NodeReport(saved, [GpuUse(**gpu) for gpu in report["gpus"]], report.get("disk", ""))
        for report, saved in reports
    }
