"""Measures the latency of requests while a served model is updated, and while a canary starts and is promoted."""

import asyncio
from collections.abc import Callable

from benchmarks import harness, visitors
from benchmarks.report import Result, at_most
from benchmarks.visitors import CLEAN, RequestLog, Visitor
from raymill.serving import deploy, served_models
from raymill.serving.hooks import Hooks
from raymill.serving.options import ServeOptions

CLIENTS = 4
CALM_S = 60.0
LATER_S = 2.0


def measure() -> Result:
    """Run clients for a minute without changes, then during an update, the start of a canary and its promotion."""
    with visitors.served_model() as (options, answers):
        log, phases = asyncio.run(_update(options, answers))
    rows = list(visitors.by_phase(log, phases))
    calm, *disturbed = rows
    bars = [at_most(0, "requests that failed", sum(outcome not in CLEAN for _, _, outcome in log.ended))]
    for row in disturbed:
        later = row["longest_s"] - calm["p99_s"]
        bars.append(at_most(LATER_S, f"{row['phase']}: longest request, seconds beyond the undisturbed p99", later))
    return {"bars": bars, "rounds": rows, "words": log.messages}


async def _update(options: ServeOptions, answers: dict[str, str]) -> tuple[RequestLog, dict[str, float]]:
    log, phases = RequestLog(), {}
    over = asyncio.Event()

    async def phase(name: str, change: Callable[[], None]) -> None:
        await asyncio.to_thread(change)
        phases[name] = log.now()

    shorter = options.model_copy(update={"max_model_len": options.max_model_len - 1})
    canary = shorter.model_copy(update={"canary_percent": 50})
    async with visitors.clients(options) as (client, http):
        staying = asyncio.gather(
            *(
                Visitor(number, options, client, http, answers, log).run(visitors.POLITE, over.is_set)
                for number in range(CLIENTS)
            )
        )
        await asyncio.sleep(CALM_S)
        phases["undisturbed"] = log.now()
        await phase("an update", lambda: deploy.deploy_model(shorter, Hooks()))
        await phase("a canary", lambda: deploy.deploy_model(canary, Hooks()))
        await phase("its promotion", lambda: served_models.promote(drain_s=None))
        over.set()
        await staying
    return log, phases


if __name__ == "__main__":
    harness.main(measure)
