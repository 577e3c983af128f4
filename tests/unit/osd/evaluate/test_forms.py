"""Each form is read from a file as it lies on disk; what is wrong is named with its line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from osd.errors import ConfigError
from osd.evaluate.forms import FORMS, form_of, read

DATA = Path(__file__).parent / "data"


def asked(name: str, form: str | None = None) -> list[str]:
    return [question.messages[-1]["content"] for question in read(DATA / name, form)]


def test_each_form_is_told_by_its_keys_and_asks_what_the_data_asks() -> None:
    assert asked("instructcoder.jsonl") == [
        "x = 1 + 2\nprint(x)\n\nRename the variable to total. Just output the code, do not include "
        "any explanation."
    ]
    assert asked("sharegpt.json") == ["What is a ferry?", "Name a river."]
    assert asked("cnn_dailymail.jsonl") == [
        "Summarize this article:\n\n(CNN) The bridge was closed on Monday. It opens again in May."
    ]
    assert asked("gsm8k.jsonl") == [
        "Ann has 3 boxes of 4 pens. How many pens?",
        "Bob had 9 apples and ate 2. How many are left?",
    ]
    assert asked("aime.jsonl") == [
        "Find the least positive n with n^2 > 50.\n\nPut the final answer, a number, within "
        "\\boxed{}."
    ]
    assert asked("gpqa.csv") == [
        "Which particle carries\nno charge?\n\n(A) Electron\n(B) Muon\n(C) Neutron\n(D) Proton"
    ]
    assert asked("spider.json") == [
        "Database concert_singer. Answer in SQL: How many singers do we have?"
    ]
    assert asked("alpaca.json") == ["Translate to German.\n\nGood morning.", "Name three colours."]


def test_a_fixture_of_every_form_is_there() -> None:
    found = {form_of(json.loads(_first(path)), path.stem) for path in DATA.glob("*.json*")}
    assert found | {"gpqa"} == set(FORMS)


def _first(path: Path) -> str:
    text = path.read_text()
    return json.dumps(json.loads(text)[0]) if path.suffix == ".json" else text.split("\n")[0]


def test_problems_whose_answer_is_a_bare_number_are_of_aime() -> None:
    row = {"question": "Find n.", "answer": "8"}
    assert form_of(row) == "aime" and form_of(row | {"answer": "So\n#### 8"}) == "gsm8k"


def test_any_lines_with_prompts_or_messages_do() -> None:
    first, second = read(DATA / "any.jsonl")
    assert (first.data, first.max_tokens, first.at) == ("sums", 4, 0.5)
    assert first.messages == ({"role": "user", "content": "2 + 2 ="},)
    assert (second.data, second.max_tokens, second.at) == ("any", None, None)
    assert [message["role"] for message in second.messages] == ["system", "user"]


def test_a_form_that_is_named_wins_over_the_keys() -> None:
    assert asked("alpaca.json", "instructcoder")[1].startswith("Name three colours. Just output")
    assert "boxed" in asked("gsm8k.jsonl", "aime")[0]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("x.jsonl", '{"prompt": "a"}\n{"prompt": \n', "x.jsonl line 2: is not JSON"),
        ("x.jsonl", '{"prompt": "a"}\n\n[1]\n', "x.jsonl line 3: is no JSON object"),
        ("x.jsonl", '{"prompt": "a"}\n{"prompt": ""}', "line 2: is not of the form plain (prompt"),
        ("x.jsonl", '{"prompt": "a", "max_tokens": 0}', "line 1: is not of the form plain (max_"),
        ("x.jsonl", '{"prompt": "a", "at": "noon"}', "line 1: is not of the form plain (at=noon"),
        ("x.jsonl", '{"prompt": "a", "at": NaN}', "(at=nan must be seconds)"),
        ("x.jsonl", '{"prompt": "a", "at": Infinity}', "(at=inf must be seconds)"),
        ("x.jsonl", '{"messages": []}', "messages must have role and content"),
        ("x.jsonl", '{"prompt": "a", "messages": []}', "either a prompt or messages"),
        ("x.jsonl", '{"messages": [{"role": "user"}]}', "messages must have role and content"),
        ("x.jsonl", '{"text": "a"}', "line 1: its keys (text) are of no known form"),
        ("x.json", '[{"prompt": "a"}, 3]', "x.json item 2: is no JSON object"),
        ("x.json", '{"prompt": "a"}', "must be a list of requests"),
        ("x.json", "[", "x.json line 1: is not JSON"),
        ("x.json", "[]", "holds no request"),
        ("x.csv", "Question,Correct Answer\na,b\n", "line 2: is not of the form gpqa ('Incorrect"),
        ("x.txt", "a", "must end in .jsonl, .json, .csv"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(name: str, text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as error:
        read(tmp_path / name)
    assert said in str(error.value) and "\n" not in str(error.value)
    assert str(error.value).startswith(f"--data: {tmp_path}")


def test_a_file_that_is_not_there_and_a_form_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match=r"--form: 'gsm' is none of plain, "):
        read(DATA / "gsm8k.jsonl", "gsm")
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "\xe9"}\n')
    with pytest.raises(ConfigError, match=r"latin.jsonl line 2: not UTF-8 text"):
        read(tmp_path / "latin.jsonl")


@pytest.mark.parametrize("name", ["x.json", "x.jsonl"])
def test_what_is_nested_too_deeply_is_said_in_one_line(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("[" * 200_000)
    with pytest.raises(ConfigError, match=f"{name} line 1: is not JSON .maximum recursion depth"):
        read(tmp_path / name)


def test_a_field_may_be_long(tmp_path: Path) -> None:
    article = "word " * 40_000 + "end"
    (tmp_path / "x.csv").write_text(f'article,highlights\n"{article}",short\n')
    assert asked(str(tmp_path / "x.csv")) == [f"Summarize this article:\n\n{article}"]


def test_numbers_of_a_csv_are_numbers(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("prompt,max_tokens,at\na,7,1.5\nb,,2\nc\n")
    found = [(one.max_tokens, one.at) for one in read(tmp_path / "x.csv")]
    assert found == [(7, 1.5), (None, 2.0), (None, None)]
    (tmp_path / "y.csv").write_text("prompt,at\na,noon\n")
    with pytest.raises(ConfigError, match=r"y.csv line 2: .* \(at=noon must be seconds\)"):
        read(tmp_path / "y.csv")


def test_separators_of_unicode_end_no_row_of_a_csv(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("problem,answer\nfirst\u2028second\x0cthird,7\r\nlast,8\r\n")
    first, last = asked(str(tmp_path / "x.csv"))
    assert first.startswith("first\u2028second\x0cthird\n\nPut the final answer")
    assert last.startswith("last\n\nPut the final answer")


def test_half_a_surrogate_pair_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b \\ud800"}\n')
    with pytest.raises(ConfigError, match=r"x.jsonl line 2: is not of the form plain \('utf-8'"):
        read(tmp_path / "x.jsonl")


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (
            [
                {"id": "a_0", "conversations": []},
                {"id": "b_1", "conversations": [{"from": "gpt", "value": "I am a model."}]},
                {"id": "c_0", "conversations": [{"from": "human", "value": ""}]},
                {"id": "d_0", "conversations": [{"from": "human", "value": "Name a river."}]},
            ],
            "Name a river.",
        ),
        (
            [
                {"article": "", "highlights": "Nothing.", "id": "1"},
                {"article": "It rains.", "highlights": "Rain.", "id": "2"},
            ],
            "Summarize this article:\n\nIt rains.",
        ),
    ],
)
def test_what_asks_nothing_in_published_files_is_passed_over(
    rows: list[object], words: str, tmp_path: Path
) -> None:
    (tmp_path / "x.json").write_text(json.dumps(rows))
    assert asked(str(tmp_path / "x.json")) == [words]
    (tmp_path / "x.json").write_text(json.dumps(rows[:1]))
    with pytest.raises(ConfigError, match="holds no request"):
        read(tmp_path / "x.json")


def test_a_conversation_may_have_roles_and_contents_and_nothing_else(tmp_path: Path) -> None:
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name a sea."}]
    (tmp_path / "x.jsonl").write_text(json.dumps({"conversations": turns}))
    assert asked(str(tmp_path / "x.jsonl")) == ["Name a sea."]
    (tmp_path / "x.jsonl").write_text('{"conversations": [{"speaker": "user", "text": "a"}]}')
    with pytest.raises(ConfigError, match="line 1: is not of the form sharegpt .'role' is missing"):
        read(tmp_path / "x.jsonl")
