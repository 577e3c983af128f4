"""`osd bench pools`: do drafts that make up for one another bring more than one draft's wider tree?

    recorded answers ─► `osd train --pool 3` ─► trees of 1, 2, 3 drafts, merged   (chains each)
                                         └────► draft 1 alone, as many nodes      (a wider tree)

Traffic of several kinds, none of which the first draft learnt; draft 1 of the pool learns from all
of it, the next from what those before do not reproduce (SpecInfer, arXiv 2305.09781, section 3).
Both arms propose trees three deep, of as many nodes before equal paths merge.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.record import Goal, Notebook, Options, Protocol, Row
from benchmarks.result import Figure, Result
from benchmarks.stats import estimate_mean

FAMILY = "tiny"
MOST = 3
"""Drafts."""
DEPTH = 3
POOL, FIRST = "pool", "draft 1 alone"
GAIN = "pool less draft 1 of as many nodes, tokens per step"
SEED = 0


def protocol(options: Options) -> Protocol:
    """What will be measured."""
    quick = options.quick
    return Protocol(
        bench="pools",
        question="Do several boost-tuned drafts bring more tokens per step than one with a wider "
        "tree?",
        arms=(POOL, FIRST),
        order="Each arm on the same prompts, which no draft learnt from.",
        sizes={
            "domains": ["sql", "python", "finance"],
            "training_requests": 96 if quick else 192,
            "epochs": 1,
            "learnt_from": "each token's whole row, as a capture of everything would bring",
            "served_requests": 8 if quick else 32,
            "answer_tokens": 48,
            "drafts": list(range(1, MOST + 1)),
            "temperatures": (0.0, 1.0),
            "depth": DEPTH,
        },
        goals=(Goal(figure=GAIN, at_least=0.0),),
    )


def run(options: Options) -> Result:
    """Train a pool, and count."""
    plan = protocol(options)
    notebook = Notebook(options, plan)
    with TemporaryDirectory() as directory:
        drafts = _trained(plan.sizes, Path(directory), options)
        notebook.add(kind="pool", num_drafts=len(drafts))
        for row in _steps(plan.sizes, drafts):
            notebook.add(kind="steps", **row)
    return summarise(plan, notebook.rows)


def _trained(sizes: dict[str, Any], directory: Path, options: Options) -> list[Path]:
    """The pool's drafts; fewer where another would learn nothing new."""
    from benchmarks.drift.jobs import base_config
    from benchmarks.traffic.family import FAMILIES
    from osd.offline import pool
    from osd.offline.train import Job

    _, draft = FAMILIES[FAMILY].models()
    job = Job(
        config=base_config(),
        draft=draft,
        out=directory / "pool",
        epochs=sizes["epochs"],
        force=True,
    )
    traces = _written(sizes, directory / "answers.traces")
    pool.run(job, MOST, [traces], options.say, options.say)
    return [path for n in range(1, MOST + 1) if (path := job.out / str(n)).is_dir()]


def _written(sizes: dict[str, Any], path: Path) -> Path:
    """The answers that the drafts learn from, as a file of traces."""
    from benchmarks.replays.recording import trace_of
    from benchmarks.traffic.family import FAMILIES, TRAINING
    from benchmarks.traffic.recordings import take
    from buffers.codec import encode_trace
    from buffers.trace_file import write_traces
    from osd.models.resolve import fingerprint
    from osd.records import PLAIN

    target, _ = FAMILIES[FAMILY].models()
    target_id, rng = fingerprint(target), np.random.default_rng(SEED)
    with write_traces(path, target_id) as file:
        for domain in sizes["domains"]:
            for number, one in enumerate(
                take(FAMILY, domain, TRAINING, sizes["training_requests"])
            ):
                trace = trace_of(
                    replace(one, name=f"{domain}-{number}"),
                    np.full(len(one.output_ids), PLAIN, np.int8),
                    at=float(number),
                    target_id=target_id,
                    accepted_fraction=1.0,
                    plain_fraction=1.0,
                    rng=rng,
                )
                file.add(encode_trace(trace))
    return path


def _steps(sizes: dict[str, Any], paths: Sequence[Path]) -> Iterator[Row]:
    """Tokens per step of each request, by temperature, arm and number of drafts."""
    import torch
    from transformers import AutoTokenizer

    from benchmarks.traffic.family import FAMILIES, FIRST_SERVED
    from osd.tiny.tokenizer import chat_prompt
    from serving.trees import fitting
    from serving.trees.engine import TreeEngine

    torch.set_num_threads(1)
    path, _ = FAMILIES[FAMILY].models()
    target, drafts = fitting.load(path, paths)
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    prompts = [
        chat_prompt(tokenizer, prompt)
        for domain in sizes["domains"]
        for prompt in FAMILIES[FAMILY].prompts(domain, FIRST_SERVED, sizes["served_requests"])
    ]
    for temperature in sizes["temperatures"]:
        for num in range(1, len(drafts) + 1):
            for arm in (POOL, FIRST):
                engine = TreeEngine(
                    target,
                    drafts[:num] if arm == POOL else drafts[:1],
                    (1 if arm == POOL else num, *(1,) * (sizes["depth"] - 1)),
                    temperature=temperature,
                    children="distinct",
                )
                answers = engine.generate(
                    prompts, sizes["answer_tokens"], {int(tokenizer.eos_token_id)}
                )
                found = [answer.tokens_per_step for answer in answers]
                yield {
                    "arm": arm,
                    "num": num,
                    "temperature": temperature,
                    "tokens_per_step": found,
                }


def summarise(plan: Protocol, rows: Sequence[Row]) -> Result:
    """Tokens per step of both arms, and the difference in pairs of requests."""
    figures = [
        Figure(group="the pool", name="drafts trained", value=row["num_drafts"])
        for row in rows
        if row["kind"] == "pool"
    ]
    found = {
        (row["temperature"], row["num"], row["arm"]): row["tokens_per_step"]
        for row in rows
        if row["kind"] == "steps"
    }
    for (temperature, num, arm), brought in found.items():
        group = f"tokens per step, T = {temperature:g}"
        figures.append(Figure.of(group, f"{arm}, {DEPTH * num} nodes", estimate_mean(brought)))
    for temperature, num, arm in found:
        if num > 1 and arm == POOL:
            both = (found[temperature, num, arm] for arm in (POOL, FIRST))
            group = f"{num} drafts, T = {temperature:g}"
            figures.append(Figure.of(group, GAIN, estimate_mean(np.subtract(*both))))
    return Result(protocol=plan, figures=tuple(figures))
