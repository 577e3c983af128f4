"""The runs behind `osd bench papers_methods`: what `osd evaluate` measures of each method, and what
the bound says of a draft, as raw rows."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.record import Row
from osd.evaluate.plan import Load, Models, Plan
from osd.evaluate.runs import Request, Run, Served

VLLM = {
    "dtype": "float32",
    "enforce_eager": True,
    "kv_cache_memory_bytes": 512 << 20,
    "max_model_len": 512,
}
"""The largest batch of the larger target fits the KV cache: nothing is computed twice."""
SEED = 91_000
"""Of the traffic."""
ASKED, AGAIN = "asked", "asked again"
"""A question; and one that was asked and answered before, in the same conversation."""
BLEU = 4
"""Longest n-grams that are compared."""


def measure(
    name: str, shape: tuple[int, int, int], sizes: Mapping[str, Any], say: Callable[[str], None]
) -> Iterator[Row]:
    """Rows of one size of target. {"what": "run", ...}: of each run. {"what": "request", ...}: of
    each request of the runs at batch 1."""
    from osd.config.schema import Config
    from osd.evaluate import forms
    from osd.evaluate.command import ONE_THREAD, Asked, Evaluation
    from osd.tiny.models import ensure, ensure_cost_shaped

    target = ensure_cost_shaped(*shape)
    given = {"target": str(target), "vllm": dict(VLLM), "env": dict(ONE_THREAD)}
    config = Config()
    config = config.model_copy(update={"serving": config.serving.model_copy(update=given)})
    plan = Plan(
        methods=tuple(sizes["methods"]),
        lengths=(sizes["k"],),
        loads=tuple(Load(streams=batch) for batch in sizes["batches"]),
        num_repeats=sizes["repeats"],
    )
    with tempfile.TemporaryDirectory(prefix="osd-bench-") as directory:
        data = Path(directory) / "requests.jsonl"
        data.write_text("".join(json.dumps(one) + "\n" for one in traffic(sizes["requests"])))
        asked = Asked(
            config=config,
            data=(forms.read(data),),
            traffic={},
            num_requests=2 * sizes["requests"],
            max_tokens=sizes["max_tokens"],
            seed=0,
            out=Path(directory) / "runs",
        )
        evaluation = Evaluation(asked, Models(target=target, draft=ensure().draft), plan, say)
        evaluation.run()
        requests = evaluation.directory.requests()
        for engine in plan.engines:
            for planned in plan.runs(engine):
                run = evaluation.directory.read(planned)
                where = {
                    "size": name,
                    "engine": engine,
                    "method": run.method,
                    "batch": planned.load.streams,
                    "repeat": run.repeat,
                }
                yield {"what": "run", **where, **of_run(run, requests)}
                if planned.load.streams == 1:
                    for one in run.requests:
                        yield {"what": "request", **where, **of_request(one, requests[one.index])}


def traffic(num: int) -> list[dict[str, Any]]:
    """`num` questions of the kind that the draft knows, and `num` others asked again."""
    from osd.tiny.traffic import HOME, requests

    found = []
    for place, one in enumerate(requests(HOME, 2 * num, SEED)):
        question = {"role": "user", "content": one.prompt}
        if place < num:
            found.append({"messages": [question], "data": ASKED})
        else:
            answer = {"role": "assistant", "content": one.answer}
            found.append({"messages": [question, answer, question], "data": AGAIN})
    return found


def of_run(run: Run, requests: Sequence[Request]) -> Row:
    """{"tokens_per_second", "step_ms", "parts_ms", "tested", "accepted"}: the last two by
    position in the draft."""
    from osd.evaluate.figures import figures_of

    (found,) = figures_of([run], requests)
    return {
        "tokens_per_second": found.tokens_per_second,
        "step_ms": found.step_ms,
        "parts_ms": found.parts_ms,
        "tested": found.by_draft_position.tested,
        "accepted": found.by_draft_position.accepted,
    }


def of_request(one: Served, request: Request) -> Row:
    """{"index", "data", "bleu", "seconds", "accepted"}: seconds after the first token; accepted
    draft tokens of each step, 0 where nothing was proposed."""
    return {
        "index": one.index,
        "data": request.data,
        "bleu": bleu(one.token_ids, request.prompt_ids),
        "seconds": one.ended - one.first_at,
        "accepted": [part.accepted for part in one.steps if part.at > 0],
    }


def bleu(answer: Sequence[int], prompt: Sequence[int]) -> float:
    """BLEU-4 of an answer against its prompt, by tokens: geometric mean of the shares of its 1- to
    4-grams that the prompt has, each counted as often as there at most. Without the penalty for
    short answers, as no prompt is a reference for length."""
    product = 1.0
    for n in range(1, BLEU + 1):
        own, there = _ngrams(answer, n), _ngrams(prompt, n)
        product *= (own & there).total() / max(own.total(), 1)
    return float(product ** (1 / BLEU))


def _ngrams(tokens: Sequence[int], n: int) -> Counter[tuple[int, ...]]:
    return Counter(tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1))


def gaps(draft: str, noise: float, sizes: Mapping[str, Any]) -> list[Row]:
    """{"what": "gap", "draft", "batch", "plain_s", "fixed_s", "oracle_s"}: by request, seconds
    without speculation, with k draft tokens in every step, and with exactly as many as will be
    accepted, at published prices. For a process of its own."""
    from benchmarks.drift import jobs
    from benchmarks.engines import models
    from benchmarks.replays.served import TARGET_ID
    from benchmarks.traffic.family import FAMILIES, FIRST_SERVED
    from benchmarks.traffic.recordings import take
    from osd.evaluate.bound.published import EAGLE, WIDEST, published
    from osd.evaluate.bound.replay import runs_of_draft
    from osd.evaluate.bound.rules import fixed, oracle
    from osd.evaluate.bound.runs import RequestRuns
    from osd.evaluate.bound.speeds import speeds
    from osd.tiny.traffic import HOME
    from trainer.draft import load_draft

    jobs.one_thread()
    with tempfile.TemporaryDirectory(prefix="osd-bench-") as directory:
        source = FAMILIES["tiny"].models()[1]
        model = load_draft(models.copy_with_noise(source, Path(directory), noise))
        runs = [
            RequestRuns(
                num_prompt=len(one.prompt_ids),
                num_output=len(one.output_ids),
                proposers={EAGLE: runs_of_draft(model, one.bare_trace(TARGET_ID), WIDEST)},
            )
            for one in take("tiny", HOME, FIRST_SERVED, sizes["num_recorded"])
        ]
    rules = {"fixed": fixed(EAGLE, sizes["k"]), "oracle": oracle((EAGLE,))}
    rows = []
    for batch in sizes["gap_batches"]:
        found = speeds(runs, published(batch), rules)
        seconds = {f"{rule}_s": one.seconds_R.tolist() for rule, one in found.items()}
        plain_s = found["fixed"].plain_R.tolist()
        rows.append({"what": "gap", "draft": draft, "batch": batch, "plain_s": plain_s, **seconds})
    return rows
