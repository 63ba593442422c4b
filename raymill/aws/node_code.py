"""The code that a node runs outside of jobs: the watchdog, the copying of logs, and all that these import.

If only this code changes, `inv up` copies it to the running nodes and restarts these processes there, without stopping
Ray or any job.
"""

from raymill import settings
from raymill.aws import head, images, launcher_file, ray_up, source_hash, ssh
from raymill.common import instances
from raymill.common.cluster_file import ClusterFile, target
from raymill.errors import UserError

ON_NODES = settings.PROJECT / "raymill" / "node"


def follow(file: ClusterFile, running: instances.Instance) -> None:
    """Give the running nodes the code of this project's folder, if theirs differs.

    Raises:
        UserError: a node could not be reached, or its watchdog does not run with the new code.
    """
    current = digest()
    if running.tags.get(instances.NODE_CODE_TAG) == current:
        return
    print("the watchdog's code has changed: copying it to the nodes, and restarting the watchdog. Jobs keep running")
    launcher_file.write(images.keep(file, running))
    ray_up.copy_files()
    try:
        print(ssh.find_head(file).run("cd ~/project && python -m raymill.node.restart head").strip())
    except UserError as error:
        raise UserError(
            f"{error}. Without a watchdog, a machine shuts down after ten minutes, so correct that now, then run: "
            f"inv up --target {target()}"
        ) from None
    head.tag(file, {instances.NODE_CODE_TAG: current})


def digest() -> str:
    """Return a hash of the code that a node runs outside of jobs."""
    return source_hash.of(ON_NODES.glob("*.py"))
