"""The benchmarks, one command each: `osd bench NAME`.

    protocol (written first) ─► raw.jsonl (runs as measured) ─► result.json, table, report.html

A bench is one module with `run(options) -> Result`; a line in `BENCHES` makes it a command. The
arms of a bench take turns within one run, and the ratio of neighbours is reported: timings on one
machine drift, ratios do not.

The modules of this folder are what all benches share, and the command. The rooms:

    engines           real vLLM in this process, stepped by hand
    natural  prose    models and texts, built on first use
    traffic           which requests come when, and the target's recorded answers to them
    replays           recorded answers served again, without an engine, in modelled time
    costs  service  control  drift  learning  harm  heads  trees  oracle  papers  fleet  gpu
                      the benches: what each room asks stands in its `__init__.py`
"""

BENCHES = {
    "capture": (
        "costs.capture",
        "Throughput with capture on over off, CPU time per output token, bytes per stored row.",
    ),
    "swap": (
        "costs.swap",
        "How long a swap of the draft blocks the engine, beside vLLM's own weight update.",
    ),
    "buffer": (
        "costs.buffer",
        "Traces per second through the replay buffer, bytes per trace, minutes of traffic per GB.",
    ),
    "serving": (
        "service.serving",
        "The service over a bare vLLM server: throughput, TTFT, TPOT, latency.",
    ),
    "trainer": (
        "costs.trainer",
        "The trainer's step over a padded Hugging Face loop: tokens per second, peak memory.",
    ),
    "control": (
        "control.control",
        "The closed loop of speculation against every fixed choice, by draft and load.",
    ),
    "control_async": (
        "control.asynchronous",
        "As `control`, with engines that schedule asynchronously.",
    ),
    "net": (
        "control.net",
        "The net speed-up a service reports beside that over an engine without a draft.",
    ),
    "attach": (
        "costs.attach",
        "What a stock engine pays for being attached: CPU and speed with each step on.",
    ),
    "front_door": (
        "service.front_door",
        "What HAProxy before the engines costs: first token, tokens/s, CPU. Where it is installed, "
        "Ray Serve too.",
    ),
    "fleet": (
        "fleet",
        "What many replicas cost their Redis and their controller, and how soon all hear of a "
        "draft.",
    ),
    "changes": (
        "control.changes",
        "How soon the closed loop finds the best choice again when load or draft change.",
    ),
    "ablation": (
        "learning.ablation",
        "Which part of the trainer's recipe matters: one change at a time, over a recording.",
    ),
    "sampling": (
        "learning.sampling",
        "Whose text a draft should learn from: the target's, its own, or both.",
    ),
    "drift": (
        "drift.drift",
        "Whose draft tokens are accepted when the traffic changes: eight schedules, replayed for "
        "each contender.",
    ),
    "memory": (
        "drift.memory",
        "What the memory of served text gains, alone and beside the draft, over suffix decoding "
        "under the same control.",
    ),
    "memory_cost": (
        "costs.memory_cost",
        "What the memory of served text costs where it finds nothing: CPU per token, at batch 1, "
        "16 and 64.",
    ),
    "payback": (
        "learning.payback",
        "What training adds to a service that has a memory, its trainer free and charged.",
    ),
    "bound": (
        "oracle.bound",
        "The upper bound on the public simulator's own traces: its figures, and at fair prices.",
    ),
    "oracle": (
        "oracle.oracle",
        "How near the control of speculation comes to who knows what will be accepted, at batch 1, "
        "4 and 16.",
    ),
    "oracle_languages": (
        "oracle.languages",
        "As `oracle`, on prose in five languages.",
    ),
    "languages": (
        "learning.languages",
        "Whether prose in five languages has anything to learn that cannot be looked up.",
    ),
    "online": (
        "learning.online",
        "Whether learning online pays on prose in five languages, over the same service without a "
        "trainer and rivals that learn otherwise.",
    ),
    "drafts": (
        "learning.drafts",
        "What learning online brings to first drafts of three sizes, and to those that have met "
        "the new language before.",
    ),
    "where_it_pays": (
        "learning.where_it_pays",
        "How sure a target and how cheap a draft make online learning pay beside a memory.",
    ),
    "head_speed": (
        "heads.speed",
        "Decode speed with an EAGLE-3 head and with a draft model, over none, on one target.",
    ),
    "head_sizes": (
        "heads.sizes",
        "What a head costs the trainer beside targets of 8, 32 and 70 B, by arithmetic: memory, "
        "FLOPs, bytes of features.",
    ),
    "heads": (
        "heads.heads",
        "What an EAGLE-3 head gains by learning, with the memory and without, beside a draft model "
        "of the same target.",
    ),
    "trees": (
        "trees.trees",
        "Whether token trees would pay over a chain: tokens per step and speed by shape and batch, "
        "here and at a GPU's published price.",
    ),
    "pools": (
        "trees.pools",
        "Whether several drafts that make up for one another bring more than one draft's wider "
        "tree.",
    ),
    "success": (
        "trees.success",
        "How often k tokens of a draft would hold the target's, by language: what token trees "
        "could gain.",
    ),
    "papers_rates": (
        "papers.rates",
        "The best number of draft tokens by the rate of requests, and whether the control follows "
        "it, at a GPU's published prices.",
    ),
    "papers_rates_live": (
        "papers.rates_live",
        "As `papers_rates`, on real engines whose clocks are their CPU time.",
    ),
    "papers_methods": (
        "papers.methods",
        "Speed-up, step time and acceptance by method and batch, held against published shapes.",
    ),
    "papers_methods_large": (
        "papers.methods_large",
        "As `papers_methods`, of a target at the cost of 273 M parameters.",
    ),
    "papers_online": (
        "papers.online",
        "How acceptance climbs while a draft learns, held against published curves.",
    ),
    "soak": (
        "service.soak",
        "Half an hour of traffic while parts are killed: failed requests, changed answers, growth.",
    ),
    "harm": (
        "harm.harm",
        "What poisoned and hostile traffic, a shift and a return, and steady traffic do to the "
        "draft that serves.",
    ),
    "drift_speed": (
        "drift.speed",
        "Tokens per second and per CPU second on drifting traffic, over an engine without "
        "speculation, or over the service with its trainer off.",
    ),
}
"""Name -> its module here, and what it measures, in one line. Read by the command line, so nothing
is imported here."""

READ_TRACES = ("bound",)
"""Benches that are given a directory of traces, which stay where they are."""

IN_PARTS = {
    "memory": ("arms", "schedules", "seeds"),
    "payback": ("arms", "schedules", "seeds"),
    "online": ("arms", "schedules", "models", "seeds", "prices"),
    "where_it_pays": ("arms", "temperatures", "shares", "seeds"),
    "drafts": ("arms", "families", "seeds"),
    "heads": ("arms", "schedules", "seeds", "prices"),
    "drift_speed": ("arms", "schedules"),
    "papers_online": ("schedules", "seeds"),
    "ablation": ("arms", "seeds"),
}
"""Benches that take hours, of which a part can be asked for, and which go on where they were left:
name -> the lists of the protocol that can be cut."""
