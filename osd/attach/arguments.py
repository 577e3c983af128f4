"""What an engine must be built with so that it can be attached: our scheduler and worker extension.

They are vLLM's own arguments (`scheduler_cls`, `worker_extension_cls`, `additional_config`). Built
in, they do nothing by themselves: the scheduler is held at vLLM's own way, and no hook is installed
before the deployment says so (`osd/attach/loop.py`). Where an engine cannot be attached, it is
built as without us, and the log says why.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from typing import Any

from osd.attach.plugin import VARIABLE
from osd.config.serving import argument
from serving.speculation.control import SETTINGS_KEY
from serving.vllm import names, parts, server
from serving.vllm.attached import on_engine_config

logger = logging.getLogger(__name__)

PLUGIN = "osd"
"""Name of both entry points, in `VLLM_PLUGINS`."""
EXTENSION = "osd.service.worker.Worker"
SCHEDULER = "serving.speculation.scheduler.controlled_scheduler"
UNTESTED = "OSD_ATTACH_UNTESTED"
"""Variable that lets an engine of a release of vLLM be attached that was never run."""
HEADS = ("eagle-", "eagle3", "dflash", "dspark")
"""Parts of a draft's name by which vLLM goes where no method is given, or `draft_model`, in its
order."""
METHODS = (None, "draft_model", "eagle3")
"""Of vLLM's, those whose drafts can learn."""
FLAGS = {
    "spec_method": "method",
    "spec_model": "model",
    "spec_tokens": "num_speculative_tokens",
}
"""vLLM's arguments that each give a key of `speculative_config`."""
ATTACHED_KEY = "osd_attached"
"""Key within vLLM's `additional_config` that says that an engine was built to be attached."""


def install() -> None:
    """From now on, engines of this process are built so."""
    on_engine_config(prepare)


def prepare(args: Any, environ: Mapping[str, str] = os.environ) -> None:
    """Change vLLM's `EngineArgs` in place, before a configuration is made of them."""
    if ATTACHED_KEY in (args.additional_config or {}):
        return  # by another process, or before
    if problem := why_not(args, environ):
        logger.warning("%s is set, but this engine is not attached: %s", VARIABLE, problem)
        return
    # The workers will import it. Where it lacks a library, nothing may be changed yet.
    import_module(EXTENSION.rpartition(".")[0])
    speculative = dict(args.speculative_config or {}) | _by_flags(args)
    k = int(argument(speculative, "num_speculative_tokens"))
    given = dict(args.additional_config or {})
    given[ATTACHED_KEY] = {
        "k": k,
        "draft_sample_method": argument(speculative, "draft_sample_method") or "greedy",
        "off": {},
    }
    args.worker_extension_cls = EXTENSION
    if problem := parts.problem_with("control"):
        parts.switch_off(given[ATTACHED_KEY]["off"], "control", problem)
    else:
        args.scheduler_cls = SCHEDULER
        given[SETTINGS_KEY] = {
            "mode": "auto",
            "k_max": k,
            "memory_k_max": k,  # the engine has no room for more
            "memory_fraction": 0.0,  # until it captures
            "is_held": True,
        }
        args.speculative_config = speculative | server.graphs_for_every_k(k, environ)
        for flag in filter(partial(hasattr, args), FLAGS):
            setattr(args, flag, None)  # vLLM refuses what is given twice
    args.additional_config = given


def why_not(args: Any, environ: Mapping[str, str] = os.environ) -> str:
    """Why an engine with these arguments cannot be attached; "" when it can."""
    if PLUGIN not in environ.get("VLLM_PLUGINS", "").split(","):
        return f"VLLM_PLUGINS must name {PLUGIN!r}, as in VLLM_PLUGINS={PLUGIN}"
    engine = names.engine_version()
    release = engine.partition(" ")[2].partition("+")[0]
    if release not in names.TESTED_VERSIONS and not environ.get(UNTESTED):
        tested = " or ".join(names.TESTED_VERSIONS)
        return f"{engine} was never run with it (but {tested}); {UNTESTED}=1 tries it"
    speculative, by_flags = args.speculative_config or {}, _by_flags(args)
    if isinstance(speculative, dict):
        for flag, key in FLAGS.items():
            if key in by_flags.keys() & speculative:
                return f"--{flag.replace('_', '-')} and --speculative-config both give {key}"
        speculative = speculative | by_flags
    if not isinstance(speculative, dict) or not speculative.get("model"):
        return "it has no draft model; give one with --speculative-config or --spec-model"
    method = speculative.get("method")
    if method not in METHODS:
        return f"it drafts by {method!r}, and only draft models and EAGLE-3 heads can learn"
    name = str(speculative["model"]).lower()
    head = next((word for word in HEADS if word in name), "")
    if method != "eagle3" and head and (method, head) != (None, "eagle3"):
        return f"vLLM takes its draft for a head, since its name contains {head!r}"
    if "num_speculative_tokens_per_batch_size" in speculative:
        return "it has a table of draft tokens by batch size, which would be lost"
    if (rule := argument(speculative, "rejection_sample_method")) == "synthetic":
        return (
            "rejection_sample_method='synthetic' accepts draft tokens by lot, so that its answers "
            "are not the target's; leave it out of --speculative-config"
        )
    if rule not in (None, "standard"):
        return f"rejection_sample_method={rule!r} was never run with it; leave it out"
    if quantization := argument(speculative, "draft_lm_head_quantization"):
        return f"draft_lm_head_quantization={quantization!r} was never run with it; leave it out"
    if not argument(speculative, "num_speculative_tokens"):
        return "num_speculative_tokens is missing; give it in --speculative-config or --spec-tokens"
    for name in ("worker_extension_cls", "scheduler_cls"):
        if getattr(args, name, None):
            return f"--{name.replace('_', '-')} is taken by {getattr(args, name)}"
    for name in ("pipeline_parallel_size", "data_parallel_size"):
        if (getattr(args, name, None) or 1) > 1:
            return f"--{name.replace('_', '-')} above 1 is not known to work"
    return ""


def _by_flags(args: Any) -> dict[str, Any]:
    """What of `speculative_config` is given by arguments of its own. A release may have none."""
    given = {key: getattr(args, flag, None) for flag, key in FLAGS.items()}
    return {key: value for key, value in given.items() if value is not None}
