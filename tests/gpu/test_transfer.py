"""Capture's copies from a GPU, which nobody waits for."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from serving.capture.pick import Transfer, pick_on_device, pick_on_host
from serving.vllm.hooks import Verification
from tests.unit.serving.capture.test_pick import make_lot, make_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def test_a_transfer_brings_what_was_there_when_it_was_queued() -> None:
    tensor = torch.arange(1 << 20, device="cuda")
    transfer = Transfer([tensor, tensor[:3].float()])
    tensor.zero_()
    first, second = transfer.wait()
    np.testing.assert_array_equal(first, np.arange(1 << 20))
    np.testing.assert_array_equal(second, [0, 1, 2])


def test_picking_does_not_wait_for_the_device() -> None:
    rng = np.random.default_rng(0)
    for size in (1, 5, 12):
        step = make_step(rng, size)
        lot = make_lot(rng, step)
        expected = pick_on_host(step, lot).land()
        on_gpu = Verification(
            req_ids=step.req_ids,
            num_draft_tokens_B=step.num_draft_tokens_B,
            is_partial_B=step.is_partial_B,
            draft_ids=step.draft_ids.cuda(),
            first_position_B=step.first_position_B.cuda(),
            sampled_BG=step.sampled_BG.cuda(),
            logits=step.logits.cuda(),
        )
        torch.cuda.set_sync_debug_mode("error")
        try:
            picked = pick_on_device(on_gpu, lot)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        landed = picked.land()
        np.testing.assert_array_equal(landed.sampled_BG, expected.sampled_BG)
        if expected.rows is not None:
            assert landed.rows is not None
            np.testing.assert_array_equal(landed.rows.kind_R, expected.rows.kind_R)
            np.testing.assert_array_equal(landed.rows.draft_id_R, expected.rows.draft_id_R)
