"""`osd bench head_sizes`: what a head that keeps learning costs beside targets of 8, 32 and 70 B.

    shapes from published config.json ─► costs.py ─► figures (nothing is run)

A round is that of the default configuration: new traces, those replayed beside them, and the
held-out traces on which it is judged, each as long as `trainer.max_length` allows.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.heads import costs
from benchmarks.heads.costs import Batch, Shape
from benchmarks.record import Notebook, Options, Protocol, Row
from benchmarks.result import Figure, Result
from osd.config.schema import Config

SHAPES = {
    "8 B": Shape(
        hidden_size=4096,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=14336,
        vocab_size=128256,
    ),
    "32 B": Shape(
        hidden_size=5120,
        num_hidden_layers=64,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=25600,
        vocab_size=151936,
    ),
    "70 B": Shape(
        hidden_size=8192,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=28672,
        vocab_size=128256,
    ),
}
"""Llama-3.1-8B, Qwen3-32B and Llama-3.3-70B."""
DRAFT_VOCAB = 32_000
PEAK, UTILISATION = 989e12, 0.4
"""FLOP/s of an H100 SXM in bf16 without sparsity, and the share of it that is reached."""
NUM_WATCHED = 24
"""Held-out traces of which the loss is watched (`trainer/guard.py`)."""
LONG = 32_768
"""Tokens of a long trace."""


def protocol(options: Options) -> Protocol:
    """What is computed, from which numbers."""
    config = Config()
    trainer = config.trainer
    return Protocol(
        bench="head_sizes",
        question="What does a head cost the trainer, and when would captured features be cheaper?",
        arms=("recomputed", "captured"),
        order="nothing is run: formulas of benchmarks/heads/costs.py",
        sizes={
            "draft_vocab_size": DRAFT_VOCAB,
            "peak_flops": PEAK,
            "utilisation": UTILISATION,
            "length": trainer.max_length,
            "long_length": LONG,
            "depths": config.speculation.k_max,
            "batch_size": trainer.batch_size,
            "replay_batches": trainer.replay_batches,
            "new_traces": {"least": trainer.min_new_traces, "most": trainer.max_new_traces},
            "held_out": NUM_WATCHED + config.gate.max_holdout_traces,
            "feature_cache_bytes": trainer.feature_cache_bytes,
            "top_k": config.capture.top_k,
            "stored_traces": config.buffer.max_traces,
        },
    )


def run(options: Options) -> Result:
    """Compute all figures. `--quick` changes nothing."""
    plan = protocol(options)
    notebook = Notebook(options, plan)
    for name, shape in SHAPES.items():
        notebook.add(target=name, **row(shape, plan))
    return summarise(plan, notebook.rows)


def row(shape: Shape, plan: Protocol) -> Row:
    """All numbers of one target, in bytes, FLOPs and seconds."""
    sizes = plan.sizes
    spec = costs.head_of(shape, sizes["draft_vocab_size"])
    batch = Batch(num_traces=sizes["batch_size"], length=sizes["length"], depths=sizes["depths"])
    single = replace(batch, num_traces=1)
    recomputation = costs.recomputation_flops(shape, spec, batch.length)
    training = costs.training_flops(shape, spec, batch)
    features = costs.feature_bytes(shape)
    stored = sizes["stored_traces"] * batch.length
    return {
        "target parameters": costs.target_parameters(shape),
        "head parameters": costs.parameters(spec),
        "target in bf16": costs.BF16 * costs.target_parameters(shape),
        "head and AdamW": costs.state_bytes(spec),
        "embedding in float32": costs.embedding_bytes(shape),
        "activations of the target": costs.target_activation_bytes(shape, batch),
        "activations of the head": costs.head_activation_bytes(shape, spec, batch),
        "heads of the gate": costs.gate_bytes(shape, spec),
        "trainer memory": costs.trainer_bytes(shape, spec, batch),
        "trainer memory, a trace a step": costs.trainer_bytes(shape, spec, single),
        "the same without the target": costs.trainer_bytes(shape, spec, single, has_target=False),
        "recomputation": recomputation,
        "recomputation, long trace": costs.recomputation_flops(shape, spec, sizes["long_length"]),
        "training": training,
        "smallest round": _seconds(sizes, "least", recomputation, training),
        "largest round": _seconds(sizes, "most", recomputation, training),
        "smallest round, features stored": _seconds(sizes, "least", 0, training),
        "features": features,
        "features and last state": costs.feature_bytes(shape, with_last=True),
        "trace": costs.trace_bytes(sizes["top_k"]),
        "features of the smallest round": features * _num_traces(sizes, "least") * batch.length,
        "features of the largest round": features * _num_traces(sizes, "most") * batch.length,
        "features of a long trace": features * sizes["long_length"],
        "traces that the cache holds": sizes["feature_cache_bytes"] / (features * batch.length),
        "stored features": features * stored,
        "stored traces": costs.trace_bytes(sizes["top_k"]) * stored,
        "store that keeps up": features * _flops_per_second(sizes) / recomputation,
    }


def _num_traces(sizes: Row, which: str) -> int:
    """Traces that a round learns from: new ones, and so many older ones for each."""
    return int(sizes["new_traces"][which] * (1 + sizes["replay_batches"]))


def _flops_per_second(sizes: Row) -> float:
    return float(sizes["peak_flops"] * sizes["utilisation"])


def _seconds(sizes: Row, which: str, recomputation: float, training: float) -> float:
    """Of a round in which nothing is found in the cache: all traces are computed by the target,
    those it learns from by the head, too."""
    num = _num_traces(sizes, which)
    flops = sizes["length"] * (num * training + (num + sizes["held_out"]) * recomputation)
    return float(flops / _flops_per_second(sizes))


UNITS = {
    "target parameters": (1e9, "B"),
    "head parameters": (1e6, "M"),
    "recomputation": (1e9, "GFLOP/token"),
    "recomputation, long trace": (1e9, "GFLOP/token"),
    "training": (1e9, "GFLOP/token"),
    "smallest round": (1, "s"),
    "largest round": (1, "s"),
    "smallest round, features stored": (1, "s"),
    "features": (1024, "KiB/token"),
    "features and last state": (1024, "KiB/token"),
    "traces that the cache holds": (1, ""),
    "trace": (1024, "KiB/token"),
    "store that keeps up": (1e6, "MB/s"),
}
"""Name -> what its number is divided by, and the unit then; all others are in GB."""


def summarise(plan: Protocol, rows: list[Row]) -> Result:
    """The rows as figures, per target."""
    figures = []
    for found in rows:
        for name, value in found.items():
            if name != "target":
                size, unit = UNITS.get(name, (1e9, "GB"))
                figures.append(
                    Figure(group=found["target"], name=name, value=value / size, unit=unit)
                )
    return Result(protocol=plan, figures=tuple(figures))
