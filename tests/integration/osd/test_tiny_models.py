"""The quality of the tiny models, whatever recipe made them. They are built once, then cached."""

from __future__ import annotations

import ast
import sqlite3
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from osd.tiny import models as tiny
from osd.tiny.deep import models as deep
from osd.tiny.models import TinyModels
from osd.tiny.text_sql import SCHEMAS
from osd.tiny.tokenizer import chat_prompt
from osd.tiny.traffic import DOMAINS, HOME, requests
from osd.tiny.training import Batch, Example, answer_logits, collate
from osd.tiny.widen import widen
from tests.support.greedy import greedy_answers

SERVED_SEED = 1001
NUM = 64
MAX_NLL = {"arithmetic": 0.35, "sql": 0.15, "python": 0.12, "finance": 0.35}
"""Mean negative log-likelihood per answer token, in nats, of answers never seen."""
TAPS = (2, 4, 5)
"""Where an EAGLE-3 head reads a target of eight layers."""


@pytest.fixture(scope="module", params=[tiny, deep], ids=["tiny", "deep"])
def built(request: pytest.FixtureRequest) -> Any:
    """The module that builds a pair."""
    return request.param


@pytest.fixture(scope="module")
def models(built: Any) -> TinyModels:
    return built.ensure()


@pytest.fixture(scope="module")
def tokenizer(models: TinyModels) -> Any:
    return AutoTokenizer.from_pretrained(models.target)


@pytest.fixture(scope="module")
def target(models: TinyModels) -> Any:
    return _load(models.target)


@pytest.fixture(scope="module")
def draft(models: TinyModels) -> Any:
    return _load(models.draft)


@pytest.fixture(scope="module")
def answers(target: Any, tokenizer: Any) -> dict[str, list[Example]]:
    """The target's own greedy answers to held-out prompts."""
    out = {}
    for domain in DOMAINS:
        prompts = [chat_prompt(tokenizer, r.prompt) for r in requests(domain, NUM, SERVED_SEED)]
        out[domain] = greedy_answers(target, prompts)
    return out


def test_sizes(target: Any, draft: Any) -> None:
    assert 1_500_000 <= target.num_parameters() <= 4_000_000
    assert 300_000 <= draft.num_parameters() <= 500_000


def test_both_directories_hold_the_same_tokenizer(models: TinyModels) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (models.target / name).read_bytes() == (models.draft / name).read_bytes()


@pytest.mark.parametrize(
    "text", ["plain", "  two  spaces\n\ttab", "Grüße, мир, 世界 🙂", "1234567 3.14 007", "<|b|>"]
)
def test_any_text_round_trips(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_chat_template_marks_every_turn(tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "v"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    first = "<|bos|><|system|>\ns\n<|user|>\nu\n<|assistant|>\na<|eos|>"
    assert text == first + "<|user|>\nv\n<|assistant|>\n"


@pytest.mark.parametrize("domain", DOMAINS)
def test_target_knows_every_domain(target: Any, tokenizer: Any, domain: str) -> None:
    batch = _held_out(tokenizer, domain)
    with torch.no_grad():
        nll = torch.nn.functional.cross_entropy(answer_logits(target, batch), batch.labels)
    assert nll.item() < MAX_NLL[domain]


@pytest.mark.parametrize("domain", DOMAINS)
def test_greedy_answers_end_and_are_well_formed(
    answers: dict[str, list[Example]], tokenizer: Any, domain: str
) -> None:
    whole = [e for e in answers[domain] if e.answer_ids[-1] == tokenizer.eos_token_id]
    assert len(whole) >= 0.95 * NUM
    texts = [tokenizer.decode(e.answer_ids[:-1]) for e in whole]
    assert sum(map(_WELL_FORMED[domain], texts)) >= 0.9 * NUM
    assert len(set(texts)) >= 0.9 * NUM


def test_draft_is_at_home_in_one_domain_only(draft: Any, answers: dict[str, list[Example]]) -> None:
    home_alpha, _ = _replay(draft, answers[HOME])
    sql_alpha, sql_rate = _replay(draft, answers["sql"])
    assert home_alpha >= 0.85
    assert sql_alpha <= 0.30
    assert sql_rate <= 0.30


def test_draft_has_room_for_another_domain(
    target: Any, tokenizer: Any, models: TinyModels, answers: dict[str, list[Example]]
) -> None:
    """A few hundred of the target's answers are enough to learn it; half of the lessons are from
    home, which stays."""
    draft = _load(models.draft)
    lessons = {}
    for domain, num in (("sql", 320), (HOME, 320)):
        prompts = [chat_prompt(tokenizer, r.prompt) for r in requests(domain, num, SERVED_SEED + 1)]
        lessons[domain] = greedy_answers(target, prompts)
    optimizer = torch.optim.AdamW(draft.parameters(), lr=2e-3, weight_decay=0.0)
    for i in [*range(0, 320, 4)] * 2:
        batch = collate(lessons["sql"][i : i + 4] + lessons[HOME][i : i + 4])
        with torch.no_grad():
            teacher = answer_logits(target, batch).log_softmax(-1)
        student = answer_logits(draft, batch).log_softmax(-1)
        torch.nn.functional.kl_div(
            student, teacher, log_target=True, reduction="batchmean"
        ).backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert _replay(draft, answers["sql"])[0] >= 0.75
    assert _replay(draft, answers[HOME])[0] >= 0.80


@pytest.mark.parametrize("size", [(384, 9, 1000), None], ids=["small", "default"])
def test_cost_shaped_target_computes_the_same(
    built: Any,
    models: TinyModels,
    target: Any,
    answers: dict[str, list[Example]],
    tmp_path: Path,
    size: Any,
) -> None:
    if size is None:
        path = built.ensure_cost_shaped()
    else:
        hidden, layers, intermediate = size
        path = widen(
            models.target,
            tmp_path,
            hidden_size=hidden,
            num_layers=layers,
            intermediate_size=intermediate,
        )
    wide = _load(path)
    if size is None:
        assert 70_000_000 < wide.num_parameters() < 85_000_000
    random_ids = torch.randint(
        0, target.config.vocab_size, (2, 64), generator=torch.Generator().manual_seed(0)
    )
    with torch.no_grad():
        for ids in (random_ids, collate([answers[domain][0] for domain in DOMAINS]).input_ids):
            difference = (
                (target(input_ids=ids).logits - wide(input_ids=ids).logits).abs().max().item()
            )
            assert difference < 1e-4
    prompts = [answers[domain][0].prompt_ids for domain in DOMAINS]
    expected = [answers[domain][0].answer_ids for domain in DOMAINS]
    assert [e.answer_ids for e in greedy_answers(wide, prompts)] == expected


@pytest.mark.parametrize("domain", [HOME, "sql"])
def test_taps_of_the_deep_target_tell_a_head_different_things(domain: str) -> None:
    """Each holds more of the next token than the one before, and is changed by its layers: by a
    tenth or more on average, less where a processor rounds otherwise in training."""
    directory = deep.ensure().target
    model, batch = _load(directory), _held_out(AutoTokenizer.from_pretrained(directory), domain)
    with torch.no_grad():
        states = model(input_ids=batch.input_ids, output_hidden_states=True).hidden_states
        taps = [states[tap][batch.is_source] for tap in TAPS]
        hits = [
            (model.lm_head(model.model.norm(tap)).argmax(-1) == batch.labels).float().mean().item()
            for tap in taps
        ]
    assert hits == sorted(hits)
    for lower, upper in pairwise(taps):
        change = upper - lower
        assert (change.norm(dim=-1) / lower.norm(dim=-1)).mean() > 0.05


def test_impossible_widths_are_refused(models: TinyModels, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"hidden_size 400: must be a multiple of the head size 32"
    ):
        widen(models.target, tmp_path, hidden_size=400, num_layers=4, intermediate_size=1024)
    with pytest.raises(ValueError, match=r"num_hidden_layers 1: must not be below"):
        widen(models.target, tmp_path, hidden_size=512, num_layers=1, intermediate_size=1024)


def _held_out(tokenizer: Any, domain: str) -> Batch:
    """Requests never seen and the answers the target was taught."""
    return collate(
        [
            Example(
                chat_prompt(tokenizer, r.prompt),
                tokenizer.encode(r.answer, add_special_tokens=False),
            )
            for r in requests(domain, NUM, SERVED_SEED)
        ]
    )


def _load(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory).eval()


def _replay(draft: Any, answers: Sequence[Example], k: int = 4) -> tuple[float, float]:
    """(conditional acceptance α, acceptance rate) of greedy drafting against the target's own
    greedy answers."""
    accepted = tested = drafted = 0
    batch = collate(answers)
    with torch.no_grad():
        is_hit = answer_logits(draft, batch).argmax(-1) == batch.labels
    for hits in is_hit.split([len(e.answer_ids) for e in answers]):
        at = 1  # the first token comes from the prompt's step, without a draft
        while at < len(hits):
            window = hits[at : at + k].tolist()
            num_accepted = window.index(False) if False in window else len(window)
            accepted += num_accepted
            tested += min(num_accepted + 1, len(window))
            drafted += k
            at += num_accepted + 1
    return accepted / tested, accepted / drafted


def _is_python(text: str) -> bool:
    try:
        return isinstance(ast.parse(text).body[0], ast.FunctionDef)
    except SyntaxError:
        return False


def _is_sql(text: str) -> bool:
    database = sqlite3.connect(":memory:")
    for schema in SCHEMAS:
        columns = ", ".join((schema.label, schema.category, schema.key, *schema.numbers))
        database.execute(f"CREATE TABLE {schema.table} ({columns})")
        database.execute(f"CREATE TABLE {schema.parent} ({schema.key}, {schema.place})")
    try:
        database.execute(text)
    except sqlite3.Error:
        return False
    return True


_WELL_FORMED = {
    "arithmetic": lambda text: "The answer is " in text and text.endswith("."),
    "sql": _is_sql,
    "python": _is_python,
    "finance": lambda text: text.count(". ") >= 1 and text.endswith("."),
}
