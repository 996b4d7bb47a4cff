"""From a pair file to a serving worker: the one place where all parts meet."""

from __future__ import annotations

import logging
import sys
from contextlib import ExitStack
from typing import Final

from transfer.hello import Side
from workers.config import HFRunnerConfig, PairConfig
from workers.context import ContextWorker
from workers.generation import GenerationWorker
from workers.rank_device import rank_device
from workers.rank_runtime import RankRuntime, check_rank
from workers.rendezvous import Rendezvous
from workers.runner import Runner
from workers.runner_pattern import PatternRunner

_log = logging.getLogger(__name__)

SWITCH_INTERVAL_S: Final = 0.0002
"""How long the model's Python code may keep the transfer's thread waiting; the default, 5 ms, is longer than a copy."""


def run_worker(pair: PairConfig, side: Side, rank: int, rendezvous_url: str, *, serve: bool) -> int:
    """Bring one rank up, serve until told to end, take it down; return the process's exit code.

    Raises:
        ConfigError: the pair file does not fit the model, the rank or this machine.
        IncompatiblePeerError: the gate refused the context instance (generation side).
        LinkBrokenError: the rendezvous or a peer does not answer.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    check_rank(pair, side, rank)
    with ExitStack() as stack:
        meet = Rendezvous.serve if serve else Rendezvous.join
        rendezvous = stack.enter_context(meet(rendezvous_url))
        runner = make_runner(pair, side, rank)
        runtime = stack.enter_context(RankRuntime(pair, side, rank, instance=f"{side}-0"))
        runtime.bind(runner)
        if side is Side.CONTEXT:
            context = ContextWorker(runtime, runner, rendezvous)
            stack.callback(context.close)
            return context.run()
        generation = GenerationWorker(runtime, runner, rendezvous)
        stack.callback(generation.close)
        generation.connect()
        return generation.run()


def make_runner(pair: PairConfig, side: Side, rank: int = 0) -> Runner:
    """Return the runner the pair file names, on the rank's device; loading a model takes seconds."""
    if isinstance(pair.runner, HFRunnerConfig):
        from workers.model_worker import ModelRunner, load_runner  # noqa: PLC0415 - transformers is an extra

        _log.info("loading %s", pair.runner.model)
        model = load_runner(pair.runner, pair.side(side), device=rank_device(pair.side(side), rank))
        return ModelRunner(model, chunk_tokens=pair.runner.chunk_tokens)
    return PatternRunner()
