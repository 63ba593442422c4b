"""Run Prometheus on this machine, which collects the metrics of a cluster. `inv metrics` runs this."""

import json
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from raymill import network, settings
from raymill.errors import UserError
from raymill.target import Connection

PORT = 9099  # the service of Debian's package uses Prometheus's own port, 9090
BOARDS = Path("raymill/dashboards")


def run(connection: Connection) -> None:
    """Collect metrics until Ctrl-C. They are kept, so that the next call continues.

    Raises:
        UserError: Prometheus is not installed, or ends by itself.
    """
    program = shutil.which("prometheus")
    if not program:
        raise UserError("not installed: prometheus. Run: sudo apt-get install prometheus")
    if not network.is_free(PORT):
        raise UserError(f"port {PORT} is in use. End the other `inv metrics`, then run it again")
    data = settings.PROJECT / ".cluster" / "prometheus" / connection.target
    data.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:  # only its owner can read the token in it
        file = Path(folder, "prometheus.yml")
        file.write_text(json.dumps(_configuration(connection)))  # JSON is YAML
        options = [f"--config.file={file}", f"--storage.tsdb.path={data}", f"--web.listen-address=127.0.0.1:{PORT}"]
        process = subprocess.Popen([program, *options, "--log.level=warn"])
        print(f"Prometheus runs at http://127.0.0.1:{PORT} until Ctrl-C; boards for Grafana: {BOARDS}/", flush=True)
        _wait(process)


def _configuration(connection: Connection) -> dict[str, Any]:
    """Return the configuration. Ray lists its nodes at the URL, and updates its metrics every ten seconds.

    https://prometheus.io/docs/prometheus/latest/configuration/configuration/
    """
    token = connection.headers["Authorization"].removeprefix("Bearer ")
    # without the type, 2.42 sends the bare token
    authorization = {"authorization": {"type": "Bearer", "credentials": token}}
    nodes = {"url": f"{connection.dashboard}/api/prometheus/sd", "refresh_interval": "10s", **authorization}
    job: dict[str, Any] = {"job_name": "ray", "http_sd_configs": [nodes]}
    if relay := connection.relay_metrics():
        node = {"source_labels": ["__address__"]}
        path = node | {"target_label": "__metrics_path__", "replacement": "/$1"}
        ask_relay = {"target_label": "__address__", "replacement": relay}
        job |= {"relabel_configs": [node | {"target_label": "instance"}, path, ask_relay], **authorization}
    return {"global": {"scrape_interval": "10s"}, "scrape_configs": [job]}


def _wait(process: subprocess.Popen) -> None:
    """Wait for Prometheus, and end it with this process."""
    for number in (signal.SIGTERM, signal.SIGHUP):  # on SIGHUP, Prometheus would keep running
        signal.signal(number, lambda *_: sys.exit(1))
    try:
        if code := process.wait():
            raise UserError(
                f"Prometheus ended with exit code {code}; its messages are above. Run: {settings.inv('metrics')}"
            )
    except KeyboardInterrupt:
        pass
    finally:
        process.terminate()
        process.wait()
