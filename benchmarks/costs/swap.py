"""`osd bench swap`: how long a swap of the draft blocks the engine, compared with vLLM's own
draft-weight update.

Both arms load the same two checkpoints in turns into the same engine while streams run. Ours reads
and checks the file in a thread while the engine steps, and blocks it only to load. vLLM's update
blocks the engine throughout and checks nothing.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.engines import models
from benchmarks.engines.models import Size
from benchmarks.record import Goal, Notebook, Options, Protocol, Row
from benchmarks.result import Figure, Result, Spread
from benchmarks.stats import estimate, median_ratio, quantile
from osd.common import machine
from osd.config.schema import CaptureConfig
from osd.records import DraftRelease, encode

VOCABULARY, BATCH, K = 512, 8, 2
TARGET = Size(vocab_size=VOCABULARY, hidden_size=128, num_layers=2)
DRAFTS = {
    "tiny": Size(vocab_size=VOCABULARY, hidden_size=128, num_layers=2),
    "100 M": Size(vocab_size=VOCABULARY, hidden_size=768, num_layers=11),
    "500 M": Size(vocab_size=VOCABULARY, hidden_size=1536, num_layers=13),
}
STEPS_BEFORE, STEPS_AFTER = 10, 6
NUM_PROOFS = 8
"""Times the proof of a swap is made by itself."""
COST_SHAPED = "cost-shaped target"
RATIO = "blocked p99, ours / vLLM's"


def protocol(options: Options) -> Protocol:
    """What will be measured."""
    num_swaps = {"tiny": 4} if options.quick else {"tiny": 40, "100 M": 16, "500 M": 6}
    return Protocol(
        bench="swap",
        question="How long does a swap of the draft block running streams, and what does it hold "
        "in memory?",
        arms=("ours", "vllm"),
        order="ours, vllm, vllm, ours, ...; the first of each is not counted.",
        sizes={
            "drafts": {name: DRAFTS[name].config for name in num_swaps},
            "target": TARGET.config,
            "streams": BATCH,
            "k": K,
            "dtype": "float32",
            "num_swaps_per_arm": num_swaps,
            "vllm": "start_draft_weight_update, update_weights, finish_weight_update, reading a "
            "safetensors file",
        },
        goals=(Goal(figure=RATIO, at_most=1.5),),
    )


def run(options: Options) -> Result:
    """Measure all sizes, smallest first."""
    from benchmarks.engines import engine

    engine.prepare()
    plan = protocol(options)
    notebook = Notebook(options, plan)
    with tempfile.TemporaryDirectory(prefix="osd-bench-") as directory:
        if not options.quick:
            _measure_step(notebook)
        models.build(TARGET, Path(directory, "target"))
        for group, num_swaps in plan.sizes["num_swaps_per_arm"].items():
            options.say(f"{group}: {num_swaps} swaps in each arm")
            _measure(notebook, group, num_swaps, Path(directory))
    return summarise(plan, notebook.rows)


def _measure_step(notebook: Notebook) -> None:
    """One decode step of the cost-shaped target with the tiny draft: what a pause is compared
    with."""
    from benchmarks.engines.engine import Engine
    from osd.tiny.models import ensure, ensure_cost_shaped

    engine = Engine(ensure_cost_shaped(), models.release(ensure().draft, 1), k=4, batch=BATCH)
    prompts = np.random.default_rng(0).integers(2, 200, (BATCH, 16)).tolist()
    engine.burst(prompts, 16)
    gaps = [gap for _, gap in engine.burst(prompts, 64).gaps]
    notebook.add(group=COST_SHAPED, arm="step", gaps_s=gaps)


def _measure(notebook: Notebook, group: str, num_swaps: int, directory: Path) -> None:
    from benchmarks.engines.engine import Engine
    from benchmarks.engines.vllm_engine import file_weight_updates
    from serving.worker import start_settings

    paths = [directory / f"{group}-{version}" for version in (1, 2)]
    num_parameters = models.build(DRAFTS[group], paths[0])
    models.copy_with_noise(paths[0], paths[1], 0.01)
    releases = [models.release(path, version) for version, path in enumerate(paths, 1)]
    transfer = file_weight_updates()
    options: dict[str, Any] = {"max_model_len": 1024, "weight_transfer_config": transfer}
    engine = Engine(directory / "target", releases[0], k=K, batch=BATCH, **options)
    for one in (
        releases[1],
        releases[0],
    ):  # what vLLM itself keeps after a first update is not ours
        swap_under_load(engine, "vllm", one)
    memory = [machine.memory()]
    engine.rpc(
        "osd_start", start_settings(releases[0], CaptureConfig(), k=K, sink={}, target_id="bench")
    )
    engine.rpc("osd_detach")
    checksum = engine.rpc("osd_target_checksum")
    swap_under_load(engine, "ours", releases[0])
    for i in range(2 * num_swaps):
        arm = ("ours", "vllm", "vllm", "ours")[i % 4]
        notebook.add(group=group, arm=arm, **swap_under_load(engine, arm, releases[(i + 1) % 2]))
        memory.append(machine.memory())
    notebook.add(
        group=group,
        arm="engine",
        num_parameters=num_parameters,
        is_target_unchanged=engine.rpc("osd_target_checksum") == checksum,
        proof_s=engine.rpc("osd_time_proofs", NUM_PROOFS),
        memory=memory,
    )
    for path in paths:
        (path / "model.safetensors").unlink()


def swap_under_load(engine: Any, arm: str, release: DraftRelease) -> Row:
    """One swap in the midst of running streams. `arm`: `ours` or `vllm`."""
    swap = _Ours(engine.rpc, release) if arm == "ours" else _VLLMs(engine.rpc, release)
    watch = _Watch(swap)
    prompts = np.random.default_rng(release.version).integers(2, VOCABULARY, (BATCH, 16)).tolist()
    # All streams wait for the same steps: one gap of each says it all.
    gaps: dict[float, float] = {}
    while not swap.ended:  # on a fast engine streams end before the release is read
        gaps |= engine.burst(prompts, 1000, watch.is_over).gaps
    # A token is late when the swap was under way at any time since the one before it.
    touched = [gap for at, gap in gaps.items() if at > swap.began and at - gap <= swap.ended]
    return {
        "blocked_s": swap.blocked_s,
        "swap_s": swap.ended - swap.began,
        "quiet_s": median(gap for at, gap in gaps.items() if at <= swap.began),
        "gaps_s": touched,
        "staging_gaps_s": [gap for at, gap in gaps.items() if swap.began < at <= swap.loading],
    }


class _Ours:
    """Stage, ask until done, put, confirm: what a replica does. `turn` is called between steps."""

    def __init__(self, rpc: Callable[..., Any], release: DraftRelease) -> None:
        self._rpc, self._release = rpc, release
        self.began = self.loading = self.ended = self.blocked_s = 0.0

    def turn(self) -> None:
        started = time.perf_counter()
        if not self.began:
            self._rpc("osd_stage", encode(self._release).decode())
            self.began = started
        elif (staging := json.loads(self._rpc("osd_staging")))["done"]:
            assert not staging["error"], staging["error"]
            self.loading = started
            put = json.loads(self._rpc("osd_put", self._release.version, True))
            assert not put["error"], put["error"]
            assert sum(put["held"].values()) == put["expected"], "the swap did not land"
            self._rpc("osd_confirm")
            self.ended = time.perf_counter()
        self.blocked_s += time.perf_counter() - started


class _VLLMs:
    """vLLM's own three calls; a step between them would meet a draft without weights."""

    def __init__(self, rpc: Callable[..., Any], release: DraftRelease) -> None:
        self._rpc, self._path = rpc, str(Path(release.path) / "model.safetensors")
        self.began = self.loading = self.ended = self.blocked_s = 0.0

    def turn(self) -> None:
        self.began = self.loading = time.perf_counter()
        self._rpc("start_draft_weight_update")
        self._rpc("update_weights", update_info={"path": self._path})
        self._rpc("finish_weight_update")
        self.ended = time.perf_counter()
        self.blocked_s = self.ended - self.began


class _Watch:
    """Some steps in quiet, the swap, some steps more."""

    def __init__(self, swap: _Ours | _VLLMs) -> None:
        self._swap = swap
        self._num_before = self._num_after = 0

    def is_over(self) -> bool:
        if self._num_before < STEPS_BEFORE:
            self._num_before += 1
        elif not self._swap.ended:
            self._swap.turn()
        else:
            self._num_after += 1
        return self._num_after > STEPS_AFTER


def summarise(plan: Protocol, rows: Sequence[Row]) -> Result:
    """Figures per size of draft."""
    step_ms = [1e3 * median(row["gaps_s"]) for row in rows if row["group"] == COST_SHAPED]
    figures = [
        Figure(group=COST_SHAPED, name="one decode step", value=ms, unit="ms") for ms in step_ms
    ]
    spread = []
    for group in dict.fromkeys(row["group"] for row in rows if row["group"] != COST_SHAPED):
        mine = {
            arm: [r for r in rows if r["group"] == group and r["arm"] == arm]
            for arm in ("ours", "vllm", "engine")
        }
        blocked = {arm: [1e3 * r["blocked_s"] for r in mine[arm]] for arm in ("ours", "vllm")}
        figures += _blocked(group, blocked, step_ms)
        figures += [f for arm in ("ours", "vllm") for f in _late(group, arm, mine[arm])]
        figures += _staging(group, mine["ours"])
        figures += _engine(group, mine["engine"][0])
        spread += [
            (f"{group}, {arm}", estimate(values), tuple(values)) for arm, values in blocked.items()
        ]
    return Result(
        protocol=plan,
        figures=tuple(figures),
        drawings=(Spread(title="Time a swap blocks the engine", unit="ms", rows=tuple(spread)),),
    )


def _blocked(group: str, blocked: dict[str, list[float]], step_ms: Sequence[float]) -> list[Figure]:
    p99 = {arm: quantile(values, 0.99) for arm, values in blocked.items()}
    n = len(blocked["ours"])
    figures: list[Figure] = []
    for arm, name in (("ours", "ours"), ("vllm", "vLLM's")):
        figures.append(Figure.of(group, f"blocked p50, {name}", estimate(blocked[arm]), "ms"))
        figures.append(
            Figure(group=group, name=f"blocked p99, {name}", value=p99[arm], unit="ms", n=n)
        )
    figures.append(Figure(group=group, name=RATIO, value=p99["ours"] / p99["vllm"], n=n))
    figures.append(
        Figure.of(group, "blocked, ours / vLLM's", median_ratio(blocked["ours"], blocked["vllm"]))
    )
    if step_ms:
        steps = p99["ours"] / step_ms[0]
        figures.append(
            Figure(group=group, name="blocked p99, ours, in steps of the target", value=steps, n=n)
        )
    return figures


def _late(group: str, arm: str, rows: Sequence[Row]) -> list[Figure]:
    """By how much the latest token of each swap was late."""
    excess = [1e3 * (max(r["gaps_s"]) - r["quiet_s"]) for r in rows]
    name = "ours" if arm == "ours" else "vLLM's"
    return [
        Figure(
            group=group,
            name=f"inter-token excess {p}, {name}",
            value=quantile(excess, q),
            unit="ms",
            n=len(excess),
        )
        for p, q in (("p50", 0.5), ("p99", 0.99))
    ]


def _staging(group: str, rows: Sequence[Row]) -> list[Figure]:
    """What reading and checking beside the engine costs it: nothing to see where that takes less
    than two steps."""
    figures = [
        Figure.of(group, "swap as a whole, ours", estimate([1e3 * r["swap_s"] for r in rows]), "ms")
    ]
    long = [r for r in rows if len(r["staging_gaps_s"]) >= 2]
    if long:
        slower = median_ratio(
            [median(r["staging_gaps_s"]) for r in long], [r["quiet_s"] for r in long]
        )
        figures.append(Figure.of(group, "inter-token gap while staging / before", slower))
    return figures


def _proof(group: str, seconds: Sequence[float] | None) -> list[Figure]:
    """Nothing of runs that did not time it."""
    if not seconds:
        return []
    return [
        Figure.of(
            group, "blocked by the proof, of ours", estimate([1e3 * s for s in seconds]), "ms"
        )
    ]


def _engine(group: str, row: Row) -> list[Figure]:
    memory = row["memory"]
    mib = {key: [m[key] / (1 << 20) for m in memory] for key in memory[0]}
    changes = [abs(b - a) for a, b in pairwise(mib["anonymous"][-4:])]
    held = {key: median(values[1:]) - values[0] for key, values in mib.items()}
    return [
        Figure(group=group, name="parameters", value=row["num_parameters"] / 1e6, unit="M"),
        *_proof(group, row.get("proof_s")),
        Figure(
            group=group,
            name="memory held besides vLLM's",
            value=held["anonymous"],
            unit="MiB",
            n=len(memory),
        ),
        Figure(
            group=group,
            name="file pages held (can be dropped)",
            value=held["mapped"],
            unit="MiB",
            n=len(memory),
        ),
        Figure(
            group=group,
            name="memory change from swap to swap",
            value=max(changes, default=0.0),
            unit="MiB",
        ),
        Figure(
            group=group, name="target unchanged (1 = yes)", value=float(row["is_target_unchanged"])
        ),
    ]
