"""vLLM's own server, built from its parts: arguments, engine, OpenAI application."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from typing import Any

KEEP_ALIVE_SECONDS = 75
"""An idle connection of a client stays open for so long."""


def prepare_environment(environ: Any = os.environ) -> None:
    """Set what vLLM reads when it is imported, in every process of an engine.

    The V1 model runner unless told otherwise, with which most was run; on CUDA vLLM would choose
    V2.
    """
    environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
    # The routes of this mode let anybody who reaches the port change weights.
    environ["VLLM_SERVER_DEV_MODE"] = "0"
    environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    # A server that was held up for longer than this, say by its machine, may close a connection on
    # which a request has just come, unread. vLLM's own 5 s are what many clients keep theirs for.
    environ.setdefault("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", str(KEEP_ALIVE_SECONDS))


def graphs_for_every_k(k_max: int, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Part of `speculative_config` with which the V2 model runner captures CUDA graphs for every
    number of draft tokens that a step may verify, the memory's included: from 0 to k_max; {} for
    V1, which would give up its full graphs.

    It is vLLM's table of draft tokens by number of requests: k_max for one, then 0, 1 and so on,
    and k_max for all beyond. The control writes its own k over it in every step. vLLM cuts it at
    `max_num_seqs`: an engine of very few requests has graphs for the first of these.
    """
    if environ.get("VLLM_USE_V2_MODEL_RUNNER") != "1":
        return {}
    ks = (k_max, *range(1 + k_max))
    table = [(size, size, k) for size, k in enumerate(ks, 1)]  # the last holds for all beyond it
    return {"num_speculative_tokens_per_batch_size": table}


def engine_arguments(model: str, extra: Mapping[str, Any]) -> Any:
    """vLLM's own argument namespace with `extra` set by name. Raises `ValueError` naming an
    argument that vLLM lacks."""
    from vllm.entrypoints.cli.serve import make_arg_parser  # there in 0.31 to 0.33
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    args = parser.parse_args(["--model", model])
    lists = {action.dest for action in parser._actions if action.nargs in ("+", "*")}
    for key, value in extra.items():
        name = key.replace("-", "_")
        if not hasattr(args, name):
            raise ValueError(f"vLLM has no argument {name!r}")
        # A single API key is a list of one: vLLM would accept each letter of a text as a key.
        setattr(args, name, [value] if name in lists and isinstance(value, str) else value)
    return args


async def build_engine_and_app(args: Any) -> tuple[Any, Any]:
    """vLLM's `AsyncLLM` and its own OpenAI application on it."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs.from_cli_args(args))
    try:
        tasks = await engine.get_supported_tasks()
        app = build_app(args, tasks, engine.model_config)
        await init_app_state(engine, app.state, args, tasks)
    except BaseException:
        engine.shutdown()
        raise
    return engine, app


async def generate_synthetic(engine: Any, prompt_ids: list[int], num_tokens: int) -> None:
    """A request of exactly `num_tokens` tokens through `AsyncLLM`. Nothing of it is captured, and
    no estimate learns from it."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        temperature=0.0,
        max_tokens=num_tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args={"osd_calibration": 1},
    )
    async for _ in engine.generate(
        {"prompt_token_ids": prompt_ids}, params, f"osd-calibration-{uuid.uuid4().hex}"
    ):
        pass


async def call_core(engine: Any, method: str, *args: Any) -> Any:
    """Call a method of the engine core, which runs between two of its steps."""
    return await engine.engine_core.call_utility_async(method, *args)


def http_server(app: Any, args: Any, *, seconds_to_finish: int) -> Any:
    """The uvicorn server that vLLM would run, with its TLS, log level and header limits, but
    without an access log. Requests in flight get `seconds_to_finish` when it stops."""
    import uvicorn
    from vllm import envs

    config = uvicorn.Config(
        app,
        log_level="warning" if args.uvicorn_log_level == "info" else args.uvicorn_log_level,
        access_log=False,
        timeout_keep_alive=envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE,
        timeout_graceful_shutdown=seconds_to_finish,
        ssl_keyfile=args.ssl_keyfile,
        ssl_certfile=args.ssl_certfile,
        ssl_ca_certs=args.ssl_ca_certs,
        ssl_cert_reqs=args.ssl_cert_reqs,
        ssl_ciphers=args.ssl_ciphers,
    )
    config.h11_max_incomplete_event_size = args.h11_max_incomplete_event_size
    config.h11_max_header_count = args.h11_max_header_count  # type: ignore[attr-defined]
    return uvicorn.Server(config)
