"""`osd bench capture`: what capture costs the engine.

There is one engine per vocabulary and batch. The capture hook is installed and removed between
bursts, so both arms run the same code on the same weights, prompts and tokens, a second apart. The
models differ only in their vocabularies, because capture copies rows of logits.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engines import models
from benchmarks.record import Goal, Notebook, Options, Protocol, Row
from benchmarks.result import Figure, Lines, Result, Spread
from benchmarks.stats import Estimate, estimate, median_ratio
from osd.config.schema import CaptureConfig

VOCABULARIES = {"tiny": 512, "real": 151_936}
HIDDEN_SIZE, NUM_LAYERS, NOISE, K = 128, 2, 0.05, 4
RATIO = "tokens/s, on / off"


def protocol(options: Options) -> Protocol:
    """What will be measured. Pairs and tokens are fewer where a step is slow."""
    pairs = (
        {"tiny/8": 4}
        if options.quick
        else {"tiny/8": 60, "tiny/64": 24, "real/8": 30, "real/64": 8}
    )
    return Protocol(
        bench="capture",
        question="How much slower is an engine that is being captured, and what does a stored row "
        "weigh?",
        arms=("on", "off"),
        order="Pairs of bursts of the same requests; off first in one pair, on first in the next.",
        sizes={
            "models": f"random Llama, hidden {HIDDEN_SIZE}, {NUM_LAYERS} layers; "
            f"draft = target with {NOISE:.0%} noise",
            "vocabularies": VOCABULARIES,
            "k": K,
            "num_pairs": pairs,
            "num_tokens": {"tiny/8": 96, "tiny/64": 64, "real/8": 48, "real/64": 24},
            "prompt_tokens": 16,
            "capture": CaptureConfig().model_dump(),
        },
        goals=(Goal(figure=RATIO, bound="low", at_least=0.98),),
    )


def run(options: Options) -> Result:
    """Measure all pairs."""
    from benchmarks.engines import engine

    engine.prepare()
    plan = protocol(options)
    notebook = Notebook(options, plan)
    with tempfile.TemporaryDirectory(prefix="osd-bench-") as directory:
        for name, size in VOCABULARIES.items():
            if not any(group.startswith(name + "/") for group in plan.sizes["num_pairs"]):
                continue
            target, draft = Path(directory, name), Path(directory, name + "-draft")
            models.build(
                models.Size(vocab_size=size, hidden_size=HIDDEN_SIZE, num_layers=NUM_LAYERS), target
            )
            models.copy_with_noise(target, draft, NOISE)
            for group in (g for g in plan.sizes["num_pairs"] if g.startswith(name + "/")):
                options.say(f"{group}: {plan.sizes['num_pairs'][group]} pairs")
                _measure(notebook, plan, group, target, draft)
    return summarise(plan, notebook.rows)


def _measure(notebook: Notebook, plan: Protocol, group: str, target: Path, draft: Path) -> None:
    from benchmarks.engines.engine import Engine
    from serving.worker import start_settings

    name, batch = group.split("/")
    release = models.release(draft, 1)
    engine = Engine(target, release, k=K, batch=int(batch))
    settings = start_settings(release, CaptureConfig(), k=K, sink={}, target_id="bench", seed=0)
    engine.rpc("osd_start", settings)
    engine.rpc("osd_detach")
    rng = np.random.default_rng(0)
    for pair in range(
        -1, plan.sizes["num_pairs"][group]
    ):  # the first pair warms up and is not kept
        shape = (int(batch), plan.sizes["prompt_tokens"])
        prompts = rng.integers(2, VOCABULARIES[name], shape).tolist()
        arms = ("on", "off") if pair % 2 else ("off", "on")
        rows = {arm: _burst(engine, arm, prompts, plan.sizes["num_tokens"][group]) for arm in arms}
        assert rows["on"].pop("outputs") == rows["off"].pop("outputs"), "capture changed an answer"
        for arm in arms if pair >= 0 else ():
            notebook.add(group=group, pair=pair, arm=arm, **rows[arm])


def _burst(engine: Any, arm: str, prompts: list[list[int]], num_tokens: int) -> Row:
    """One burst in one arm, the capture thread's backlog included where there is one."""
    before = json.loads(engine.rpc("osd_costs"))
    if arm == "on":
        engine.rpc("osd_attach")
    found = engine.burst(prompts, num_tokens)
    ended = time.perf_counter()
    row: Row = {
        "seconds": found.seconds,
        "num_tokens": found.num_tokens,
        "engine_cpu_s": found.cpu_s,
        "outputs": found.outputs,
    }
    if arm == "off":
        return row
    engine.rpc("osd_drain")
    row["backlog_s"] = time.perf_counter() - ended
    after = json.loads(engine.rpc("osd_costs"))
    engine.rpc("osd_detach")
    row["hook_cpu_s"] = after["hook_cpu_s"]
    row["thread_cpu_s"] = after["thread_cpu_s"] - before["thread_cpu_s"]
    row["sent"] = {key: after["sent"][key] - before["sent"][key] for key in after["sent"]}
    row["skipped"] = {key: n - before["skipped"].get(key, 0) for key, n in after["skipped"].items()}
    return row


def summarise(plan: Protocol, rows: Sequence[Row]) -> Result:
    """Figures per vocabulary and batch."""
    figures: list[Figure] = []
    ratios: list[tuple[str, Estimate, tuple[float, ...]]] = []
    lines: dict[str, tuple[tuple[float, float], ...]] = {}
    for group in dict.fromkeys(row["group"] for row in rows):
        on, off = (
            [r for r in rows if r["group"] == group and r["arm"] == arm] for arm in ("on", "off")
        )
        # What capture has left to do after the last token counts as if the engine stood still.
        speeds = [
            [r["num_tokens"] / (r["seconds"] + r.get("backlog_s", 0.0)) for r in arm]
            for arm in (on, off)
        ]
        ratio = median_ratio(*speeds)
        observed = tuple(a / b for a, b in zip(*speeds, strict=True))
        ratios.append((_title(group), ratio, observed))
        lines[_title(group)] = tuple((float(i), r) for i, r in enumerate(observed))
        figures += [Figure.of(_title(group), RATIO, ratio), *_costs(_title(group), on, off, speeds)]
    return Result(
        protocol=plan,
        figures=tuple(figures),
        drawings=(
            Spread(
                title="Throughput, capture on over off",
                unit="ratio",
                rows=tuple(ratios),
                reference=1.0,
            ),
            Lines(title="The same, pair by pair", x_label="pair", y_label="ratio", lines=lines),
        ),
    )


def _costs(
    group: str, on: Sequence[Row], off: Sequence[Row], speeds: Sequence[Sequence[float]]
) -> list[Figure]:
    num_tokens = [r["num_tokens"] for r in on]

    def per_token(key: str) -> Estimate:
        return estimate([1e6 * r[key] / n for r, n in zip(on, num_tokens, strict=True)])

    cpu = median_ratio([r["engine_cpu_s"] for r in on], [r["engine_cpu_s"] for r in off])
    sent = {key: sum(r["sent"][key] for r in on) for key in on[0]["sent"]}
    skipped = sum(sum(r["skipped"].values()) for r in on)
    num_rows = max(sent["rows"], 1)
    return [
        Figure.of(group, "tokens/s, off", estimate(speeds[1]), "/s"),
        Figure.of(group, "CPU of the engine's thread, on / off", cpu),
        Figure.of(group, "CPU in the hot path per output token", per_token("hook_cpu_s"), "µs"),
        Figure.of(
            group, "CPU of the capture thread per output token", per_token("thread_cpu_s"), "µs"
        ),
        Figure.of(
            group, "backlog after a burst", estimate([1e3 * r["backlog_s"] for r in on]), "ms"
        ),
        Figure(
            group=group, name="rows stored per output token", value=sent["rows"] / sum(num_tokens)
        ),
        Figure(
            group=group,
            name="bytes per stored row",
            value=sent["bytes"] / num_rows,
            unit="B",
            n=sent["rows"],
        ),
        Figure(group=group, name="traces or steps dropped", value=skipped, n=len(on)),
    ]


def _title(group: str) -> str:
    name, batch = group.split("/")
    return f"{VOCABULARIES[name]:,} tokens, batch {batch}"
