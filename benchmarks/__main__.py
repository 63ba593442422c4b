"""Runs the benchmarks, which are called parts, one after another, each in its own process. Stores their results."""

import json
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from benchmarks import report
from benchmarks.harness import PEERS_PINS

PARTS = {  # the quick ones first
    "starts": "The demo: its processes, their imports, and where the time goes",
    "packing": "Packing: how much of the packed rows is padding?",
    "checkpoint": "Checkpoints: how long does each block training?",
    "downloads": "Downloads: how fast does a node copy a model from the bucket?",
    "weights": "Weights: how fast do they arrive in main memory from the bucket?",
    "packages": "Packages: how fast does a node unpack them from the bucket?",
    "large_cluster": "A cluster with 64 workers: calls to AWS, the head, and inv status",
    "serving_middleware": "What keys and limits add to the time of a request to a served model",
    "launchers": "Ray Train against torchrun, with the same training loop",
    "preference": "Preference optimization against TRL, in one process",
    "trl": "The trainer against TRL's SFTTrainer, in one process",
    "rag": "Sources: does the document that answers a question come first?",
    "embed": "embed with two workers against two plain processes",
    "preprocess": "preprocess against datasets.map and a bare loop",
    "layouts": "preprocess with learned layouts of the chat template against without",
    "generate": "generate against vLLM's offline LLM.generate, with a model of 30 million parameters",
    "serving": "A served model of 30 million parameters against bare vLLM",
    "serving_tiny": "A served model of a million parameters against bare vLLM",
    "serving_cost": "What a request to a served model costs outside the engine, against bare vLLM",
    "serving_overload": "A served model that gets more requests than it can answer",
    "serving_scale": "A served model that gains a second replica under load and loses it again",
    "serving_update": "A served model under load, during an update, a canary and its promotion",
    "serving_soak": "A served model during ten minutes with misbehaving clients and one killed engine",
    "gpu": "MFU on one GPU, bf16, rows of 4096 tokens",
}
PACKAGES = ("ray", "vllm", "torch", "transformers", "tokenizers")


def main(only: str = "") -> None:
    """Run all parts, or only the part named `only`. If a part fails, the others still run."""
    if only and only not in PARTS:
        sys.exit(f"error: there is no benchmark {only}. Use --only with one of: {', '.join(PARTS)}.")
    commit = _commit()  # read only once, because storing the results changes the checkout
    failed = [name for name in ([only] if only else PARTS) if not _run(name, commit)]
    if failed:
        sys.exit(f"error: {', '.join(failed)} failed as printed above. Run again: ./inv bench --only {failed[0]}")


def _run(name: str, commit: str) -> bool:
    print(f"==> {PARTS[name]}", flush=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "result.json")
        if subprocess.run([sys.executable, "-m", f"benchmarks.{name}", file]).returncode:
            return False
        if not file.exists():  # the part has printed why it was not measured
            return True
        result = json.loads(file.read_text(encoding="utf-8"))
    described = {"title": PARTS[name], "commit": commit, "versions": _versions()}
    report.keep(name, described | {"seconds": time.monotonic() - started} | result)
    for bar in result["bars"]:
        print(f"{bar['what']}: {bar['measured']:.4g}, wanted {bar['wanted']}{'' if bar['kept'] else ': MISSED'}")
    return True


def _commit() -> str:
    describe = ["git", "-c", "safe.directory=*", "describe", "--always", "--dirty"]
    return subprocess.run(describe, cwd=report.FOLDER, capture_output=True, text=True).stdout.strip() or "no commit"


def _versions() -> dict[str, str]:
    peers = [line.split("==") for line in PEERS_PINS.read_text(encoding="utf-8").splitlines() if "==" in line]
    return {package: version(package) for package in PACKAGES} | {name: pin for name, pin in peers[:2]}


if __name__ == "__main__":
    main(*sys.argv[1:])
