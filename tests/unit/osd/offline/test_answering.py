"""How prompts become requests, and what is reported of the answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from buffers.codec import encode_trace
from buffers.trace_file import TraceFile, TraceWriter
from osd.client.load import Answer
from osd.errors import OSDError
from osd.offline import distil
from osd.offline.answering import Incomplete, Tally, body_of, has_chat_template, written
from osd.offline.prompts import Asking, Message, Prompt
from tests.support.builders import make_minimal_trace

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
