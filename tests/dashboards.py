"""The metrics that the boards in raymill/dashboards/ show, and those that Ray exports."""

import json
import re

import ray
import requests

from raymill import settings


def shown(board: str) -> set[str]:
    """Return the names of the metrics in a board."""
    content = json.loads((settings.PROJECT / "raymill" / "dashboards" / f"{board}.json").read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in content["panels"] for target in panel["targets"]]
    return {name for query in queries for name in re.findall(r"\bray_\w+", re.sub(r"by \(.*?\)", "", query))}


def exported() -> set[str]:
    """Return the names of the metrics that the nodes export now."""
    pages = [
        requests.get(f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics", timeout=60).text
        for node in ray.nodes()
        if node["Alive"]
    ]
    return {name for page in pages for name in re.findall(r"^(\w+)[ {]", page, re.MULTILINE)}
