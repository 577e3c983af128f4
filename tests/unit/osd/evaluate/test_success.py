"""Success by k, held against the draft asked token by token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from transformers import AutoModelForCausalLM

from osd.evaluate.figures import figures_of
from osd.evaluate.report import html
from osd.evaluate.runs import Request, Run
from osd.evaluate.success import ALL, Success, successes
from osd.evaluate.table import said_of, table
from tests.support.evaluations import REQUESTS, run_of, served
from tests.support.pairs import Pair, build_pair
from trainer.draft import load_draft


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return build_pair(tmp_path_factory.mktemp("pair"))


ANSWERS = {0: (3, 4, 5), 1: (7, 7, 9, 2), 2: (6,), 3: (8, 1)}


def run(**fields: Any) -> Run:
    """None's, with these answers."""
    answered = [replace(served(i, [0], 0), token_ids=ids) for i, ids in ANSWERS.items()]
    return replace(run_of("none", 0, answered), **fields)


def places(draft: Path, request: Request, answer: tuple[int, ...]) -> list[int]:
    """Of each token of the answer from the second on, its place among the draft's likeliest."""
    model = AutoModelForCausalLM.from_pretrained(draft)
    found = []
    for at in range(1, len(answer)):
        ids = torch.tensor([[*request.prompt_ids, *answer[:at]]])
        order = model(ids).logits[0, -1].argsort(descending=True, stable=True).tolist()
        found.append(order.index(answer[at]))
    return found


def test_it_counts_the_tokens_among_the_drafts_likeliest(pair: Pair) -> None:
    found = {one.data: one for one in successes([run()], REQUESTS, load_draft(pair.draft))}
    wanted: dict[str, list[int]] = {}
    for i, answer in ANSWERS.items():
        mine = places(pair.draft, REQUESTS[i], answer)
        for name in (REQUESTS[i].data, ALL):
            wanted.setdefault(name, []).extend(mine)
    assert set(found) == {"sql", "sums", ALL}
    for name, success in found.items():
        assert success.num_tokens == len(wanted[name])
        shares = [np.mean([place < k for place in wanted[name]]) for k in range(1, 6)]
        assert success.by_k == pytest.approx(shares)


def test_answers_of_none_beside_the_draft_model_are_read_once_at_each_temperature(
    pair: Pair,
) -> None:
    runs = [
        run(engine="eagle3"),
        run(),
        run(repeat=1, requests=run().requests[:1]),
        run(method="draft", k=3),
        run(temperature=0.7),
    ]
    found = successes(runs, REQUESTS, load_draft(pair.draft))
    assert [one.temperature for one in found if one.data == ALL] == [0.0, 0.7]
    assert {one.num_tokens for one in found if one.data == ALL} == {2 + 3 + 1}
    assert successes(runs[:1], REQUESTS, load_draft(pair.draft)) == []


def test_one_data_set_is_said_once_and_answers_of_one_token_say_nothing(pair: Pair) -> None:
    first, short = (run(requests=run().requests[i : i + 1]) for i in (0, 2))
    assert [one.data for one in successes([first], REQUESTS, load_draft(pair.draft))] == ["sql"]
    assert successes([short], REQUESTS, load_draft(pair.draft)) == []


def test_it_stands_below_the_table_and_in_the_report() -> None:
    success = Success(temperature=0.7, data="sql", num_tokens=12, by_k=(0.5, 0.75))
    line = said_of(success)
    assert line == (
        "draft's k likeliest hold the served token, k = 1 to 2: 0.50, 0.75 (sql, temperature 0.7, "
        "12 tokens)"
    )
    page = html([], [], [success], {})
    for wanted in ("Success by k of the draft model", "sql, temperature 0.7", "0.750"):
        assert wanted in page
    assert "Success by k" not in html([], [], [], {})
    assert line in table(figures_of([run()], REQUESTS), [], [success])
