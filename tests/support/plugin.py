"""Whole servers under test, which run vLLM as on a device, in the way that the environment names: a
plugin of vLLM's, and, for the V2 model runner, Triton's interpreter in each process."""

from __future__ import annotations

import os
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

from tests.support import interpreter
from tests.support.paths import ROOT
from tests.support.ways import SETTLED, WAYS, Way

PLUGIN = "osd_tested_way"


def environment(way: Way, directory: Path, plugins: str = "") -> dict[str, str]:
    """What a server's environment needs beside its own; the plugin is installed in `directory`.
    `plugins`: those that its VLLM_PLUGINS names already."""
    metadata = directory / f"{PLUGIN}-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PLUGIN}\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(
        f"[vllm.general_plugins]\n{PLUGIN} = {__name__}:begin\n"
    )
    paths = [str(directory), str(ROOT), os.environ.get("PYTHONPATH", "")]
    found = {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "VLLM_PLUGINS": ",".join(filter(None, [plugins, PLUGIN])),
        SETTLED: way.name,
        "VLLM_LOGGING_LEVEL": "INFO",  # the log says which runner it is
    }
    if way.runner == "V2":
        # Python imports it when it starts.
        (directory / "sitecustomize.py").write_text(f"from {__name__} import watch\nwatch()\n")
        found |= interpreter.ENVIRONMENT
    return found


def begin() -> None:
    """vLLM calls it in each of its processes."""
    from tests.support.engines import settle

    settle(next(way for way in WAYS if way.name == os.environ[SETTLED]))
    if interpreter.is_asked_for():
        interpreter.leave_out()


def watch() -> None:
    """Find Triton as soon as vLLM is imported, and not before: most processes never do."""

    class Watch(MetaPathFinder):
        def find_spec(self, fullname: str, *_: Any) -> None:
            if fullname == "vllm":
                sys.meta_path.remove(self)
                interpreter.find()

    sys.meta_path.insert(0, Watch())
