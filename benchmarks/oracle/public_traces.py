"""Reads the traces of the public simulator of "Speculative Decoding: Performance or Illusion?"
(https://github.com/SpecDecode-Bench/simulator, `data/MODEL/combined_DATASET.jsonl`).

A trace has, for each output position, how many tokens a step would have made if drafting had begun
there: the accepted ones and the target's own. The files stay where they are.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from osd.errors import ConfigError
from osd.evaluate.bound.published import EAGLE, NGRAM, WIDEST
from osd.evaluate.bound.runs import ProposerRuns, RequestRuns

FIELDS = {EAGLE: "acc_eagle", NGRAM: "acc_ngram"}
NUM_SIMULATED, SEED = 300, 42
"""Requests that the simulator draws from a data set, and its seed."""
WHERE = "data/llama3.1-8B of a clone of github.com/SpecDecode-Bench/simulator"

Traced = dict[str, Any]
"""A line of a file."""


def read(directory: Path | None) -> dict[str, list[Traced]]:
    """Data set -> its requests. Raises `ConfigError` naming what is missing."""
    if directory is None:
        raise ConfigError(f"--traces: none given; name {WHERE}")
    paths = sorted(directory.glob("combined_*.jsonl"))
    if not paths:
        raise ConfigError(f"--traces {directory}: holds no combined_*.jsonl; name {WHERE}")
    return {path.stem.removeprefix("combined_"): _lines(path) for path in paths}


def simulated(traced: Sequence[Traced], proposers: Sequence[str]) -> list[RequestRuns]:
    """The requests that the simulator takes, with these proposers' runs: as far as all of them are
    known."""
    runs = [_runs(one, proposers) for one in traced]
    known = [one for one in runs if one.num_output]
    return random.Random(SEED).sample(known, min(NUM_SIMULATED, len(known)))


def _lines(path: Path) -> list[Traced]:
    found = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            one = json.loads(line)
            found.append(one | {name: one[name]["acc_len"] for name in FIELDS.values()})
            len(one["prompt_token_ids"])
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path}, line {number}: no trace of a request ({error!r}); name {WHERE}"
            ) from None
    return found


def _runs(one: Traced, proposers: Sequence[str]) -> RequestRuns:
    lengths = {name: one[FIELDS[name]] for name in proposers}
    num_output = min(map(len, lengths.values()))
    runs = {
        name: ProposerRuns.of_model(np.array(length[: num_output - 1], np.int64) - 1, WIDEST)
        for name, length in lengths.items()
    }
    return RequestRuns(
        num_prompt=len(one["prompt_token_ids"]), num_output=num_output, proposers=runs
    )
