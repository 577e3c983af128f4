"""What a client computes from answers: k per step, and the demo's α.

The last step may have accepted more than was served.
"""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from osd.client.load import Answer, figures, send
from osd.demo.findings import alpha
from osd.records import SpecWindow


def answer(num_tokens: int, histogram: tuple[int, ...], drafted: int) -> Answer:
    return Answer(
        index=0,
        ok=True,
        token_ids=(1,) * num_tokens,
        histogram=histogram,
        num_draft_tokens=drafted,
        seconds=1.0,
    )


def test_k_counts_the_steps_without_drafts() -> None:
    """A first token, two drafts of 4 with 2 and 0 accepted, and six steps without any."""
    assert figures([answer(1 + 3 + 1 + 6, (1, 0, 1, 0, 0), 8)]).k == pytest.approx(8 / 9)


def test_k_is_never_more_than_was_drafted_in_a_step() -> None:
    """Three drafts of 4, all accepted, of which the last four tokens were cut off."""
    assert figures([answer(12, (0, 0, 0, 0, 3), 12)]).k == 4.0


def test_without_speculation_k_is_nothing() -> None:
    assert figures([answer(10, (), 0)]).k == 0.0
    assert figures([]).k is None


def test_the_demos_alpha_is_that_of_the_services_windows_within_the_runs() -> None:
    """What was tested where k changes is known to the engine only; windows outside of the runs are
    not asked."""
    runs = [
        [given(at=100.0, seconds=4.0), given(at=103.0, seconds=3.0)],
        [given(at=200.0, seconds=2.0)],
    ]
    windows = [
        window(at=99.0, accepted=(9, 0), tested=(9, 9)),
        window(at=101.0, accepted=(3, 1), tested=(4, 3)),
        window(at=106.0, accepted=(2, 0), tested=(4, 1)),
        window(at=150.0, accepted=(9, 0), tested=(9, 9)),
        window(at=201.0, accepted=(0, 0), tested=(3, 0)),
    ]
    assert alpha(windows, runs) == pytest.approx(6 / 15)
    assert alpha(windows, [[]]) is None


def given(at: float, seconds: float) -> Answer:
    return Answer(index=0, ok=True, token_ids=(1,), started=at, seconds=seconds)


def window(at: float, accepted: tuple[int, ...], tested: tuple[int, ...]) -> SpecWindow:
    return SpecWindow(
        at=at,
        replica="replica-0",
        version=1,
        seconds=1.0,
        k=2,
        num_drafts=tested[0],
        num_draft_tokens=2 * tested[0],
        num_accepted_tokens=sum(accepted),
        num_accepted_tokens_per_pos=accepted,
        num_tested_per_pos=tested,
    )


class Odd(BaseHTTPRequestHandler):
    """Answers every other request with a line that is cut off, or is not an answer's."""

    LINES = (
        b'data: {"choices": [{"text": "a", "token_ids": [1]}]}\n\n',
        b'data: {"choices": [{"text": "a", "tok\n\n',
        b'data: {"object": "another"}\n\n',
        b'data: {"choices": [7]}\n\n',
    )
    num_asked = 0

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        line = self.LINES[Odd.num_asked % len(self.LINES)]
        Odd.num_asked += 1
        self.send_response(200)
        self.send_header("Content-Length", str(len(line)))
        self.end_headers()
        self.wfile.write(line)

    def log_message(self, *args: object) -> None:
        """Nothing is printed."""


async def test_an_answer_that_cannot_be_read_is_one_that_failed() -> None:
    """The requests behind it are sent all the same."""
    Odd.num_asked = 0
    with HTTPServer(("127.0.0.1", 0), Odd) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        answers = await send(url, [{"prompt": "a"}] * 5, streams=1)
        server.shutdown()
    assert [answer.ok for answer in answers] == [True, False, False, False, True]
    for answer in answers[1:4]:
        assert answer.error.startswith("a line of the answer cannot be read (")
