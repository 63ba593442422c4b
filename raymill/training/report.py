"""Compares runs on one self-contained HTML page, for `inv report`."""

import html
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import cycle, groupby
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from raymill import plots, settings
from raymill.data.report import DataReport, lengths
from raymill.plots import COLORS
from raymill.training import history
from raymill.training.history import History, Line
from raymill.training.options import DDPOptions

FILE = settings.PROJECT / "results" / "report.html"
TEMPLATE = "training/report.html.jinja"
PANELS = {"loss": "loss", "grad_norm": "gradient norm", "lr": "learning rate", "tokens_per_s": "tokens/s"}
HEIGHTS = (0.49, 0.17, 0.17, 0.17)
MARKS = {"evaluation": "circle", "checkpoint": "diamond", "restart": "x"}
SIZES = {"evaluation": 8, "checkpoint": 9, "restart": 13}
GREY = "#777777"
SHOWN = ("run", "steps", "loss", "best evaluation", "exported", "tokens/s", "time", "restarts")
STEP, HOURS = "step", "hours since the first start"
UNKNOWN = "—"

Price = Callable[[str, int], float | None]
"""Takes the name and the number of the devices. Returns the price of their machines in dollars per hour, if known."""

Summary = list[dict[str, str]]
"""A table with one row per run. Each row maps column names to cells."""


@dataclass(frozen=True)
class Curve:
    """The curve of one metric of a run."""

    run: History
    rows: list[Line]
    metric: str
    style: dict[str, Any]

    @property
    def panel(self) -> int:
        """Number of the panel that shows the curve. The panel at the top is 1."""
        return list(PANELS).index(self.metric.removeprefix("eval_")) + 1

    @property
    def steps(self) -> list[int]:
        return [row["step"] for row in self.rows]

    @property
    def hours(self) -> list[float]:
        """Hours since the first start of the run."""
        return [(row["time"] - self.run.events[0]["time"]) / 3600 for row in self.rows]

    @property
    def values(self) -> list[float]:
        return [row[self.metric] for row in self.rows]


def draw(names: Sequence[str], price: Price, console: Console) -> None:
    """Write the page about the runs with these names, or about all runs if `names` is empty, and print its table.

    Raises:
        UserError: there are no runs, one of the names does not exist, or the runs cannot be read.
    """
    output = settings.resolve(settings.load(DDPOptions, "train").output)
    runs = history.read_all(output, names)
    summary = summarize(runs, price)
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(page(runs, summary, output), encoding="utf-8")
    console.print(_table(summary))
    console.print(f"curves: {FILE}", soft_wrap=True, highlight=False, markup=False)


def summarize(runs: list[History], price: Price) -> Summary:
    """Return the table of the runs, without columns that are unknown for all of them."""
    rows = [_cells(run, price) for run in runs]
    known = [column for column in rows[0] if any(row[column] != UNKNOWN for row in rows)]
    return [{column: row[column] for column in known} for row in rows]


def page(runs: list[History], summary: Summary, output: str) -> str:
    """Return the page as HTML."""
    data = data_reports(runs)
    return plots.page(
        TEMPLATE,
        output=output,
        drawn=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        summary=list(zip(summary, cycle(COLORS))),
        names=[run.name for run in runs],
        identities={key: [_shown(run.identity.get(key, "")) for run in runs] for run in runs for key in run.identity},
        figure=plots.html(figure(runs), "curves"),
        data=data,
        lengths=plots.html(lengths(data), "lengths", has_plotly=True),
    )


def _shown(value: Any) -> Any:
    return ", ".join(map(str, value)) if isinstance(value, list) else value


def figure(runs: list[History]) -> go.Figure:
    """Return stacked panels, plotted against the steps or, after a click, against the hours since each run started."""
    panels = make_subplots(len(PANELS), 1, shared_xaxes=True, vertical_spacing=0.025, row_heights=HEIGHTS)
    colored = list(zip(runs, cycle(COLORS)))
    curves = [curve for draw in (_lines, _marks) for run, color in colored for curve in draw(run, color)]
    for curve in curves:
        group = html.escape(curve.run.name)
        trace = go.Scatter(x=curve.steps, y=curve.values, **{"legendgroup": group, "name": group} | curve.style)
        panels.add_trace(trace, curve.panel, 1)
    for mark in MARKS:
        legend = go.Scatter(x=[None], y=[None], name=mark, mode="markers", marker=_marker(mark, GREY))
        panels.add_trace(legend, 1, 1)
    for panel, title in enumerate(PANELS.values(), 1):
        panels.update_yaxes(title_text=title, row=panel)
    panels.update_xaxes(title_text=STEP, row=len(PANELS))
    panels.update_yaxes(row=2, type="log", nticks=4, tickformat="~g")  # otherwise a spike flattens everything else
    panels.update_yaxes(row=3, exponentformat="power")
    panels.update_yaxes(row=4, rangemode="tozero")
    panels.update_layout(
        height=900,
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.01, "x": 0},
        hovermode="x",
        updatemenus=[_switch(curves)],
    )
    return panels


def _lines(run: History, color: str) -> Iterator[Curve]:
    for metric in PANELS:
        look = {"mode": "lines", "line": {"color": color, "width": 1.2}, "opacity": 0.7}
        yield Curve(run, run.rows, metric, look | {"showlegend": metric == "loss"})


def _marks(run: History, color: str) -> Iterator[Curve]:
    """Yield marks on the loss curve: evaluations, checkpoints, and the first step after each restart."""
    by_step = {row["step"]: row for row in run.rows}
    marked = {
        "evaluation": (run.evaluations, "eval_loss", "lines+markers"),
        "checkpoint": ([by_step[step] for step in run.checkpoints if step in by_step], "loss", "markers"),
        "restart": ([by_step[step + 1] for step in run.restarts if step + 1 in by_step], "loss", "markers"),
    }
    for mark, (rows, metric, mode) in marked.items():
        name = f"{html.escape(run.name)}, {mark}"
        look = {"mode": mode, "marker": _marker(mark, color), "line": {"color": color, "width": 1.5, "dash": "dot"}}
        yield Curve(run, rows, metric, look | {"name": name, "showlegend": False})


def _marker(mark: str, color: str) -> dict[str, Any]:
    inside, edge = ("white", color) if mark == "checkpoint" else (color, "white")
    return {"symbol": MARKS[mark], "color": inside, "size": SIZES[mark], "line": {"color": edge, "width": 1.5}}


def _switch(curves: list[Curve]) -> dict[str, Any]:
    """Return two buttons that switch the x axis between steps and hours."""

    def button(title: str, values: list[list[Any]]) -> dict[str, Any]:
        bottom = f"xaxis{len(PANELS)}.title.text"
        arguments = [{"x": values}, {bottom: title, "xaxis.autorange": True}, list(range(len(curves)))]
        return {"label": title, "method": "update", "args": arguments}

    return {
        "type": "buttons",
        "direction": "right",
        "buttons": [
            button(STEP, [curve.steps for curve in curves]),
            button(HOURS, [curve.hours for curve in curves]),
        ],
        "x": 1,
        "xanchor": "right",
        "y": -0.035,
        "yanchor": "top",
    }


def _cells(run: History, price: Price) -> dict[str, str]:
    last, workers = run.rows[-1], run.attempts[-1].start
    best = run.ranking.best(run.evaluations)
    exported = {row["step"]: row for row in run.rows[:-1]}.get(run.export["step"]) if run.export else None
    mfu = [row["mfu"] for row in run.rows if "mfu" in row]
    gpu_hours, dollars = _cost(run, price)
    numbers = " → ".join(str(number) for number, _ in groupby(attempt.start["world_size"] for attempt in run.attempts))
    return {
        "run": run.name,
        "strategy": f"{workers['strategy']}, {workers['precision']}",
        "workers": f"{numbers} × {workers['device'].removeprefix('NVIDIA ')}",
        "steps": f"{last['step']:,}/{run.identity['steps']:,}{', stopped early' if run.stopped_early else ''}",
        "loss": f"{last['loss']:.4f}",
        "best evaluation": _evaluation(run, best),
        "exported": _evaluation(run, exported),
        "tokens/s": f"{statistics.median(row['tokens_per_s'] for row in run.rows):,.0f}",
        "MFU": f"{statistics.median(mfu):.1%}" if mfu else UNKNOWN,
        "time": str(timedelta(seconds=round(run.seconds))),
        "restarts": str(len(run.restarts)),
        "steps lost": str(run.steps_lost),
        "GPU-hours": UNKNOWN if gpu_hours is None else f"{gpu_hours:,.2f}",
        "dollars": UNKNOWN if dollars is None else f"≈ {dollars:,.2f}",
    }


def _evaluation(run: History, row: Line | None) -> str:
    """Return the metric that ranks the run's checkpoints, at a step."""
    if row is None:
        return UNKNOWN
    metric = run.ranking.metric
    name = "" if metric == "eval_loss" else f"{metric.removeprefix('eval_')} "
    return f"{name}{row[metric]:.4f} at {row['step']:,}" if metric in row else f"step {row['step']:,}"


def _cost(run: History, price: Price) -> tuple[float | None, float | None]:
    """Return the GPU-hours and the dollars of a run: None for a run without GPUs, and no dollars without prices."""
    on_gpus = [attempt for attempt in run.attempts if attempt.start["device"] != "cpu"]
    if not on_gpus:
        return None, None
    hours = [attempt.seconds / 3600 for attempt in on_gpus]
    workers = [attempt.start["world_size"] for attempt in on_gpus]
    prices = [price(attempt.start["device"], attempt.start["world_size"]) for attempt in on_gpus]
    gpu_hours = sum(number * time for number, time in zip(workers, hours, strict=True))
    known = [dollars * time for dollars, time in zip(prices, hours, strict=True) if dollars is not None]
    return gpu_hours, sum(known) if len(known) == len(hours) else None


def _table(summary: Summary) -> Table:
    """Return the table for a terminal, with only the columns in SHOWN."""
    table = Table(box=None, pad_edge=False)
    shown = [column for column in SHOWN if column in summary[0]]
    for column in shown:
        table.add_column(column, header_style="dim", overflow="fold", justify="left" if column == "run" else "right")
    for cells in summary:
        table.add_row(*(escape(cells[column]) for column in shown))
    return table


def data_reports(runs: Iterable[History]) -> list[DataReport]:
    """Return a report for each dataset of the runs, except for streams and for data from older project versions."""
    manifests: dict[str, dict[str, Any]] = {}
    names = defaultdict(list)
    for run in runs:
        if run.data and "sources" in run.data:
            short = run.data["content_hash"][:12]
            manifests[short] = run.data
            names[short].append(run.name)
    return [DataReport(short, names[short], manifest) for short, manifest in manifests.items()]
