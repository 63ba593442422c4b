"""Upload the trained model of a run to the Hugging Face hub, with a generated model card. `inv publish` runs this."""

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pyarrow.fs
from huggingface_hub import CommitOperationAdd, HfApi

from raymill import settings
from raymill.errors import UserError
from raymill.model_config import other_parts
from raymill.ray_support import job_secrets
from raymill.training import history, model_card, preflight, storage
from raymill.training.options import DDPOptions

CARD = "README.md"


def publish(name: str, repository: str, license_id: str, *, public: bool) -> str:
    """Upload the model in one commit, and return its URL. Creates a private repository, unless it exists.

    Raises:
        UserError: the run has no model, there is no token, or the hub refuses.
    """
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        raise UserError(f"{repository!r} is not the name of a repository. Pass --to OWNER/NAME")
    output = settings.resolve(settings.load(DDPOptions, "train").output)
    [run] = history.read_all(output, [name])
    token = os.environ.get("HF_TOKEN") or job_secrets.read(["HF_TOKEN"]).get("HF_TOKEN")
    if not token:
        raise UserError(
            "HF_TOKEN is not set. Put a token that may write, from https://huggingface.co/settings/tokens, into .env"
        )
    api = HfApi(token=token)
    with _local_copy(f"{output}/{name}/model") as folder:
        files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != CARD)
        is_adapter = (folder / "adapter_config.json").exists()
        if not is_adapter and not (folder / "config.json").exists():
            raise UserError(
                f"the run {name} has no exported model yet. Finish it: {settings.inv('submit finetune_ddp')}"
            )
        parts = () if is_adapter else other_parts(preflight.load_config(str(folder)))
        title = repository.partition("/")[2]
        card = model_card.card(run, title, license_id, is_adapter=is_adapter, other_parts=parts)
        operations = [CommitOperationAdd(str(path.relative_to(folder)), path) for path in files]
        operations.append(CommitOperationAdd(CARD, card.encode()))
        print(f"uploading {sum(path.stat().st_size for path in files) / 2**20:,.0f} MiB to {repository}", flush=True)
        try:
            url = api.create_repo(repository, private=not public, exist_ok=True)
            api.create_commit(repository, operations, commit_message=f"Upload the model of the run {name}")
        except (httpx2.HTTPError, OSError, ValueError) as error:  # ValueError: the hub knows no such license
            reason = " ".join(str(error).split())
            raise UserError(
                f"the hub did not take {repository} ({reason}). Check the license and the token's permissions, then "
                "run it again"
            ) from None
    return str(url)


@contextmanager
def _local_copy(location: str) -> Iterator[Path]:
    """Yield the folder of the model. Downloads it if it is in the bucket."""
    if storage.is_local(location):
        yield Path(location)
        return
    with tempfile.TemporaryDirectory() as folder:
        filesystem, path = pyarrow.fs.FileSystem.from_uri(location)
        pyarrow.fs.copy_files(path, folder, source_filesystem=filesystem)
        yield Path(folder)
