"""Two hosts of a cluster, a third one from which `ray up` is run, and the file for it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.hosts import CHECKOUT, Hosts, hosts_in, missing
from tests.support.pairs import build_pair
from tests.support.paths import ROOT
from tests.support.traffic import MODEL

SERVICE: dict[str, Any] = {
    "data_dir": "~/osd-data",
    "serving": {
        "target": "~/pair/target",
        "draft": "~/pair/stranger",
        "served_model_name": MODEL,
        "vllm": {
            "dtype": "float32",
            "enforce_eager": True,
            "kv_cache_memory_bytes": 64 << 20,
            "max_model_len": 256,
            "max_num_seqs": 16,
            "per_request_spec_decode_metrics": "summary",
        },
        "env": {
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        },
    },
    "speculation": {"mode": "fixed", "k_max": 4},
    "capture": {"accepted_fraction": 1.0},
    "trainer": {
        "learning_rate": 5e-3,
        "min_new_traces": 24,
        "replay_batches": 2,
        "patience_rounds": 0,
    },
    "gate": {"min_holdout_traces": 4, "rollback_min_tested": 1_000_000},
}
"""A first draft that knows nothing of its target; the service begins to learn at once. The
worker has no draft."""


@pytest.fixture(scope="session")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    if why := missing():
        pytest.fail(why)
    with hosts_in(tmp_path_factory.mktemp("hosts") / "all") as found:
        (found["head"].home / "pair").mkdir()
        pair = build_pair(found["head"].home / "pair")
        shutil.copytree(pair.target, found["worker"].home / "pair/target")
        write_cluster_file(found)
        yield found


def write_configuration(hosts: Hosts, **changes: Any) -> None:
    """`SERVICE` with these changes: a section's keys are added to it."""
    given = dict(SERVICE)
    for section, value in changes.items():
        is_mapping = isinstance(value, dict)
        given[section] = {**given.get(section, {}), **value} if is_mapping else value
    (hosts["laptop"].home / "osd.yaml").write_text(yaml.safe_dump(given))


def write_cluster_file(hosts: Hosts) -> None:
    """The one that is shipped, with its words in capitals filled in. The project's environment is
    mounted, so that it is not set up."""
    text = (ROOT / "configs/cluster-local.yaml").read_text()
    home = Path("~").expanduser()
    words = {
        ": HEAD": f": {hosts['head'].address}",
        "[WORKER]": f"[{hosts['worker'].address}]",
        " HEAD ": f" {hosts['head'].address} ",
        " WORKER ": f" {hosts['worker'].address} ",
        ": USER": ": root",
        ": KEY": f": {home}/.ssh/key",
        '"CONFIG"': f'"{home}/osd.yaml"',
        f"cd ~/{CHECKOUT} && make setup": f"test -x ~/{CHECKOUT}/.venv/bin/osd",
    }
    for word, value in words.items():
        assert word in text, word
        text = text.replace(word, value)
    (hosts["laptop"].home / "cluster.yaml").write_text(text)
