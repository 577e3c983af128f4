"""What clients keep out of capture is stored nowhere, and what capture leaves out is counted."""

from __future__ import annotations

import os
import re
from typing import Any

import httpx
import numpy as np
import pytest

from osd.service.launch import Service
from serving.headers import ROUTES_THAT_CAN_BE_TOLD
from tests.support.pairs import VOCABULARY
from tests.support.planted import LEADS_TO_THE_ENGINE, body_of, ways
from tests.support.processes import descendants, ray_directories
from tests.support.services import status, wait_until
from tests.support.stored import places_of, stored_ones
from tests.support.traffic import MODEL, ids_of, prompt_texts

pytestmark = pytest.mark.timeout(1200)


def test_a_request_that_opts_out_leaves_no_trace(service: Service) -> None:
    """By header or by argument. A request that does not opt out is found by the same search."""
    opted_out = [
        ({"X-OSD-Capture": "off"}, {}),
        ({}, {"vllm_xargs": {"osd_capture": "off"}}),
        ({"X-OSD-Capture": "off"}, {"vllm_xargs": {"osd_capture": "on"}}),
    ]
    skipped = num_opted_out(service)
    secret = [exchange(service, i, *how) for i, how in enumerate(opted_out)]
    normal = exchange(service, 100)
    rays = ray_directories(descendants(os.getpid()))
    where = (service.redis_url, service.config.data_path, *rays)
    assert len(where) == 3
    for ids in normal:

        def is_stored(ids: list[int] = ids) -> bool:
            found = places_of(ids, *where)
            is_in_memory = any(place.startswith("redis ") for place in found)
            return is_in_memory and any("appendonlydir" in place for place in found)

        wait_until(is_stored, 30, "the normal request is stored")
    for ids in (ids for both in secret for ids in both):
        assert places_of(ids, *where) == set()
    counted = skipped + len(opted_out)
    wait_until(lambda: num_opted_out(service) == counted, 10, "what was left out is counted")


def num_opted_out(service: Service) -> int:
    """Requests that the replica left out of capture because they asked for it."""
    skipped = status(service.control_url)["replicas"][0]["capture_skipped"]
    return int(skipped.get("opted_out", 0))


def exchange(
    service: Service,
    seed: int,
    headers: dict[str, str] | None = None,
    more: dict[str, Any] | None = None,
) -> tuple[list[int], list[int]]:
    """A new random prompt, with an answer drawn at random: prompt and output ids."""
    prompt = np.random.default_rng([9, seed]).integers(2, VOCABULARY, 24).tolist()
    body = {"model": MODEL, "prompt": prompt, "temperature": 1.5, "seed": seed, "max_tokens": 24}
    body |= {"ignore_eos": True, "return_token_ids": True, **(more or {})}
    response = httpx.post(f"{service.url}/v1/completions", json=body, headers=headers, timeout=60)
    assert response.status_code == 200, response.text
    output = response.json()["choices"][0]["token_ids"]
    assert len(output) == 24
    return prompt, output


VARIANTS: tuple[dict[str, Any], ...] = ({}, {"stream": True}, {"n": 3, "temperature": 1.0})
"""Of a request that can be told to keep out."""


def test_nothing_is_kept_of_who_asks_so_on_whatever_route_in_whatever_way(service: Service) -> None:
    """Whether served or refused. Each request carries a new text; these are looked for once the
    texts of requests that did not opt out are stored."""
    told = ROUTES_THAT_CAN_BE_TOLD
    planted = iter(prompt_texts(400, seed=77))

    def send(path: str, headers: dict[str, str], more: dict[str, Any]) -> tuple[int, list[int]]:
        text = next(planted)
        body = body_of(path, text, ids_of(text)) | {"model": MODEL} | more
        answer = httpx.post(f"{service.url}{path}", json=body, headers=headers, timeout=120)
        return answer.status_code, ids_of(text)

    kept_out = []
    for path in LEADS_TO_THE_ENGINE:
        for way, (headers, said) in ways().items():
            can_be_told = path in told and "beams" not in way
            for more in VARIANTS if can_be_told else ({},):
                answer, ids = send(path, headers, said | more)
                assert answer == (200 if can_be_told else 400), (path, way, more)
                kept_out.append(ids)
    beams = [("/v1/completions", {"use_beam_search": True, "n": 2})]
    said_nothing = [send(path, {}, {}) for path in told]
    said_nothing += [send(path, {}, more) for path, more in beams]
    assert {answer for answer, _ in said_nothing} == {200}
    where = (service.redis_url, service.config.data_path)
    open_ones = [ids for _, ids in said_nothing]
    what = "what said nothing is stored"
    wait_until(lambda: stored_ones(open_ones, *where) == open_ones, 30, what)
    assert stored_ones(kept_out, *where) == []


def test_a_request_with_a_grammar_is_counted_on_the_metrics_page(service: Service) -> None:
    def num_skipped() -> int:
        text = httpx.get(f"{service.control_url}/metrics").text
        found = re.search(r'osd_capture_skipped_total{reason="structured_output"} (\d+)', text)
        return int(found[1]) if found else 0

    before = num_skipped()
    body = {"model": MODEL, "prompt": "t5 t6", "max_tokens": 4}
    body["structured_outputs"] = {"choice": ["t7", "t8"]}
    answer = httpx.post(f"{service.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"].strip() in ("t7", "t8")
    wait_until(lambda: num_skipped() == before + 1, 10, "what was left out is counted")
