"""Configuration: precedence, strictness, and one clear line for each mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel

from osd.config import reading, schema
from osd.errors import ConfigError
from osd.exchange.registry import FEED_LENGTH
from osd.service.cluster import check_gpus
from tests.support.paths import ROOT

CONFIGS = ROOT / "configs"


def test_precedence_is_flags_overrides_environment_file_defaults(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "serving: {port: 1, host: h1, seconds_between_polls: 2, draft: d1}\ndeployment: fromfile\n"
    )
    environ = {
        "OSD_SERVING__PORT": "2",
        "OSD_SERVING__HOST": "h2",
        "OSD_SERVING__SECONDS_BETWEEN_POLLS": "3",
    }
    resolved = reading.load(
        file, ["serving.port=3", "serving.host=h3"], {"serving.port": 4}, environ
    )
    serving = resolved.config.serving
    assert (serving.port, serving.host, serving.seconds_between_polls, serving.draft) == (
        4,
        "h3",
        3,
        "d1",
    )
    assert serving.target == ""
    assert resolved.config.deployment == "fromfile"
    assert resolved.origins["serving.seconds_between_polls"] == (
        "environment variable OSD_SERVING__SECONDS_BETWEEN_POLLS"
    )
    assert resolved.origins["serving.draft"] == str(file)
    assert "serving.target" not in resolved.origins


@pytest.mark.parametrize(
    ("overrides", "environ", "origins"),
    [
        (["serving.replicas={min: 1, max: 2}"], {}, ("command line", "command line")),
        (["serving={replicas: {max: 2}}"], {}, ("default", "command line")),
        ([], {"OSD_SERVING__REPLICAS": "{max: 2}"}, ("default", "environment variable NAME")),
        (
            ["serving.replicas={max: 2}"],
            {"OSD_SERVING__REPLICAS": "1"},
            ("environment variable NAME", "command line"),
        ),
        (
            ["serving.replicas.max=9", "serving.replicas={max: 2}"],
            {},
            ("default", "command line"),
        ),
    ],
)
def test_a_mapping_sets_the_keys_below_it(
    overrides: list[str], environ: dict[str, str], origins: tuple[str, str]
) -> None:
    resolved = reading.load(None, overrides, environ=environ)
    replicas = resolved.config.serving.replicas
    assert (replicas.min, replicas.max) == (1, 2)
    found = [resolved.origins.get(f"serving.replicas.{name}", "default") for name in ("min", "max")]
    assert found == [o.replace("NAME", "OSD_SERVING__REPLICAS") for o in origins]


def test_of_two_numbers_of_replicas_the_later_source_counts(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("serving: {replicas: 2}\n")
    environ = {"OSD_SERVING__REPLICAS__MIN": "1"}
    assert reading.load(file, [], environ=environ).config.serving.replicas.min == 1
    resolved = reading.load(file, ["serving.replicas=3"], environ=environ)
    assert resolved.config.serving.replicas.min == 3


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["serving.prt=1"], "serving.prt (command line): no such key; did you mean serving.port?"),
        (["servng.port=1"], "no such key"),
        (["serving.port=99999"], "serving.port=99999 (command line)"),
        (["serving.port=abc"], "serving.port='abc'"),
        (["serving.port={a: 1}"], "serving.port={'a': 1} (command line): must be a whole number"),
        (["serving=&a {port: *a}"], "serving=&a {port: *a}: a section contains itself"),
        (["serving.vllm.x=&a {y: *a}"], "serving.vllm.x=&a {y: *a}: a section contains itself"),
        (["serving.vllm.x=&a [*a]"], "serving.vllm.x=&a [*a]: a section contains itself"),
        (["serving.replicas={mx: 2}"], "serving.replicas.mx (command line): no such key"),
        (["trainer.learning_rate=0"], "trainer.learning_rate=0"),
        (
            ["gate.min_holdout_traces=65"],
            "gate.max_holdout_traces=64 (defaults): must be at least gate.min_holdout_traces=65",
        ),
        (["deployment=Has Spaces"], "deployment='Has Spaces'"),
        (["serving.vllm.model=x"], "use serving.target"),
        (["serving.vllm.speculative-config=x"], "use serving.draft"),
        (["serving.vllm.scheduler_cls=x"], "scheduler_cls is not yours"),
        (
            ["serving.vllm.pipeline-parallel-size=2"],
            "use tensor_parallel_size: the stages of a pipeline do not all draft",
        ),
        (["serving.vllm.data_parallel_size=2"], "use a service per engine: ranks must not"),
        (["serving.vllm.nnodes=2"], "all ranks of an engine run on one machine"),
        (
            ["serving.vllm.tensor_parallel_size=0"],
            "tensor_parallel_size=0: use a whole number from 1 on",
        ),
        (["serving.vllm.tensor_parallel_size=two"], "tensor_parallel_size='two': use a whole"),
        (["serving.vllm.tensor-parallel-size=true"], "tensor_parallel_size=True: use a whole"),
        (
            ["serving.vllm.distributed_executor_backend=ray"],
            "distributed_executor_backend='ray': the ranks of an engine are processes of one "
            "machine; leave it out, or use mp",
        ),
        (
            ["serving.num_gpus=0.7", "serving.vllm.tensor_parallel_size=2"],
            "each rank has a GPU of its own, and serving.num_gpus=0.7; set serving.num_gpus=2, or "
            "0",
        ),
        (["serving.port.deep=1"], "serving.port"),
        (["nonsense"], "section.key=value"),
        (["trainer.trackers=[foo]"], "trainer.trackers.0='foo' (command line)"),
        (["speculation.mode=yes"], "speculation.mode='yes' (command line)"),
    ],
)
def test_what_is_wrong_is_named_in_one_line(overrides: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        reading.load(overrides=overrides, environ={})
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_status == 2


@pytest.mark.parametrize(
    ("overrides", "num_ranks"),
    [
        ([], 1),
        (["serving.vllm.tensor_parallel_size=1", "serving.num_gpus=0.7"], 1),
        (["serving.vllm.tensor_parallel_size=2"], 2),
        (["serving.vllm.tensor-parallel-size=4", "serving.num_gpus=4"], 4),
    ],
)
def test_an_engine_may_be_split_over_ranks(overrides: list[str], num_ranks: int) -> None:
    assert reading.load(overrides=overrides, environ={}).config.serving.num_ranks == num_ranks


@pytest.mark.parametrize(
    ("key", "word"),
    [
        (f"{name}.{key}", word)
        for name, section in schema.Config.model_fields.items()
        if isinstance(section.annotation, type) and issubclass(section.annotation, BaseModel)
        for key, field in section.annotation.model_fields.items()
        if get_origin(field.annotation) is Literal
        for word in get_args(field.annotation)
    ],
)
def test_every_word_there_is_to_choose_can_be_typed_everywhere(
    key: str, word: str, tmp_path: Path
) -> None:
    """`mode: off` too, which YAML reads as `mode: false`."""
    section, name = key.split(".")
    file = tmp_path / "c.yaml"
    file.write_text(f"{section}:\n  {name}: {word}\n")
    variable = {f"OSD_{section}__{name}".upper(): word}
    for found in (
        reading.load(overrides=[f"{key}={word}"], environ={}),
        reading.load(environ=variable),
        reading.load(file, environ={}),
    ):
        assert reading.leaves(found.config)[key] == word


def test_a_private_valkey_has_room_for_the_feed() -> None:
    """Of some 500 bytes a record, beside what the server takes for itself."""
    least = 64 << 20
    assert least > 2 * 500 * FEED_LENGTH
    reading.load(overrides=[f"buffer.max_memory={least}"], environ={})
    with pytest.raises(ConfigError, match="buffer.max_memory=.*greater than or equal to 67108864"):
        reading.load(overrides=[f"buffer.max_memory={least - 1}"], environ={})


@pytest.mark.parametrize("key", ["data_dir", "releases.dir", "trainer.tracker_dir"])
def test_a_home_that_there_is_not_is_refused(key: str) -> None:
    """A shell leaves it as it stands."""
    with pytest.raises(ConfigError, match=f"{key}=.*: there is no home directory ~nobody-here$"):
        reading.load(overrides=[f"{key}=~nobody-here/x"], environ={})
    reading.load(overrides=[f"{key}=~/x"], environ={})


@pytest.mark.parametrize(
    "key", ["trainer.payback_seconds", "control.seconds_between_looks", "buffer.max_age_seconds"]
)
@pytest.mark.parametrize("value", [".inf", "inf"])
def test_a_number_without_end_is_none(key: str, value: str) -> None:
    """Spans of time are told in the log, and slept."""
    with pytest.raises(ConfigError, match=rf"{key}='?inf'? .command line.: must be a finite"):
        reading.load(overrides=[f"{key}={value}"], environ={})


@pytest.mark.parametrize(
    "key", ["speculation.k_max", "serving.port", "trainer.learning_rate", "buffer.max_age_seconds"]
)
@pytest.mark.parametrize("value", ["true", "false"])
def test_a_switch_is_no_number(key: str, value: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"{key}={value.title()} \(command line\): a number is wanted"
    ):
        reading.load(overrides=[f"{key}={value}"], environ={})


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (
            b"serving: {port: 1}\nserving: {host: h}\n",
            "line 2: not valid YAML (serving stands there twice)",
        ),
        (b"serving:\n  port: 1\n  port: 2\n", "line 3: not valid YAML (port stands there twice)"),
        (b"\xff\xfe\x00", "is not text in UTF-8"),
        (b"serving: \x00", "not valid YAML (a character that is not allowed at position 9)"),
        (b"deployment: 2024-13-45", "not valid YAML (month must be in 1..12"),
        (b"deployment: !!bool foo", "not valid YAML"),
        (b"serving: &a {x: *a}", "a section contains itself"),
        (b"a: " + b"[" * 5000, "not valid YAML"),
        (b"serving: 3", "serving=3"),
    ],
)
def test_a_file_that_is_no_configuration_is_one_line(
    content: bytes, says: str, tmp_path: Path
) -> None:
    file = tmp_path / "c.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        reading.load(file, environ={})
    assert says in str(caught.value) and str(file) in str(caught.value)
    assert "\n" not in str(caught.value) and "ServingConfig" not in str(caught.value)


def test_words_are_words_and_switches_are_switches(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "serving:\n  env: {A: off, B: on, C: true}\n  vllm: {enforce_eager: on, "
        "enable_prefix_caching: No, seed: 3}\n"
        "  served_model_name: on\ncapture: {enabled: off}\ntrainer: {enabled: yes}\n"
    )
    found = reading.load(file, ["deployment=no"], environ={}).config
    assert found.serving.env == {"A": "off", "B": "on", "C": "true"}
    assert found.serving.vllm == {"enforce_eager": True, "enable_prefix_caching": False, "seed": 3}
    assert (found.serving.served_model_name, found.deployment) == ("on", "no")
    assert (found.capture.enabled, found.trainer.enabled) == (False, True)


def test_merged_mappings_may_override(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "serving:\n  vllm: &base {seed: 1, max_model_len: 9}\n  env: &other {<<: *base, seed: 2}\n"
        "capture: &c {enabled: false}\n"
    )
    found = reading.load(file, environ={}).config
    assert found.serving.env == {"seed": "2", "max_model_len": "9"}
    assert found.serving.vllm == {"seed": 1, "max_model_len": 9}


@pytest.mark.parametrize(
    "overrides",
    [
        ["serving.vllm.compilation_config={mode: 0, cudagraph_mode: FULL}"],
        ["serving.vllm.compilation_config.mode=0", "serving.vllm.compilation_config={x: 1}"],
        ["serving.vllm.compilation_config.mode=0"],
    ],
)
def test_an_argument_of_vllm_may_have_parts(tmp_path: Path, overrides: list[str]) -> None:
    file = tmp_path / "osd.yaml"
    file.write_text("serving: {vllm: {compilation_config: {cudagraph_mode: PIECEWISE}}}")
    overrides = [*overrides, "serving.vllm.compilation_config.cudagraph_mode=FULL"]
    for path in (None, file):
        found = reading.load(path, overrides, environ={}).config.serving.vllm
        assert list(found) == ["compilation_config"]
        assert found["compilation_config"] | {"x": 1} == {
            "mode": 0,
            "cudagraph_mode": "FULL",
            "x": 1,
        }
    with pytest.raises(ConfigError, match="seed is a value, not a section"):
        reading.load(None, ["serving.vllm.seed=1", "serving.vllm.seed.x=1"], environ={})


def test_a_part_of_an_argument_of_vllm_may_come_from_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "osd.yaml"
    file.write_text("serving: {vllm: {compilation_config: {mode: 3, cudagraph_mode: FULL}}}")
    variable = "OSD_SERVING__VLLM__COMPILATION_CONFIG__MODE"
    found = reading.load(file, environ={variable: "0"})
    assert found.config.serving.vllm == {
        "compilation_config": {"mode": 0, "cudagraph_mode": "FULL"}
    }
    origin = found.origins["serving.vllm.compilation_config.mode"]
    assert origin == f"environment variable {variable}"


def test_an_argument_of_vllm_with_dashes_is_the_one_with_underscores(tmp_path: Path) -> None:
    """Else the engine would take the later one, and what reads the configuration the first."""
    file = tmp_path / "osd.yaml"
    file.write_text("serving: {vllm: {max_model_len: 9, compilation-config: {x-y: 1}}}")
    overrides = ["serving.vllm.max-model-len=5", "serving.vllm.compilation_config.mode=0"]
    assert reading.load(file, overrides, environ={}).config.serving.vllm == {
        "max_model_len": 5,
        "compilation_config": {"x-y": 1, "mode": 0},
    }


def test_names_below_free_mappings_may_hold_dots_where_they_are_no_parts(tmp_path: Path) -> None:
    overrides = ["serving.vllm.hf_overrides={a.b: {c.d: 1}}", "serving.env.A.B=1"]
    serving = reading.load(None, overrides, environ={}).config.serving
    assert serving.vllm == {"hf_overrides": {"a.b": {"c.d": 1}}}
    assert serving.env == {"A.B": "1"}
    told = reading.load(None, ["serving.env.CONFIG={a: 1}"], environ={}).config.serving.env
    assert list(told) == ["CONFIG"], "no variable is invented"


def test_a_part_that_is_set_is_not_set_in_what_shares_an_anchor(tmp_path: Path) -> None:
    file = tmp_path / "osd.yaml"
    file.write_text("serving: {vllm: {one: &one {x: 1, all: [{y: 1}]}, other: *one}}")
    found = reading.load(file, ["serving.vllm.one.x=2"], environ={}).config.serving.vllm
    assert found["one"]["x"] == 2
    assert found["other"] == {"x": 1, "all": [{"y": 1}]}
    assert found["one"]["all"][0] is not found["other"]["all"][0]


def test_an_unknown_key_fails_in_file_and_environment_too(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("trainer:\n  lerning_rate: 1\n")
    with pytest.raises(
        ConfigError, match=r"trainer.lerning_rate .*c.yaml.*did you mean trainer.learning_rate"
    ):
        reading.load(file, environ={})
    with pytest.raises(ConfigError, match="OSD_TRAINER__LERNING_RATE: no such key"):
        reading.load(environ={"OSD_TRAINER__LERNING_RATE": "1"})
    reading.load(environ={"OSD_URL": "http://x", "PATH": "/"})


@pytest.mark.parametrize(
    ("text", "says"),
    [("a: [", "not valid YAML"), ("- 1", "must be a mapping"), (None, "cannot be read")],
)
def test_a_bad_file_is_one_line(tmp_path: Path, text: str | None, says: str) -> None:
    file = tmp_path / "c.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=says):
        reading.load(file, environ={})


@pytest.mark.parametrize(
    ("serving", "key"),
    [
        ({}, "outer"),
        ({"env": {"VLLM_API_KEY": "of-the-replica"}}, "of-the-replica"),
        ({"env": {"VLLM_API_KEY": "of-the-replica"}, "vllm": {"api_key": "one"}}, "one"),
        ({"vllm": {"api_key": ["one", "two"]}}, "one"),
    ],
)
def test_the_key_clients_need_is_found_where_vllm_looks(
    serving: dict[str, Any], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "outer")
    assert schema.Config.model_validate({"serving": serving}).serving.api_key == key
    monkeypatch.delenv("VLLM_API_KEY")
    assert schema.Config().serving.api_key == ""


def test_vllm_arguments_pass_through_and_merge() -> None:
    overrides = [
        "serving.vllm.dtype=bfloat16",
        "serving.vllm.max_model_len=512",
        "serving.env.OMP_NUM_THREADS=1",
    ]
    serving = reading.load(overrides=overrides, environ={}).config.serving
    assert serving.vllm == {"dtype": "bfloat16", "max_model_len": 512}
    assert serving.env == {"OMP_NUM_THREADS": "1"}


OF_CLUSTERS = ("cluster-", "kuberay")


@pytest.mark.parametrize(
    "path", sorted(p for p in CONFIGS.glob("*.yaml") if not p.name.startswith(OF_CLUSTERS))
)
def test_every_preset_loads(path: Path) -> None:
    resolved = reading.load(path, environ={})
    assert resolved.config.serving.target
    assert resolved.config.serving.draft


@pytest.mark.parametrize(("name", "num"), [("single-gpu", 1), ("two-gpus", 2)])
def test_a_preset_for_gpus_reserves_as_many_as_its_name_says(name: str, num: int) -> None:
    config = reading.load(CONFIGS / f"{name}.yaml", environ={}).config
    check_gpus(config, num)
    with pytest.raises(ConfigError, match=f"Ray finds {num - 1} GPUs on this machine"):
        check_gpus(config, num - 1)
    assert config.trainer.precision == "bf16", "it is what a GPU computes fast in"


def test_every_key_is_documented() -> None:
    def check(section: type[BaseModel]) -> None:
        assert section.__doc__
        for name, info in section.model_fields.items():
            inner = info.annotation
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                check(inner)
            else:
                assert info.description, f"{section.__name__}.{name} has no text under it"

    for info in schema.Config.model_fields.values():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            check(info.annotation)


@pytest.mark.parametrize(
    ("overrides", "limits"),
    [
        ([], (1, 1)),
        (["serving.replicas=3"], (3, 3)),
        (["serving.replicas.max=3"], (1, 3)),
        (["serving.replicas={min: 2, max: 4}"], (2, 4)),
        (["serving.replicas=2", "serving.replicas.max=3"], (2, 3)),
        (["serving.replicas={min: 1, max: 3}", "serving.replicas=2"], (2, 2)),
    ],
)
def test_replicas_are_a_number_or_limits(overrides: list[str], limits: tuple[int, int]) -> None:
    config = reading.load(overrides=overrides, environ={}).config
    assert (config.serving.replicas.min, config.serving.replicas.max) == limits
    is_alone = limits[1] == 1
    assert config.front_door_url == ("" if is_alone else "http://127.0.0.1:8000")


def test_replicas_of_a_file_and_of_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "osd.yaml"
    file.write_text("serving: {replicas: {min: 1, max: 4, requests_each: 8}}")
    environ = {"OSD_SERVING__REPLICAS": "2"}
    found = reading.load(file, environ=environ).config.serving.replicas
    assert (found.min, found.max, found.requests_each) == (2, 2, 8)
    number = tmp_path / "number.yaml"
    number.write_text("serving: {replicas: 2}")
    found = reading.load(number, ["serving.replicas.max=5"], environ={}).config.serving.replicas
    assert (found.min, found.max) == (2, 5)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("serving.replicas={min: 3, max: 2}", "min=3 is above max=2; raise max or lower min"),
        ("serving.replicas=true", "must be a whole number, or have min and max"),
        ("serving.replicas=two", "must be a whole number, or have min and max"),
        ("serving.replicas=0", "serving.replicas.min=0"),
        ("serving.replica=2", "did you mean serving.replicas?"),
    ],
)
def test_replicas_that_cannot_be_are_one_line(override: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        reading.load(overrides=[override], environ={})
    assert says in str(caught.value) and "\n" not in str(caught.value)
