"""Check what `inv fit` prints, with a stub in place of the fake GPU, which needs 10 GB of packages."""

import re
from pathlib import Path

import pytest
from invoke import Exit
from rich.console import Console

from raymill import settings
from raymill.common import cluster_file, gpu_types
from raymill.errors import UserError
from raymill.fake_gpu import fit
from raymill.fake_gpu.fit import GIB, Gpu, Measured
from raymill.instance_types import INSTANCE_TYPES


class StubbedGpu(Gpu):
    """Fits up to 4 rows in a micro-batch, and any number with gradient checkpointing."""

    def run(self, job: str, options: list[str]) -> Measured:
        rows = int(options[-1])
        return Measured(8, rows, 22 * GIB, 31 * GIB, 0, "" if self.fits(job, options) else "step 2")

    def fits(self, job: str, options: list[str]) -> bool:
        last = len(options) - options[::-1].index("--micro-batch-rows")
        return int(options[last]) <= 4 or "--gradient-checkpointing" in options


@pytest.fixture(autouse=True)
def _stubbed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(fit, "Gpu", StubbedGpu)
    monkeypatch.setattr(fit, "nodes_environment", lambda: tmp_path)
    monkeypatch.setattr(fit, "RECORD_FILE", tmp_path / "results" / "fit.json")
    monkeypatch.setattr(fit.sys, "platform", "linux")
    monkeypatch.setattr(fit.platform, "machine", lambda: "x86_64")


def test_a_job_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    fit.fit("finetune_fsdp", ["--micro-batch-rows", "1"], Console())
    gpu = gpu_types.for_training(cluster_file.load())[0].gpu
    assert capsys.readouterr().out.splitlines() == [
        f"finetune_fsdp on 8 × {gpu} fits: it allocates 22.0 GiB of {gpu.gib - 1:.0f} GiB, and reserves 31.0 GiB",
        "largest micro-batch that fits: --micro-batch-rows 4",
    ]


def test_a_job_that_does_not_fit_names_what_helps(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Exit) as ended:
        fit.fit("finetune_ddp", ["--micro-batch-rows", "16"], Console())
    assert ended.value.code == 1
    first, *tried = capsys.readouterr().out.splitlines()
    assert first.endswith("does not fit: step 2 runs out of memory")
    assert tried == [
        "with --gradient-checkpointing: fits",
        "with --micro-batch-rows 1: fits",
        "with --lora-rank 16: does not fit",
    ]


def test_the_last_result_counts_only_for_the_same_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options = ["--micro-batch-rows", "1"]
    fit.fit("finetune_fsdp", options, Console())
    with pytest.raises(Exit):
        fit.fit("finetune_ddp", ["--micro-batch-rows", "16"], Console())
    assert re.match(r"inv fit, on [\d-]+ [\d:]+: finetune_fsdp on 8 × ", fit.last_result("finetune_fsdp", options))
    assert "does not fit" in fit.last_result("finetune_ddp", ["--micro-batch-rows", "16"])
    unknown = "inv fit has not measured finetune_{} with these settings"
    assert fit.last_result("finetune_ddp", options).startswith(unknown.format("ddp"))
    assert fit.last_result("finetune_deepspeed", options).startswith(unknown.format("deepspeed"))
    with pytest.MonkeyPatch.context() as changing:
        changing.setattr(fit, "_instance", lambda: INSTANCE_TYPES["p6-b200.48xlarge"])
        assert fit.last_result("finetune_fsdp", options).startswith(unknown.format("fsdp"))
    changed = tmp_path / "settings.toml"
    changed.write_text(settings.FILE.read_text().replace("\n[cluster.train]\n", "\n[cluster.train]\nlora_rank = 16\n"))
    monkeypatch.setattr(settings, "FILE", changed)
    assert fit.last_result("finetune_fsdp", options).startswith(unknown.format("fsdp"))


def test_a_damaged_record_counts_as_no_result() -> None:
    fit.RECORD_FILE.parent.mkdir()
    fit.RECORD_FILE.write_text('{"finetune_ddp": {')
    assert "has not measured finetune_ddp" in fit.last_result("finetune_ddp", [])
    fit.fit("finetune_ddp", ["--micro-batch-rows", "1"], Console())
    assert fit.last_result("finetune_ddp", ["--micro-batch-rows", "1"]).startswith("inv fit, on ")


def test_only_fine_tuning_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"fit cannot measure preprocess\. Run: inv fit finetune_ddp \| "):
        fit.fit("preprocess", [], Console())
    monkeypatch.setattr(fit.sys, "platform", "darwin")
    with pytest.raises(UserError, match="fit needs Linux on x86-64"):
        fit.fit("finetune_ddp", [], Console())
