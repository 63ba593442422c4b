"""Test which adapters a served model offers, and the copies that its engine loads. A fake engine stands for vLLM's."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from raymill import settings
from raymill.ray_support.private_folder import PrivateFolder
from raymill.serving.adapters import AdapterCheck
from raymill.serving.options import ServeOptions

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="vLLM's CPU build exists for Linux only")
if sys.platform == "linux":
    from raymill.serving import adapters, app

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MATRIX = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"


class FakeEngine:
    """The parts of vLLM that `Adapters` uses. It loads what exists, as the engine does."""

    def __init__(self) -> None:
        self.lora_requests: dict[str, Any] = {}
        self.lora_id_counter = SimpleNamespace(inc=lambda step: len(self.loaded) + 1)
        self.engine_client = self
        self.output_processor = SimpleNamespace(request_states={})
        self.errored = False
        self.loaded: list[Any] = []
        self.reason = ""

    def is_base_model(self, name: str) -> bool:
        return name == "tiny"

    async def add_lora(self, request: Any) -> None:
        if self.reason:
            raise ValueError(self.reason)
        assert Path(request.lora_path, WEIGHTS).exists()
        self.loaded.append((request.lora_name, dict(self.lora_requests)))

    async def remove_lora(self, lora_id: int) -> None:
        pass

    def offered(self) -> dict[str, Path]:
        return {name: Path(request.lora_path) for name, request in self.lora_requests.items()}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "base"
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def trained(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a good adapter."""
    folder = tmp_path_factory.mktemp("trained")
    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    model = get_peft_model(LlamaForCausalLM.from_pretrained(base), lora)
    model.peft_config["default"].base_model_name_or_path = str(base)
    model.save_pretrained(str(folder))
    return folder


@pytest.fixture
def runs(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with the runs `sql` and `other`."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    for name in ("sql", "other"):
        shutil.copytree(trained, tmp_path / "runs" / name / "adapter")
    return tmp_path / "runs"


@pytest.fixture
def served(runs: Path, base: Path) -> "adapters.Adapters":
    return adapters.Adapters(str(runs), str(base), AdapterCheck(str(base), 4, "float32"), keep_s=0)


def refresh(served: "adapters.Adapters", engine: FakeEngine) -> None:
    asyncio.run(served.refresh(engine))  # type: ignore[arg-type]


# ---------------------------------------------------------------- copies


def test_the_engine_keeps_its_copy_until_no_request_can_need_it(
    served: "adapters.Adapters", runs: Path, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine()
    refresh(served, engine)
    assert served.names == ["other", "sql"]
    copies = engine.offered()
    assert not any(runs in copy.parents for copy in copies.values())
    os.truncate(runs / "sql" / "adapter" / WEIGHTS, 100)  # a hard link would be cut, too
    shutil.rmtree(runs / "other")
    for copy in copies.values():
        assert (copy / WEIGHTS).read_bytes() == (trained / WEIGHTS).read_bytes()
    refresh(served, engine)
    assert served.names == ["sql"]  # the old version stays in use
    assert engine.offered() == {"sql": copies["sql"]}
    assert all(copy.exists() for copy in copies.values())
    monkeypatch.setattr(adapters.time, "monotonic", lambda: 1e9)
    using = SimpleNamespace(lora_request=SimpleNamespace(lora_path=str(copies["other"])))
    engine.output_processor.request_states = {"1": using, "2": SimpleNamespace(lora_request=None)}
    refresh(served, engine)
    assert copies["other"].exists()
    engine.output_processor.request_states = {}
    refresh(served, engine)
    assert not copies["other"].exists()
    assert copies["sql"].exists()


def test_an_adapter_that_comes_back_is_offered_again_as_it_was(
    served: "adapters.Adapters", runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests may use it all the time, so its copy must not be deleted or written again."""
    engine = FakeEngine()
    refresh(served, engine)
    first = engine.lora_requests["sql"]
    (runs / "sql").rename(runs / ".moved")
    refresh(served, engine)
    assert served.names == ["other"]
    (runs / ".moved").rename(runs / "sql")
    refresh(served, engine)
    assert engine.lora_requests["sql"] is first
    assert len(engine.loaded) == 2
    monkeypatch.setattr(adapters.time, "monotonic", lambda: 1e9)
    refresh(served, engine)
    assert Path(first.lora_path, WEIGHTS).exists()


def test_adapters_in_a_bucket_are_copied(base: Path, runs: Path, trained: Path, s3: str) -> None:
    for name in ("sql", "damaged"):
        for file in trained.iterdir():
            adapters.storage.write_bytes(f"{s3}/runs/{name}/adapter/{file.name}", file.read_bytes())
    adapters.storage.write_bytes(f"{s3}/runs/damaged/adapter/{WEIGHTS}", b"half")
    engine = FakeEngine()
    served = adapters.Adapters(f"{s3}/runs", str(base), AdapterCheck(str(base), 4, "float32"), keep_s=0)
    refresh(served, engine)
    assert (served.names, list(served.problems)) == (["sql"], ["damaged"])
    assert (engine.offered()["sql"] / WEIGHTS).read_bytes() == (trained / WEIGHTS).read_bytes()
    adapters.storage.delete_folder(f"{s3}/runs/sql")
    refresh(served, engine)
    assert served.names == []


@pytest.mark.parametrize("loads", [True, False])
def test_a_retrained_adapter_replaces_the_old_one_atomically(
    served: "adapters.Adapters", runs: Path, loads: bool
) -> None:
    """A request during the replacement must not get a 404."""
    engine = FakeEngine()
    refresh(served, engine)
    old = dict(engine.lora_requests)
    file = runs / "sql" / "adapter" / WEIGHTS
    save_file({name: 2 * value for name, value in load_file(file).items()}, file)
    engine.reason = "" if loads else "no memory"
    refresh(served, engine)
    new = engine.lora_requests["sql"]
    assert (new.lora_name != old["sql"].lora_name) == loads
    assert served.problems == ({} if loads else {"sql": "vLLM cannot load it (no memory)"})
    assert served.names == ["other", "sql"]
    if loads:
        assert engine.loaded[-1] == (new.lora_name, old), "requests must use the old adapter while the new one loads"


def test_an_adapter_that_changes_while_it_is_copied_is_copied_again(
    served: "adapters.Adapters", runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine()
    copy = adapters.model_cache.copy_folder

    def write_meanwhile(location: str, folder: Path) -> None:
        copy(location, folder)
        (Path(location) / "new").touch()

    monkeypatch.setattr(adapters.model_cache, "copy_folder", write_meanwhile)
    refresh(served, engine)
    assert (served.names, served.problems) == ([], {})
    monkeypatch.setattr(adapters.model_cache, "copy_folder", copy)
    refresh(served, engine)
    assert served.names == ["other", "sql"]


def test_a_private_folder_is_deleted_by_the_next_process_and_not_before(tmp_path: Path) -> None:
    code = "import os, sys; from pathlib import Path; from raymill.ray_support.private_folder import PrivateFolder; "
    code += "folder = PrivateFolder(Path(sys.argv[1])); print(folder.path, flush=True); sys.stdin.read(); os._exit(1)"
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout
        theirs = Path(other.stdout.readline().strip())
        assert theirs.stat().st_mode & 0o777 == 0o700
        first = PrivateFolder(tmp_path)
        assert theirs.exists()
        other.communicate("")
    second = PrivateFolder(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == sorted(
        folder.path.name for folder in (first, second)
    )


def test_the_workers_of_an_engine_on_cpus_load_the_patch_of_their_operations(runs: Path) -> None:
    """vLLM adds the extension to its worker's bases, and allows no attribute that the worker has, too."""
    loaded = settings.load(ServeOptions, "serve", profile="local")
    arguments = {
        accelerator: app.engine_args(loaded.model_copy(update={"adapters": str(runs), "accelerator": accelerator}))
        for accelerator in ("cpu", "gpu")
    }
    assert "worker_extension_cls" not in arguments["gpu"]
    assert "worker_extension_cls" not in app.engine_args(loaded)
    code = "import sys; from vllm.utils.import_utils import resolve_obj_by_qualname as resolve; "
    code += "extension = resolve(sys.argv[1]); from vllm.lora.punica_wrapper import punica_cpu; "
    code += (
        "print(hasattr(punica_cpu.bgmv_expand, '__wrapped__'), [name for name in dir(extension) if name[:2] != '__'])"
    )
    command = [sys.executable, "-c", code, arguments["cpu"]["worker_extension_cls"]]
    done = subprocess.run(command, cwd=settings.PROJECT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "True []"


# ---------------------------------------------------------------- broken adapters


def change_config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / CONFIG).read_text()) | changes
        (folder / CONFIG).write_text(json.dumps(config))

    return change


def change_weights(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        weights = load_file(folder / WEIGHTS)
        save_file(change(weights) or weights, folder / WEIGHTS)

    return apply


def config_text(text: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / CONFIG).write_text(text)


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "rank": (change_config(r=8), "its rank 8 is more than max_lora_rank = 4 in [serve]"),
    "cut": (lambda folder: os.truncate(folder / WEIGHTS, 500), "peft cannot load it ("),
    "empty": (lambda folder: os.truncate(folder / WEIGHTS, 0), "peft cannot load it ("),
    "zeros": (lambda folder: (folder / WEIGHTS).write_bytes(bytes(5000)), "peft cannot load it ("),
    "missing": (lambda folder: (folder / WEIGHTS).unlink(), f"it has no {WEIGHTS}"),
    "no weights": (change_weights(lambda weights: {"x": torch.zeros(1)}), "its files lack base_model"),
    "shape": (
        change_weights(lambda weights: weights | {MATRIX: weights[MATRIX][:, :-3].contiguous()}),
        "peft cannot load it (size mismatch for",
    ),
    "less": (
        change_weights(lambda weights: {name: weights[name] for name in weights.keys() - {MATRIX}}),
        "its files lack base_model",
    ),
    "more": (
        change_weights(lambda weights: weights | {MATRIX.replace(".1.", ".7."): torch.zeros(2, 16)}),
        "has no place for base_model.model.model.layers.7",
    ),
    "nan": (change_weights(lambda weights: weights | {MATRIX: weights[MATRIX] * torch.nan}), f"{MATRIX} has elements"),
    "infinite": (change_weights(lambda weights: weights[MATRIX].view(-1)[3:4].fill_(torch.inf) and None), "finite in"),
    "huge": (change_weights(lambda weights: weights | {MATRIX: weights[MATRIX] * 1e12}), "activations overflow"),
    "patterns": (change_config(alpha_pattern={"q_proj": 64}), "vLLM does not support its alpha_pattern"),
    "damaged": (config_text('{"base_model'), f"{CONFIG} is damaged"),
    "no base": (config_text("{}"), f"{CONFIG} is damaged"),
    "a list": (config_text("[]"), f"{CONFIG} is damaged"),
    "null": (config_text('{"base_model_name_or_path": null}'), f"{CONFIG} is damaged"),
    "bytes": (lambda folder: (folder / CONFIG).write_bytes(b"\xff" * 9), f"{CONFIG} is damaged"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_adapter_is_not_offered_until_it_is_mended(
    served: "adapters.Adapters", runs: Path, trained: Path, name: str
) -> None:
    change, problem = BROKEN[name]
    change(runs / "sql" / "adapter")
    engine = FakeEngine()
    refresh(served, engine)
    assert served.names == list(engine.lora_requests) == ["other"]
    assert problem in served.problems["sql"]
    shutil.copytree(trained, runs / "sql" / "adapter", dirs_exist_ok=True)
    refresh(served, engine)
    assert served.names == ["other", "sql"]
    assert served.problems == {}


def test_weights_must_be_finite_in_the_engines_data_type(base: Path, runs: Path) -> None:
    change_weights(lambda weights: weights | {MATRIX: weights[MATRIX] * 1e6})(runs / "sql" / "adapter")
    assert "of size" in AdapterCheck(str(base), 4, "bfloat16").problem(runs / "sql" / "adapter")
    assert "finite in float16" in AdapterCheck(str(base), 4, "float16").problem(runs / "sql" / "adapter")


def test_what_the_engine_refuses_is_not_offered(served: "adapters.Adapters") -> None:
    engine = FakeEngine()
    engine.reason = "x" * 5000
    refresh(served, engine)
    assert (served.names, engine.lora_requests) == ([], {})
    assert len(served.problems["sql"]) == adapters.MAX_PROBLEM


def test_only_adapters_of_the_model_are_offered(served: "adapters.Adapters", runs: Path, trained: Path) -> None:
    change_config(base_model_name_or_path="owner/another-model")(runs / "other" / "adapter")
    for name in ("tiny", ".trash"):  # `tiny` is the name of the base model
        shutil.copytree(trained, runs / name / "adapter")
    (runs / "a file").touch()
    (runs / "in-training").mkdir()
    engine = FakeEngine()
    refresh(served, engine)
    assert (served.names, served.problems) == (["sql"], {})


def test_an_unreachable_folder_changes_nothing(
    served: "adapters.Adapters", runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine()
    refresh(served, engine)

    def fail(*_: object) -> None:
        raise OSError("no network")

    for name in ("list_names", "read_text"):
        monkeypatch.setattr(adapters.storage, name, fail)
        refresh(served, engine)
        assert served.names == sorted(engine.lora_requests) == ["other", "sql"]
