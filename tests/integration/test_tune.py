"""Test the `tune` job on the shared Ray instance: it finds good settings, stops bad trials early, and resumes."""

import io
import json
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import packed_rows
import preprocess_job
import pytest
from pydantic import ValidationError
from ray.tune.schedulers import TrialScheduler
from rich.console import Console

from jobs import finetune_ddp, preprocess, tune
from raymill import settings
from raymill.errors import UserError
from raymill.ray_support import gang
from raymill.training import storage
from raymill.training.ddp import DDP
from raymill.training.objectives import Objective
from raymill.training.options import DDPOptions, TrainOptions
from raymill.training.pairs import DPO
from raymill.training.schedule import check_batches
from raymill.tuning import search, trials
from raymill.tuning.options import TuneOptions
from raymill.tuning.trials import Outcome, Trial

SEED = 1286
RATES = {"low": 1e-6, "high": 1e4}  # with SEED, a model learns at the first rate that is drawn, but not at the second


@pytest.fixture(scope="module")
def changes(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return changes to the settings of the local profile."""
    model, data = assets / "model", tmp_path_factory.mktemp("packed")
    packed_rows.write(data, packed_rows.tokenize(assets, model, 64), model, 64, train=[64], evaluated=8)
    return {
        "model": str(model),
        "data": str(data),
        "output": str(tmp_path_factory.mktemp("runs")),
        "num_workers": 1,
        "global_batch_rows": 8,
        "micro_batch_rows": 8,
        "warmup_steps": 0,
        "steps": 12,
        "eval_every": 4,
        "grace_steps": 4,
        "trials_at_once": 1,
        "learning_rates": RATES,
        "global_batches": [],
        "seed": SEED,
    }


def test_trials_have_the_strategy_of_the_jobs_script(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mine(DDP): ...

    passed: dict[str, Any] = {}

    def with_parameters(_: Any, **parameters: Any) -> None:
        passed.update(parameters)
        raise UserError("stop here")

    monkeypatch.setattr(finetune_ddp, "STRATEGY", Mine)
    monkeypatch.setattr(search.tune, "with_parameters", with_parameters)
    monkeypatch.setattr(gang, "find_zone", lambda options: None)
    options = _options(changes | {"output": str(tmp_path), "trials": 1})
    Path(options.folder).mkdir()
    with pytest.raises(UserError, match="stop here"):
        search.run(options, trials.load(options.folder, search.draw(options)))
    assert passed["strategy"] is Mine


@pytest.mark.nightly  # because it takes a minute
@pytest.mark.usefixtures("ray_session")
def test_good_settings_are_found_and_a_later_start_adds_trials(
    changes: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tune.main(_options(changes | {"trials": 1}))
    (first,) = _trials(changes)
    assert first.trial.ended == "all steps"
    before = _starts(changes, first.trial)
    capsys.readouterr()

    options = _options(changes | {"trials": 2})
    tune.main(options)
    learned, idle = _trials(changes)
    assert _starts(changes, learned.trial) == before, "a trial that has ended must not run again"
    assert learned.steps == 12
    assert learned.score < idle.score
    assert idle.trial.ended == "stopped at step 4"
    assert {name for name in _names(changes, first.trial) if name.startswith(trials.WEIGHTS)} == set()

    printed = capsys.readouterr().out
    assert "stopped at step 4; 2 of 2 have ended" in printed
    assert (Path(options.folder) / trials.PLOT).stat().st_size > 1000
    snippet = printed[printed.index("[local.train]") :]
    file = tmp_path / "settings.toml"
    file.write_text(_settings_with(snippet))
    assert settings.load(DDPOptions, "train", file=file).learning_rate == learned.trial.settings["learning_rate"]

    with pytest.raises(UserError, match="was started with learning_rate = "):
        tune.main(_options(changes | {"learning_rates": RATES | {"high": 1e-2}}))


def test_earlier_results_count_in_a_later_start(changes: dict[str, Any], tmp_path: Path) -> None:
    options = _options(changes | {"output": str(tmp_path)})
    earlier = Trial("trial-01", {"learning_rate": 1e-3}, "all steps")
    file = Path(options.folder, earlier.name, "metrics.jsonl")
    file.parent.mkdir(parents=True)
    # step 0 is the base model, which is no result of a trial
    lines = [{"step": step, "eval_loss": 2.0 if step else 0.1} for step in (0, 4, 8, 12)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert trials.outcome(options.folder, earlier).curve == lines[1:]
    for loss, decision in ((2.1, TrialScheduler.STOP), (1.9, TrialScheduler.CONTINUE)):
        asha = search.scheduler(options, [earlier])
        new = SimpleNamespace(trial_id="new")
        asha.on_trial_add(None, new)
        assert asha.on_trial_result(None, new, {"step": 4, "eval_loss": loss}) == decision


class Accurate(DPO):
    best_metric, best_mode = "eval_rewards/accuracies", "max"


class ByAccuracy(DDP):
    @staticmethod
    def make_objective(options: TrainOptions) -> Objective:
        return Accurate(options)


def test_the_metric_of_the_objective_ranks_trials(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finetune_ddp, "STRATEGY", ByAccuracy)
    options = _options(changes | {"output": str(tmp_path), "objective": "dpo"})
    searched = [Trial(f"trial-{number:02d}", {"learning_rate": 1e-3}, "all steps") for number in (1, 2, 3)]
    start = {"event": "start", "step": 0, "time": 0, "best_metric": Accurate.best_metric, "best_mode": "max"}
    for trial, (loss, accuracy) in zip(searched, ((0.1, 0.5), (0.9, 0.9), (0.2, None)), strict=True):
        folder = Path(options.folder, trial.name)
        folder.mkdir(parents=True)
        line = {"step": 4, "eval_loss": loss} | ({} if accuracy is None else {Accurate.best_metric: accuracy})
        (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
        (folder / "events.jsonl").write_text(json.dumps(start) + "\n")
    outcomes = trials.ranked(options.folder, searched)
    assert [outcome.trial.name for outcome in outcomes] == ["trial-02", "trial-01", "trial-03"]
    console = Console(file=io.StringIO(), width=120)
    console.print(trials.table(outcomes))
    header, first, *_, last = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert "evaluation rewards/accuracies" in header
    assert "0.9000" in first
    assert last.split()[3] == "-", "a trial without the metric is the last one"
    trials.plot(options.folder, outcomes)
    for accuracy, decision in ((0.7, TrialScheduler.STOP), (0.95, TrialScheduler.CONTINUE)):
        asha = search.scheduler(options, searched)
        new = SimpleNamespace(trial_id="new")
        asha.on_trial_add(None, new)
        result = {"step": 4, "eval_loss": accuracy, Accurate.best_metric: accuracy}
        assert asha.on_trial_result(None, new, result) == decision


@pytest.mark.nightly
@pytest.mark.usefixtures("ray_session")
def test_trials_of_pairs_share_the_reference(
    changes: dict[str, Any], assets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"prompt": f"What is number {n}?", "chosen": f"It is {n}. " + "Sure. " * (n % 5), "rejected": "No idea. "}
        for n in range(150)
    ]
    made = {"input": str(preprocess_job.write_rows(tmp_path / "rows.jsonl", rows)), "task": "preference"}
    preprocess.main(preprocess_job.options(assets, tmp_path, **made, model=changes["model"], eval_share=0.1))
    pairs = changes | {"name": "pairs", "data": str(tmp_path / "packed"), "objective": "dpo"}
    rates = {"low": 1e-4, "high": 1e-2}
    tune.main(_options(pairs | {"trials": 2, "trials_at_once": 2, "steps": 8, "learning_rates": rates}))
    found = _trials(pairs)
    assert all(outcome.trial.ended for outcome in found)
    assert all(line[Accurate.best_metric] >= 0 for outcome in found for line in outcome.curve)
    assert len(list((tmp_path / "packed" / "reference").iterdir())) == 2, "one file for each split"
    best, other = trials.ranked(f"{changes['output']}/pairs", [outcome.trial for outcome in found])
    assert best.score < other.score
    assert f"evaluation loss {best.best} after {best.steps} steps" in capsys.readouterr().out


def test_trials_that_write_the_same_file_at_once_leave_it_whole(tmp_path: Path) -> None:
    contents = [bytes([number]) * 2**22 for number in range(4)]
    file = f"{tmp_path}/reference.npz"
    storage.replace_bytes(file, contents[0])
    with ThreadPoolExecutor(len(contents)) as threads:
        writing = [threads.submit(storage.replace_bytes, file, content) for content in contents * 10]
        while not all(one.done() for one in writing):
            assert storage.read_bytes(file) in contents
    assert [one.exception() for one in writing] == [None] * len(writing)
    assert storage.list_names(str(tmp_path)) == ["reference.npz"]


def test_divergence_ends_a_trial_and_other_failures_do_not(
    changes: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    searched = [Trial("trial-01", {"learning_rate": 1e3}), Trial("trial-02", {"learning_rate": 1e-3})]
    recorder = search.TrialRecorder(str(tmp_path), 12, searched)
    for name, error in (("trial-01", "step 2 diverged on rows 7: inf"), ("trial-02", "no room for a checkpoint")):
        recorder.on_trial_complete(0, [], SimpleNamespace(config={"trial": name}, last_result={"user_error": error}))
    saved = trials.load(str(tmp_path), search.draw(_options(changes | {"trials": 2})))
    assert [trial.ended for trial in saved] == ["step 2 diverged", ""]
    assert recorder.failures == ["trial-02: no room for a checkpoint"]
    assert "trial-01: learning_rate 1000: step 2 diverged; 1 of 2 have ended" in capsys.readouterr().out


def test_draws_are_from_the_search_space_and_more_trials_keep_the_first(changes: dict[str, Any]) -> None:
    options = _options(changes | {"trials": 200, "lora_ranks": [0, 8], "global_batches": [8, 16]})
    drawn = search.draw(options)
    rates = [one["learning_rate"] for one in drawn]
    assert all(RATES["low"] <= rate <= RATES["high"] for rate in rates)
    assert 60 < sum(rate < 1e-1 for rate in rates) < 140, "the rates are not log-uniform"
    assert {(one["global_batch_rows"], one["lora_rank"]) for one in drawn} == {(8, 0), (8, 8), (16, 0), (16, 8)}
    assert search.draw(options.model_copy(update={"trials": 3})) == drawn[:3]


def test_settings_of_a_trial_override_those_of_the_search(changes: dict[str, Any]) -> None:
    options = _options(changes | {"script": "finetune_fsdp", "fresh": True})
    run = search.run_options(options, Trial("trial-07", {"learning_rate": 5e-4, "lora_rank": 4}))
    assert (run.strategy, run.learning_rate, run.lora_rank) == ("fsdp", 5e-4, 4)
    assert (run.steps, run.checkpoint_every, run.fresh) == (12, 4, False)
    assert f"{run.output}/{run.name}" == f"{options.folder}/trial-07"


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"learning_rates": {"low": 1e-2, "high": 1e-3}}, "low is above high"),
        ({"learning_rates": {"low": 1e-3}}, "Field required"),
        ({"lora_ranks": [-1]}, "greater than or equal to 0"),
        ({"grace_steps": 12}, "otherwise no trial ends early"),
        ({"learning_rates_": RATES}, "Extra inputs are not permitted"),
    ],
    ids=lambda wrong: next(iter(wrong)) if isinstance(wrong, dict) else "",
)
def test_a_wrong_search_space_is_refused(wrong: dict[str, Any], sentence: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=sentence):
        _options(changes | wrong)


@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"global_batches": [8, 12]}, "global_batch_rows = 12 is not a multiple of"),
        ({"trials_at_once": 5}, "needs 5 workers, but this cluster can hold only 4; use --trials-at-once 4"),
        ({"stream": True}, "Leave out --stream"),
        ({"script": "finetune_jax"}, "there is no job 'finetune_jax'"),
        ({"script": "evaluate"}, "tune cannot run evaluate"),
    ],
    ids=lambda wrong: next(iter(wrong)) if isinstance(wrong, dict) else "",
)
def test_a_search_whose_trials_cannot_run_is_refused(
    wrong: dict[str, Any], sentence: str, changes: dict[str, Any]
) -> None:
    with pytest.raises(UserError, match=sentence):
        tune.main(_options(changes | {"name": "refused"} | wrong))
    assert not Path(changes["output"], "refused").exists()


@pytest.mark.parametrize("profile", settings.PROFILES)
def test_both_profiles_hold_a_search_whose_batches_divide(profile: str) -> None:
    options = settings.load(TuneOptions, "train", "tune", profile=profile)
    for rows in options.global_batches:
        check_batches(rows, options.micro_batch_rows, options.min_workers, options.max_workers)


def _options(changes: dict[str, Any]) -> TuneOptions:
    local = settings.load(TuneOptions, "train", "tune", profile="local")
    return TuneOptions.model_validate(local.model_dump() | changes)


def _trials(changes: dict[str, Any]) -> list[Outcome]:
    """Return the trials that the search has saved, with their curves."""
    folder = Path(changes["output"], changes.get("name", "tune"))
    saved = [Trial(**fields) for fields in json.loads((folder / trials.FILE).read_text())]
    return [trials.outcome(str(folder), trial) for trial in saved]


def _names(changes: dict[str, Any], trial: Trial) -> list[str]:
    return [path.name for path in Path(changes["output"], "tune", trial.name).iterdir()]


def _starts(changes: dict[str, Any], trial: Trial) -> list[str]:
    """Return the names of the trial's TensorBoard files. The trial's run writes one at each start."""
    return [path.name for path in Path(changes["output"], "tune", trial.name, "tensorboard").iterdir()]


def _settings_with(snippet: str) -> str:
    """Return settings.toml with the snippet's settings."""
    before, _, after = settings.FILE.read_text().partition("[local.train]\n")
    section, end, rest = after.partition("\n[")
    kept = [line for line in section.splitlines() if line.split(" ")[0] not in tomllib.loads(snippet)["local"]["train"]]
    return "\n".join([before, snippet, *kept]) + end + rest
