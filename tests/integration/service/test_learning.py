"""A draft that knows nothing of its target learns from unlabelled traffic.

What it then serves is what the gate measured.
"""

from __future__ import annotations

import numpy as np
import pytest

from osd.client.load import Answer
from osd.service.launch import Service
from tests.support import acceptance
from tests.support.services import current, store
from tests.support.traffic import PROMPTS, ask

pytestmark = pytest.mark.timeout(1200)


def test_the_loop_closes_on_unlabelled_traffic(service: Service, learnt: list[Answer]) -> None:
    assert [answer.error for answer in learnt if not answer.ok] == []
    release = current(service)
    first = acceptance.counts(learnt[: len(PROMPTS)])
    newest = acceptance.counts(ask(service.url, PROMPTS * 2))
    before, now = (acceptance.resampled_alphas(counts, len(counts)) for counts in (first, newest))
    gain = np.quantile(now - before, 0.005)
    print(f"live α: v1 {acceptance.alpha(first):.3f}", end=", ")
    print(f"v{release.version} {acceptance.alpha(newest):.3f} (+{gain:.3f} or more)", end=", ")
    print(f"the gate measured {acceptance.measured_alpha(release):.3f}")
    assert release.version > 1
    assert gain > 0.3


def test_what_serves_is_what_was_released(service: Service, learnt: list[Answer]) -> None:
    """Acceptance is the same served, in the gate's replay, and in a replay of the file on disk."""
    release = current(service)
    before = acceptance.served_counts(service, release.version)
    answers = ask(service.url, PROMPTS * 2)
    served = acceptance.alpha((acceptance.served_counts(service, release.version) - before)[None])
    assert release.outcome is not None and release.outcome.eval is not None
    measured, num = release.outcome.eval.alpha_candidate, release.outcome.eval.num_traces
    counts = acceptance.replayed_counts(release, PROMPTS * 2, answers)
    samples = acceptance.resampled_alphas(counts, num)
    replayed = acceptance.alpha(counts)
    first = store(service).get(1)
    others = acceptance.alpha(acceptance.replayed_counts(first, PROMPTS * 2, answers))
    print(f"gate α {measured:.4f} on {num} requests, served α {served:.4f}", end=", ")
    print(f"the released file replayed {replayed:.4f}, the first draft's {others:.4f}")
    assert np.quantile(samples, 0.001) <= measured <= np.quantile(samples, 0.999)
    assert served == pytest.approx(replayed, abs=0.003)
    assert others < served - 0.3, "another draft would have shown"
