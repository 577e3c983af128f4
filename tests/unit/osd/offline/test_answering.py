"""How prompts become requests, and what is reported of the answers."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from buffers.codec import encode_trace
from buffers.memory import MemoryTraceBuffer
from buffers.trace_file import TraceFile, TraceWriter
from osd.client.load import Answer
from osd.config import reading
from osd.config.schema import Config
from osd.errors import OSDError
from osd.models.eagle3 import read_spec
from osd.models.fit import check_fit
from osd.offline import answering, distil
from osd.offline.answering import (
    Incomplete,
    Stopped,
    Tally,
    _answer_all,
    body_of,
    has_chat_template,
    written,
)
from osd.offline.prompts import Asking, Message, Prompt
from tests.support.builders import make_minimal_trace
from tests.support.served_targets import served_target
from tests.support.tiny_drafts import TARGET_ID, chain_trace, save_draft

ASKING = Asking(max_tokens=256, temperature=0.5, streams=1)


def test_a_prompt_is_a_user_message() -> None:
    body = body_of(Prompt(prompt="hi"), "m", ASKING, is_chat=True)
    expected = {
        "model": "m",
        "max_tokens": 256,
        "temperature": 0.5,
        "messages": [{"role": "user", "content": "hi"}],
    }
    assert body == expected


def test_a_prompt_is_gone_on_from_where_there_is_no_chat_template() -> None:
    body = body_of(Prompt(prompt="hi"), "m", ASKING, is_chat=False)
    assert body == {"model": "m", "max_tokens": 256, "temperature": 0.5, "prompt": "hi"}


@pytest.mark.parametrize("is_chat", [True, False])
def test_messages_domain_and_length_of_a_prompt_go_with_it(is_chat: bool) -> None:
    messages = [
        Message(role="system", content="brief"),
        Message(role="user", content=[{"type": "text", "text": "x"}]),
    ]
    body = body_of(
        Prompt(messages=messages, domain="sql", max_tokens=9), "m", ASKING, is_chat=is_chat
    )
    assert body["messages"] == [
        {"role": "system", "content": "brief"},
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
    ]
    assert "prompt" not in body
    assert (body["max_tokens"], body["vllm_xargs"]) == (9, {"osd_domain": "sql"})


@pytest.mark.parametrize(
    "name, content, is_chat",
    [
        ("tokenizer_config.json", json.dumps({"chat_template": "{{ x }}"}), True),
        ("tokenizer_config.json", json.dumps({"chat_template": None}), False),
        ("tokenizer_config.json", "{", False),
        ("chat_template.jinja", "{{ x }}", True),
        ("config.json", "{}", False),
    ],
)
def test_where_a_chat_template_is_looked_for(
    tmp_path: Path, name: str, content: str, is_chat: bool
) -> None:
    (tmp_path / name).write_text(content)
    assert has_chat_template(tmp_path) is is_chat


def test_the_tally_tells_what_became_of_each_prompt_and_why() -> None:
    errors = [
        "",
        "",
        "400: This model's maximum context length is 256 tokens. However, ...",
        '400: {"message": "no such role"}',
        "400: something else",
        "ReadTimeout: ",
    ]
    tally = Tally()
    tally.add(
        [Answer(index=i, ok=not error, error=error) for i, error in enumerate(errors)],
        num_captured=1,
    )
    assert str(tally) == (
        "2 answered, 1 failed (ReadTimeout: ), 1 longer than the context, skipped, "
        '2 refused by the target and skipped (400: {"message": "no such role"}), 1 answered but '
        "not captured"
    )


@pytest.mark.parametrize("num", [0, 2])
def test_where_the_target_stops_answering_what_was_captured_is_kept(
    num: int, tmp_path: Path
) -> None:
    def answer(file: TraceWriter) -> Tally:
        for i in range(num):
            file.add(encode_trace(make_minimal_trace(str(i))))
        raise OSDError("the target does not answer")

    path = tmp_path / "work" / "traces"
    path.parent.mkdir()
    with pytest.raises(OSDError, match="^the target does not answer$") as raised:
        written(path, "9f2c", answer)
    assert isinstance(raised.value, Incomplete) == path.exists() == bool(num)
    if num:
        kept = distil.kept(path, None, tmp_path / "draft-0")
        assert kept == tmp_path / "draft-0.traces"
        with TraceFile(kept) as file:
            assert [trace.trace_id for trace in file] == ["0", "1"]
    assert not list(path.parent.iterdir())


@pytest.fixture
def interruptible() -> Iterator[None]:
    """What was started in the background of a shell may ignore Ctrl-C, and so do its children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@contextmanager
def target_that_is_left(buffer: MemoryTraceBuffer, after: int) -> Iterator[str]:
    """Each answer leaves a trace in the buffer. After so many of them comes Ctrl-C, and no more
    answers."""
    left, lock = threading.Event(), threading.Lock()
    served = list[int]()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            with lock:
                number = len(served)
                served.append(number)
            if number >= after:
                if number == after:
                    os.kill(os.getpid(), signal.SIGINT)
                left.wait(30)
                return
            buffer.put([chain_trace(number)])
            self.send_response(200)
            self.end_headers()
            line = json.dumps({"choices": [{"text": "x", "token_ids": [3]}]})
            self.wfile.write(f"data: {line}\n\n".encode())

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            left.set()
            server.shutdown()
            thread.join()


def test_who_stops_it_keeps_all_that_was_answered(tmp_path: Path, interruptible: None) -> None:
    """Also of the portion that is under way, of which nothing is in the file yet."""
    buffer = MemoryTraceBuffer(target_id=TARGET_ID, max_traces=64)
    prompts, path = [Prompt(prompt="hi")] * 30, tmp_path / "traces"
    with target_that_is_left(buffer, after=20) as url:
        plan = SimpleNamespace(target_dir=tmp_path)
        service: Any = SimpleNamespace(url=url, config=Config(), plan=plan)
        with pytest.raises(Stopped):
            written(
                path,
                TARGET_ID,
                lambda file: _answer_all(service, buffer, prompts, ASKING, file, print),
            )
    with TraceFile(path) as file:
        assert len({trace.trace_id for trace in file}) == 20


def distil_with(
    record: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    warned: list[str],
    begin: distil.Begin | None = None,
) -> int:
    """`osd distil` whose target answers as `record` says, and whose training fails."""
    monkeypatch.setattr(answering, "record", record)
    (tmp_path / "p.txt").write_text("hello\n" * 64)
    models = {"serving.target": str(tmp_path / "target")}
    models |= {} if begin else {"serving.draft": str(tmp_path / "target")}
    settings = ["trainer.device=cpu", "trainer.max_length=64", "gate.min_holdout_traces=4"]
    harmful = ["trainer.learning_rate=1.0e30", "trainer.warmup_steps=0"]
    return distil.run(
        lambda own: reading.load(None, [*settings, *harmful], models | own, {}).config,
        begin=begin or distil.Begin(),
        prompts_file=tmp_path / "p.txt",
        out=tmp_path / "new",
        keep_traces=None,
        asking=ASKING,
        epochs=1,
        force=False,
        say=print,
        warn=warned.append,
    )


def recorded_to(path: Path) -> None:
    def answer(file: TraceWriter) -> None:
        for index in range(64):
            file.add(encode_trace(chain_trace(index, holdout=index < 8)))

    written(path, TARGET_ID, answer)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_stopped", [True, False], ids=["stopped", "training fails"])
def test_what_was_captured_outlives_what_comes_to_no_end(
    is_stopped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warned = list[str]()
    save_draft(tmp_path / "target")

    def record(config: Any, prompts: Any, asking: Any, path: Path, say: Any) -> None:
        recorded_to(path)
        if is_stopped:
            raise Stopped

    kept = tmp_path / "new.traces"
    where = f"{kept} has what was captured, for `osd train`"
    with pytest.raises(KeyboardInterrupt if is_stopped else OSDError) as raised:
        distil_with(record, tmp_path, monkeypatch, warned)
    if is_stopped:
        assert warned == [f"stopped; {where}"]
    else:
        assert str(raised.value).startswith("no round of training helped: non-finite loss")
        assert str(raised.value).endswith(f"; {where}") and not warned
    with TraceFile(kept) as file:
        assert len(list(file)) == 64
    assert {path.name for path in tmp_path.iterdir()} == {"target", "p.txt", "new.traces"}


def test_of_a_new_head_its_beginning_is_kept_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it, nothing could be trained on what was captured."""
    target, warned = served_target(tmp_path / "target"), list[str]()

    def record(config: Any, prompts: Any, asking: Any, path: Path, say: Any) -> None:
        recorded_to(path)
        raise Stopped

    with pytest.raises(Stopped):
        distil_with(record, tmp_path, monkeypatch, warned, distil.Begin(True, 40))
    (line,) = warned
    assert line.endswith(f", {tmp_path / 'new.head'} is the head to begin with, for `osd train`")
    assert check_fit(target, tmp_path / "new.head")
    assert read_spec(tmp_path / "new.head").draft_vocab_size == 40
    assert {path.name for path in tmp_path.iterdir()} == {
        *("target", "p.txt", "new.traces", "new.head")
    }
