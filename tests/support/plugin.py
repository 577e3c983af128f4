"""A plugin of vLLM's for whole servers under test: they schedule as on a device, in the way that
the environment names."""

from __future__ import annotations

import os
from pathlib import Path

from tests.support.paths import ROOT
from tests.support.ways import WAYS, Way

PLUGIN = "osd_tested_way"


def environment(way: Way, directory: Path, plugins: str = "") -> dict[str, str]:
    """What a server's environment needs beside its own; the plugin is installed in `directory`.
    `plugins`: those that its VLLM_PLUGINS names already."""
    from tests.support.engines import SETTLED

    metadata = directory / f"{PLUGIN}-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PLUGIN}\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(
        f"[vllm.general_plugins]\n{PLUGIN} = {__name__}:begin\n"
    )
    paths = [str(directory), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "VLLM_PLUGINS": ",".join(filter(None, [plugins, PLUGIN])),
        SETTLED: way.name,
    }


def begin() -> None:
    """vLLM calls it in each of its processes."""
    from tests.support.engines import SETTLED, settle

    settle(next(way for way in WAYS if way.name == os.environ[SETTLED]))
