"""Self-contained HTML pages with plots, for `inv report` and `inv data`."""

from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from jinja2 import Environment, FileSystemLoader, StrictUndefined

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")  # color-blind safe
LOOK = {
    "template": "plotly_white",
    "colorway": COLORS,
    "width": 1240,
    "margin": {"l": 80, "r": 20, "t": 20, "b": 70},
    "font": {"family": "system-ui, sans-serif", "size": 13, "color": "#222222"},
}


def page(template: str, **values: Any) -> str:
    """Return a page as HTML. `template` is the path of a Jinja template in this folder."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(values)


def html(drawn: go.Figure, name: str, *, has_plotly: bool = False) -> str:
    """Return a plot as HTML, with the code of plotly if the page does not have it yet."""
    return drawn.update_layout(LOOK).to_html(
        full_html=False, include_plotlyjs=not has_plotly, div_id=name, config={"displaylogo": False}
    )
