"""Why a part did not start, in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray
from pydantic import BaseModel, Field, ValidationError, model_validator

from osd.errors import OSDError
from osd.service import cluster
from osd.service.reasons import reason_from_log, refused


class Options(BaseModel):
    max_model_len: int = 8
    share: float = Field(0.5, le=1)

    @model_validator(mode="after")
    def fits(self) -> Options:
        if self.max_model_len > 100:
            raise ValueError("no room for so long a request")
        return self


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"max_model_len": "abc"},
            "serving.vllm.max_model_len: Input should be a valid integer, unable to parse string "
            "as an integer, and is 'abc'",
        ),
        (
            {"share": 7},
            "serving.vllm.share: Input should be less than or equal to 1, and is 7",
        ),
        (
            {"max_model_len": 200},
            "serving.vllm: no room for so long a request",
        ),
    ],
)
def test_what_vllm_refuses_is_named(given: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError) as raised:
        Options.model_validate(given)
    assert refused(raised.value) == said
    assert "\n" in str(raised.value)


def test_other_errors_say_what_they_say() -> None:
    assert refused(ValueError("no")) == ""


def test_the_last_error_of_a_log_but_for_those_that_point_elsewhere(tmp_path: Path) -> None:
    log = tmp_path / "replica-0.log"
    log.write_text(
        "ValueError: first\nplain\nOSError: disk full\n"
        "RuntimeError: Engine core failed. See root cause above.\n"
    )
    assert reason_from_log(log) == "disk full"
    assert reason_from_log(tmp_path / "none.log") == ""


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("engine", "replica-0: the engine did not start: serving.vllm.share: Input should be "),
        ("control port", "replica-0: the control port did not start: disk full; see "),
    ],
)
def test_an_engine_alone_is_told_that_vllm_refuses_its_options(
    what: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "log").write_text("OSError: disk full\n")

    def get(ready: object) -> None:
        with pytest.raises(ValidationError) as refusal:
            Options(share=7)
        raise ray.exceptions.RayTaskError("wait_ready", "", refusal.value)

    monkeypatch.setattr(ray, "get", get)
    with pytest.raises(OSDError) as raised:
        cluster.url_of(object(), "replica-0", what, lambda: tmp_path / "log")
    assert str(raised.value).startswith(said)


def test_what_an_engine_says_in_several_lines_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As transformers does where a tokenizer is missing."""

    def get(ready: object) -> None:
        said = ValueError("needs one of: \n(1) a file, \n(2) a package.\nNone is there.")
        raise ray.exceptions.RayTaskError("wait_ready", "", said)

    monkeypatch.setattr(ray, "get", get)
    with pytest.raises(OSDError) as raised:
        cluster.url_of(object(), "replica-0", "engine", lambda: tmp_path / "log")
    why = "needs one of: (1) a file, (2) a package. None is there."
    assert str(raised.value) == f"replica-0: the engine did not start: {why}; see {tmp_path}/log"
