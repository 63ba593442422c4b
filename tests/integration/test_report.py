"""Test the metrics and events that a run logs, and the page that `inv report` makes from them."""

import io
import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import boto3
import packed_rows
import pytest
import torch
from rich.console import Console

from raymill import settings
from raymill.aws.target import Aws
from raymill.common import bucket, cluster_file, prices
from raymill.errors import UserError
from raymill.training import history, model_card, preflight, report, storage, trainer
from raymill.training.ddp import DDP
from raymill.training.metric_logger import MetricLogger
from raymill.training.options import DDPOptions
from raymill.training.ranking import Ranking
from raymill.training.runtimes.runtime import SingleProcess
from raymill.training.storage import RunFolder

A100 = "NVIDIA A100-SXM4-40GB"
STEPS, CHECKPOINT_EVERY = 12, 5
PROCESS = SingleProcess(Path("unused"), torch.device("cpu"), 1)


@pytest.fixture(params=["path", "uri"])
def output(request: pytest.FixtureRequest, tmp_path: Path, s3: str) -> str:
    return str(tmp_path) if request.param == "path" else f"{s3}/{tmp_path.name}"


def train(
    output: str,
    name: str,
    *,
    done: int = 0,
    until: int = STEPS,
    killed: bool = False,
    ranking: Ranking | None = None,
    evaluated: Mapping[int, float] | None = None,
    **options: Any,
) -> None:
    """Call MetricLogger as the trainer does, for the steps after `done` up to `until`."""
    train_options = loaded(output, name, **options)
    preflight.claim(train_options, preflight_identity(train_options))
    folder = RunFolder(f"{output}/{name}")
    logger = MetricLogger(folder, train_options, PROCESS, done, ranking or Ranking())
    for step in range(done + 1, until + 1):
        row = {
            "step": step,
            "loss": 7 / step,
            "lr": step / 1e3,
            "grad_norm": 1 / step,
            "tokens_per_s": 1e3 + step,
            "memory_gib": 1.0,
        }
        saves = step % CHECKPOINT_EVERY == 0 or (step == until and not killed)
        if saves:
            row |= {"eval_loss": 8 / step, "eval_perplexity": 9.0}
        if evaluated and step in evaluated:
            row["eval_rewards/accuracies"] = evaluated[step]
        logger.write([row], 1.0)
        if saves:
            logger.checkpoint(step, 0.1)
            folder.publish()
    if not killed and until > done:
        logger.end(until)
        folder.publish()


def loaded(output: str, name: str, **options: Any) -> DDPOptions:
    return settings.load(DDPOptions, "train", profile="local").model_copy(
        update={"output": output, "name": name, "steps": STEPS, "data": "/nowhere"} | options
    )


def preflight_identity(options: DDPOptions) -> dict[str, Any]:
    return {"model": options.model, **options.model_dump(mode="json", include=preflight.DECIDES_NUMBERS)}


def unknown_price(device: str, workers: int) -> None:
    return None


class Page(HTMLParser):
    """A report page as a browser sees it: tags, text, addresses to fetch, and curves by name and panel."""

    def __init__(self, runs: list[history.History]) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.addresses: list[str | None] = []
        self.text = ""
        self._in_script = False
        self.feed(report.page(runs, report.summarize(runs, unknown_price), "runs/"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self._in_script = tag == "script"
        self.addresses += [value for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        self._in_script = False

    def handle_data(self, data: str) -> None:
        if not self._in_script:
            self.text += data
        elif '"curves",' in data and "Plotly.newPlot(" in data:
            start = data.index("[", data.index('"curves",', data.rindex("Plotly.newPlot(")))
            traces, end = json.JSONDecoder().raw_decode(data, start)
            self.layout, _ = json.JSONDecoder().raw_decode(data, data.index("{", end))
            self.curves = {(trace["name"], trace["yaxis"]): trace for trace in traces}


def metrics(output: str, name: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (storage.read_text(f"{output}/{name}/metrics.jsonl") or "").splitlines()]
    return [row for row in rows if row["step"]]


def test_the_page_has_the_logged_numbers_of_several_runs(tmp_path: Path) -> None:
    train(str(tmp_path), "one")
    train(str(tmp_path), "other", learning_rate=0.5, until=7)
    page = Page(history.read_all(str(tmp_path), []))
    for name in ("one", "other"):
        rows = metrics(str(tmp_path), name)
        for axis, metric in (("y", "loss"), ("y2", "grad_norm"), ("y3", "lr"), ("y4", "tokens_per_s")):
            assert page.curves[name, axis]["x"] == [row["step"] for row in rows]
            assert page.curves[name, axis]["y"] == [row[metric] for row in rows]
        evaluated = [row for row in rows if "eval_loss" in row]
        assert page.curves[f"{name}, evaluation", "y"]["y"] == [row["eval_loss"] for row in evaluated]
    assert page.curves["one", "y"]["line"]["color"] != page.curves["other", "y"]["line"]["color"]
    assert "7/12" in page.text
    began = history.read_all(str(tmp_path), ["one"])[0].events[0]["time"]
    by_time = page.layout["updatemenus"][0]["buttons"][1]["args"][0]["x"]
    assert by_time[0] == [(row["time"] - began) / 3600 for row in metrics(str(tmp_path), "one")]


def test_a_kill_and_a_restart_are_recorded_and_drawn(output: str) -> None:
    train(output, "run", until=8, killed=True)
    if storage.is_local(output):
        with Path(output, "run/events.jsonl").open("a") as file:
            file.write('{"event": "che')
    train(output, "run", done=5)
    (run,) = history.read_all(output, ["run"])
    events = [(event["event"], event["step"]) for event in run.events]
    seen = 8 if storage.is_local(output) else 5  # until a run ends, its files reach a bucket only at checkpoints
    restarted = [("broken off", seen), ("start", 5), ("checkpoint", 10), ("checkpoint", 12), ("end", 12)]
    assert events == [("start", 0), ("checkpoint", 5), *restarted]
    assert [row["step"] for row in run.rows] == list(range(1, STEPS + 1))
    curves = Page([run]).curves
    assert curves["run, checkpoint", "y"]["x"] == [5, 10, 12]
    assert curves["run, restart", "y"]["x"] == [6]
    assert curves["run, restart", "y"]["y"] == [7 / 6]
    (cells,) = report.summarize([run], unknown_price)
    assert (cells["restarts"], cells["steps lost"]) == ("1", str(seen - 5))


def test_the_loop_records_its_checkpoints_and_its_end(assets: Path, tmp_path: Path) -> None:
    model, data = assets / "model", tmp_path / "packed"
    data.mkdir()
    packed_rows.write(data, packed_rows.tokenize(assets, model, 64), model, 64, train=[12], evaluated=3)
    options = settings.load(DDPOptions, "train", profile="local").model_copy(
        update={"model": str(model), "data": str(data), "output": str(tmp_path), "steps": 6, "checkpoint_every": 2}
    )
    preflight.claim(options, preflight.check_packed(options))
    for stop in (3, 6, 6):
        process = SingleProcess(tmp_path / options.name, torch.device("cpu"), options.keep_checkpoints)
        trainer.train(options.model_copy(update={"stop_after": stop}), process, DDP)
    (run,) = history.read_all(str(tmp_path), [options.name])
    first = [("start", 0), ("checkpoint", 2), ("checkpoint", 3), ("export", 3), ("end", 3)]
    events = [(event["event"], event["step"]) for event in run.events]
    assert events == [*first, ("start", 3), ("checkpoint", 4), ("checkpoint", 6), ("export", 6), ("end", 6)]
    workers = {"world_size": 1, "strategy": "ddp", "device": "cpu", "precision": "fp32"}
    assert all(workers.items() <= attempt.start.items() for attempt in run.attempts)
    assert [row["time"] for row in run.rows] == sorted(row["time"] for row in run.rows)
    assert run.events[0]["time"] < run.rows[0]["time"] < run.rows[-1]["time"] <= run.events[-1]["time"]


def test_starting_a_finished_run_is_not_a_restart(tmp_path: Path) -> None:
    train(str(tmp_path), "run")
    before = (tmp_path / "run/events.jsonl").read_text()
    train(str(tmp_path), "run", done=STEPS)
    assert (tmp_path / "run/events.jsonl").read_text() == before


def test_the_time_of_a_running_run_ends_with_its_last_step(tmp_path: Path) -> None:
    train(str(tmp_path), "run", until=3, killed=True)
    (run,) = history.read_all(str(tmp_path), [])
    assert run.attempts[-1].last["step"] == 3
    assert run.seconds == run.rows[-1]["time"] - run.events[0]["time"]


def test_the_page_has_what_preprocess_counted(tmp_path: Path) -> None:
    counts = {"files": [], "rows": 20, "documents": 4000, "cut_documents": 17, "tokens": 1900, "trained_tokens": 950}
    part = counts | {"lengths": {"16": 1000, "32": 3000}}
    source = {"documents": 2500, "tokens": 1140, "trained_tokens": 114}
    other = {"documents": 1500, "tokens": 760, "trained_tokens": 760}
    manifest = {
        "content_hash": "0123456789abcdef" * 4,
        "sequence_length": 100,
        "rows_read": 8000,
        "rows_duplicate": 80,
        "rejected_by_reason": {"an empty <b>turn</b>": 240},
        "input": [{"name": "chats.jsonl", "weight": 1.0}, {"name": "faq.jsonl", "weight": 2.5}],
        "sources": {"chats.jsonl": source, "faq.jsonl": other},
        "train": part,
        "eval": part | {"documents": 0},
    }
    storage.write_text(f"{tmp_path}/packed/manifest.json", json.dumps(manifest))
    train(str(tmp_path), "one", data=f"{tmp_path}/packed")
    train(str(tmp_path), "two", data=f"{tmp_path}/packed", learning_rate=0.5)
    train(str(tmp_path), "other")
    train(str(tmp_path), "streamed", data=f"{tmp_path}/packed", stream=True)
    storage.delete_folder(f"{tmp_path}/packed")  # each run keeps a copy of its data's manifest
    page = Page(history.read_all(str(tmp_path), ["one", "two", "other", "streamed"]))
    text = " ".join(page.text.split())
    assert "Data 0123456789ab Used by one, two. 8,000 rows were read." in text
    assert "train 4,000 17 20 1,900 95.0% 50.0%" in text
    assert "faq.jsonl 2.5 1,500 760 40.0% 100.0%" in text
    assert "240 3.0% an empty <b>turn</b> 80 1.0% a duplicate" in text
    old = {"content_hash": "0" * 64, "rows_read": 1}  # from an earlier version of this project, which wrote fewer keys
    assert report.data_reports([history.History("old", {}, [], [], old)]) == []
    [bars] = report.lengths(report.data_reports(history.read_all(str(tmp_path), []))).to_dict()["data"]
    assert (list(bars["x"]), list(bars["y"])) == (["≤ 16", "≤ 32"], [0.25, 0.75])


def test_text_is_escaped_and_the_page_fetches_nothing(tmp_path: Path) -> None:
    train(str(tmp_path), "<b>bold", model='<img src="https://example.com">')
    page = Page(history.read_all(str(tmp_path), []))
    assert not page.tags & {"b", "img", "link", "iframe"}
    assert page.addresses == []
    assert "<b>bold" in page.text
    assert '<img src="https://example.com">' in page.text
    assert ("&lt;b&gt;bold", "y") in page.curves  # escaped, because plotly interprets some tags in texts


def test_dollars_are_for_whole_machines_while_workers_run() -> None:
    price = partial(prices.of_workers, {"p4d.24xlarge": 30.0, "m6i.2xlarge": 0.4})
    assert [price(A100, workers) for workers in (1, 8, 9)] == [30.0, 30.0, 60.0]
    assert price("NVIDIA A100-SXM4-80GB", 1) is None
    assert price("NVIDIA H100 80GB HBM3", 1) is None
    price_l40s = partial(prices.of_workers, {"g6e.xlarge": 2.0, "g6e.12xlarge": 7.0})
    assert [price_l40s("NVIDIA L40S", workers) for workers in (1, 4, 5)] == [2.0, 7.0, 10.0]
    (cells,) = report.summarize([run_on(A100)], price)
    assert cells["time"] == "1:30:00"
    assert cells["GPU-hours"] == "16.00"  # 8 GPUs for an hour, then 16 for half an hour
    assert cells["dollars"] == "≈ 60.00"
    assert cells["workers"] == "8 → 16 × A100-SXM4-40GB"
    assert not {"GPU-hours", "dollars"} & set(report.summarize([run_on("cpu")], price)[0])
    assert "Dollars are an estimate" in report.page([run_on(A100)], [cells], "runs/")


def run_on(device: str) -> history.History:
    began = {"event": "start", "strategy": "ddp", "device": device, "precision": "bf16"}
    events = [
        began | {"step": 0, "time": 1_000.0, "world_size": 8},
        {"event": "broken off", "step": 4, "time": 4_600.0},
        began | {"step": 2, "time": 10_000.0, "world_size": 16},
        {"event": "end", "step": 3, "time": 11_800.0},
    ]
    row = {"loss": 1.0, "lr": 1e-3, "grad_norm": 1.0, "tokens_per_s": 5.0, "memory_gib": 1.0}
    rows = [row | {"step": step, "time": 2_000.0 * step} for step in (1, 2, 3)]
    return history.History("run", {"steps": 3}, events, rows)


def test_a_missing_run_is_refused_with_the_names_of_other_runs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="inv submit finetune_ddp"):
        history.read_all(str(tmp_path / "runs"), [])
    train(str(tmp_path), "one")
    train(str(tmp_path), "other")
    storage.write_text(f"{tmp_path}/claimed/run.json", "{}")
    with pytest.raises(UserError, match="no run 'third' with logged steps; it has: one, other"):
        history.read_all(str(tmp_path), ["one", "third"])


def test_runs_in_the_bucket_are_read_with_the_credentials_of_the_aws_config(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, s3: str
) -> None:
    file = cluster_file.load()
    if not bucket.exists(file):  # another test may have made it
        boto3.client("s3").create_bucket(Bucket=bucket.name(file))
    train(f"s3://{bucket.name(file)}/runs", "run")
    config = f"[default]\nendpoint_url = {boto3.client('s3').meta.endpoint_url}\n"
    (tmp_path / "config").write_text(f"{config}aws_access_key_id = test\naws_secret_access_key = test\n")
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    for name, value in Aws().storage_variables().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(report, "FILE", tmp_path / "results/report.html")
    console = Console(file=io.StringIO(), width=160)
    report.draw(["run"], unknown_price, console)
    output = console.file.getvalue()  # type: ignore[attr-defined]
    assert f"curves: {tmp_path}/results/report.html" in output
    assert "12/12" in output
    assert f"s3://{bucket.name(file)}/runs" in (tmp_path / "results/report.html").read_text()


def test_an_early_stop_and_the_exported_step_are_shown(tmp_path: Path) -> None:
    ranking = Ranking("eval_rewards/accuracies", "max")
    train(str(tmp_path), "run", until=10, ranking=ranking, evaluated={5: 0.75, 10: 0.5})
    logger = MetricLogger(RunFolder(f"{tmp_path}/run"), loaded(str(tmp_path), "run"), PROCESS, 10, ranking)
    logger.export(5, True)
    (run,) = history.read_all(str(tmp_path), ["run"])
    assert run.stopped_early
    (cells,) = report.summarize([run], unknown_price)
    assert cells["steps"] == "10/12, stopped early"
    assert cells["best evaluation"] == cells["exported"] == "rewards/accuracies 0.7500 at 5"
    text = model_card.card(replace(run, identity={"model": "m"}), "model", "mit", is_adapter=False)
    for line in (
        "| steps | 10, stopped early |",
        "| exported model | that of step 5, the best by evaluation rewards/accuracies |",
        "| training loss at step 5 | 1.4000 |",
        "| evaluation loss at step 5 | 1.6000 |",
        "| share of held-out pairs at step 5 whose chosen answer has the higher reward | 0.750 |",
    ):
        assert line in text
    before = run.seconds
    train(str(tmp_path), "run", done=10, ranking=ranking, evaluated={12: 0.8})
    (continued,) = history.read_all(str(tmp_path), ["run"])
    assert not continued.stopped_early
    assert continued.attempts[0].seconds == before, "an export later on takes no time of the run"
    old = replace(run, events=[one for one in run.events if one["event"] != "export"])
    assert "exported" not in report.summarize([old], unknown_price)[0]
