"""Names and settings of the drift benchmark's contenders. Importing this module loads nothing
heavy."""

FROZEN, CEILING, NGRAM, SUFFIX = "frozen draft", "ceiling", "n-gram", "suffix decoding"
NGRAM_TUNED, SUFFIX_LONG = "n-gram, 1 to 5", "suffix decoding, k 24"
OURS, OURS_LORA = "ours", "ours, LoRA"
SAMPLED = (OURS_STUDENT, OURS_MIXED) = "ours, student-sampled", "ours, mixed"
"""Learning from answers that the draft samples and the target labels, all or half of them: arms of
the benchmark of sampling."""
SERVED, FROZEN_LOOP = "ours, as served", "frozen draft, closed loop"
"""With k chosen by the closed loop, as `osd serve` does by default: all others propose a fixed
k."""
MEMORY, SUFFIX_LOOP = "memory, closed loop", "suffix decoding, closed loop"
DRAFT_LOOP = "frozen draft without memory, closed loop"
SOURCES = (MEMORY, DRAFT_LOOP, SUFFIX_LOOP)
"""One source alone, under the service's control: arms of the benchmark of the memory."""
CHARGED = "ours, as served, where training is charged"
STOPPED = {f"ours, stopped after {num} rounds": num for num in (1, 2, 4)}
"""With the trainer's time counted as lost: trained while it pays, and so many rounds whether it
pays or not. Arms of the benchmark of training."""
LEARNING_DRAFT_LOOP = "ours, as served, without memory"
"""Beside `DRAFT_LOOP`, `FROZEN_LOOP` and `SERVED`: learning or not, with the memory or without."""
AGAIN = "frozen draft, closed loop, once more"
STATIC = "one draft for all domains, closed loop"
NIGHTLY = "trained offline at night, closed loop"
OSD_LOOP = {
    "OSD, 1e-5, closed loop": (8, 1e-5),
    "OSD, 1e-4, closed loop": (8, 1e-4),
    "OSD, 1e-3, closed loop": (8, 1e-3),
}
"""Arms of the benchmark of online learning."""
DRAWN_FROZEN, DRAWN_OURS, DRAWN_CEILING = (
    f"{name}, sampled drafts" for name in (FROZEN, OURS, CEILING)
)
DRAWN_DRAFT_LOOP = "frozen draft, sampled, closed loop"
DRAWN_SERVED = "ours, sampled drafts, closed loop"
DRAWN_CHARGED = "ours, sampled drafts, closed loop, where training is charged"
DRAWN_STATIC = "one draft for all domains, sampled, closed loop"
"""The draft alone, whose tokens are drawn from its distribution."""
MIXED_FROZEN_LOOP = "frozen draft, sampled, and memory, closed loop"
MIXED_SERVED = "ours, sampled drafts and memory, closed loop"
MIXED_CHARGED = "ours, sampled drafts and memory, closed loop, where training is charged"
MIXED_NEVER_BACK = "ours, sampled drafts and memory, closed loop, no earlier draft recalled"
MIXED_LEAST = "ours, sampled drafts and memory, closed loop, replaying the least"
"""With the memory beside it."""
MIXED_STATIC = "one draft for all domains, sampled, and memory, closed loop"
MIXED_NIGHTLY = "trained offline at night, sampled, and memory, closed loop"
MIXED_SUFFIX_LOOP = "frozen draft, sampled, and suffix decoding, closed loop"
MIXED_OSD = {
    f"OSD, {rate}, sampled, and memory, closed loop": (8, float(rate))
    for rate in ("1e-5", "1e-4", "1e-3")
}
MIXED_RIVALS = (MIXED_STATIC, MIXED_NIGHTLY, *MIXED_OSD, MIXED_SUFFIX_LOOP)
"""Other ways than ours, with sampled drafts. The last has suffix decoding for its memory."""
TRAINED_OFFLINE = (CEILING, STATIC, DRAWN_CEILING, DRAWN_STATIC, MIXED_STATIC)
OSD, OSD_TUNED = "OSD", "OSD, our rate"
OSD_PUBLISHED = {"OSD, 1e-4 every 8": (8, 1e-4), "OSD, 1e-5 every 1": (1, 1e-5)}
"""Both pairs of (requests between updates, learning rate) of OSD's released scripts. Reported as
`OSD`: the better."""
ALL = (
    *(FROZEN, FROZEN_LOOP, CEILING, NGRAM, NGRAM_TUNED, SUFFIX, SUFFIX_LONG),
    *(*OSD_PUBLISHED, OSD_TUNED, OURS, OURS_LORA, SERVED),
)
LORA_RATE = 3.0
"""How many times the learning rate of full training LoRA gets. Not tuned."""
LOOKUP_TUNED = {"prompt_lookup_min": 1, "prompt_lookup_max": 5}
"""What n-gram lookup gets instead of vLLM's 5 and 5, of which short answers hardly ever repeat any:
the best of seven pairs on the tiny models."""
NO_DRAFT_MODEL = (NGRAM, NGRAM_TUNED, SUFFIX, SUFFIX_LONG)
"""Who proposes what stands in the text already."""
HELD = (OURS, SERVED)
"""Who is held to the goals."""
UNTRAINED = (
    *(FROZEN, FROZEN_LOOP, DRAFT_LOOP),
    *(DRAWN_DRAFT_LOOP, MIXED_FROZEN_LOOP, MIXED_SUFFIX_LOOP),
    *NO_DRAFT_MODEL,
)
"""Who never learns."""
