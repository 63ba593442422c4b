"""Shows which models are served and how each fares; moves a canary's share, promotes it, rolls it back; ends a model.

inv models                            requests, errors and times of each since the last canary began
inv models -- --canary-percent 20     gives the canary that share of the requests
inv models -- --promote               puts the canary in the place of the model that it was tried against
inv models -- --roll-back             ends the canary
inv models -- --end NAME              ends an additional model, or `rag`
"""

from pipeline.ray_support import cli
from pipeline.serving.options import ModelsOptions

if __name__ == "__main__":
    cli.parse(ModelsOptions)  # before the imports below, which take seconds

import time

import ray
from ray import serve
from rich.console import Console
from rich.table import Table

import settings
from jobs import serve_llm, serve_rag
from pipeline.ray_support import job_secrets
from pipeline.serving import canary as canary_state
from pipeline.serving.options import CANARY, ROOT, ServeOptions, app_name

TIMES = ("first_p50_ms", "first_p95_ms", "whole_p50_ms", "whole_p95_ms")


def main(options: ModelsOptions) -> None:
    """Show which models are served and how each fares, or change what a canary gets."""
    cli.connect(log_to_driver=False)
    state = canary_state.actor()
    if options.canary_percent is not None:
        _canary(state)
        ray.get(state.give_canary.remote(options.canary_percent))
        print(f"the canary gets {options.canary_percent:g} % of the requests", flush=True)
    elif options.promote:
        _promote(state)
    elif options.roll_back:
        _canary(state)
        _end_canary(state)
    elif options.end:
        _end(state, options.end)
    else:
        _show(ray.get(state.apps.remote()))


def _canary(state: "ray.actor.ActorHandle") -> ServeOptions:
    """The options that the canary was served with."""
    options = ray.get(state.canary.remote())
    if not options:
        raise settings.UserError("there is no canary: inv submit serve_llm -- --model MODEL --canary-percent 5")
    return ServeOptions(**options)


def _promote(state: "ray.actor.ActorHandle") -> None:
    canary = _canary(state)
    job_secrets.load()
    serve_llm.deploy(canary.model_copy(update={"canary_percent": 0}))
    _end_canary(state)
    print(f"{canary.model} is in its place", flush=True)


def _end_canary(state: "ray.actor.ActorHandle") -> None:
    """End it when no replica hands requests on to it any more, so that none is lost."""
    ray.get(state.give_canary.remote(0, {}))
    time.sleep(2 * canary_state.REPORT_INTERVAL_S)
    serve.delete(app_name(CANARY))
    print("the canary is ended", flush=True)


def _end(state: "ray.actor.ActorHandle", name: str) -> None:
    apps = ray.get(state.apps.remote())
    others = [path for path in apps if path not in (ROOT, CANARY)]
    ends = {apps[path]["models"][0]: app_name(path) for path in others}
    if serve_rag.APP in serve.status().applications:
        ends[serve_rag.APP] = serve_rag.APP
    if name not in ends:
        known = ", ".join(ends) or "none is"
        raise settings.UserError(f"{name} is not an additional model ({known}): inv models")
    serve.delete(ends[name])
    ray.get(state.apps.remote())  # makes the traffic actor drop the app at once
    print(f"{name} is ended", flush=True)


def _show(apps: dict[str, dict]) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("model", "path", "share %", "requests", "errors", *(name.replace("_", " ") for name in TIMES)):
        table.add_column(column, header_style="dim", justify="left" if column in ("model", "path") else "right")
    for path, app in sorted(apps.items()):
        times = (f"{app[name]:.0f}" if name in app else "" for name in TIMES)
        model = ", ".join(app["models"])
        table.add_row(model, path, f"{app['percent']:g}", f"{app['requests']}", f"{app['errors']}", *times)
    Console(width=120).print(table if apps else "no model is served; serve one with: inv submit serve_llm")


if __name__ == "__main__":
    cli.run(main)
