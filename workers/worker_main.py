"""From a pair file to a serving worker: the one place where all parts meet."""

from __future__ import annotations

import logging
import sys
from contextlib import ExitStack
from typing import Final

from transfer.gate import require_compatible
from transfer.gate_report import DraftKV, Verdict
from transfer.hello import Side
from workers.addresses import choose_address
from workers.config import HFRunnerConfig, PairConfig
from workers.context import ContextWorker
from workers.dry_pair import judge
from workers.generation import GenerationWorker
from workers.rank_device import rank_device
from workers.rank_runtime import RankRuntime, check_rank
from workers.rendezvous import Rendezvous, host_of
from workers.routing import place_of
from workers.runner import Runner
from workers.runner_pattern import PatternRunner

_log = logging.getLogger(__name__)

SWITCH_INTERVAL_S: Final = 0.0002
"""How long the model's Python code may keep the transfer's thread waiting; the default, 5 ms, is longer than a copy."""


def run_worker(
    pair: PairConfig, side: Side, rank: int, rendezvous_url: str, *, serve: bool, several_hosts: bool = False
) -> int:
    """Bring one rank up, serve until told to end, take it down; return the process's exit code.

    Args:
        serve: host the rendezvous in this process.
        several_hosts: peers are known to run on other hosts, so that a loopback address is a mistake.

    Raises:
        ConfigError: the pair file does not fit the model, the rank or this machine.
        IncompatiblePeerError: the gate refuses the two sides of the pair file, or (generation side) what the context
            instance really is.
        LinkBrokenError: the rendezvous or a peer does not answer.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    check_rank(pair, side, rank)
    _judge(pair, side)
    transfer = pair.transfer
    address = choose_address(
        host_of(rendezvous_url), listen=transfer.listen, advertise=transfer.advertise, several_hosts=several_hosts
    )
    with ExitStack() as stack:
        meet = Rendezvous.serve if serve else Rendezvous.join
        rendezvous = stack.enter_context(meet(rendezvous_url))
        runner = make_runner(pair, side, rank)
        instance, _ = place_of(pair.side(side), rank)
        runtime = stack.enter_context(RankRuntime(pair, side, rank, instance=f"{side}-{instance}", address=address))
        runtime.bind(runner)
        if side is Side.CONTEXT:
            context = ContextWorker(runtime, runner, rendezvous)
            stack.callback(context.close)
            return context.run()
        generation = GenerationWorker(runtime, runner, rendezvous)
        stack.callback(generation.close)
        generation.connect()
        return generation.run()


def _judge(pair: PairConfig, side: Side) -> None:
    """Refuse at start what could only be refused on meeting; say once if draft KV was wanted and stays.

    Raises:
        IncompatiblePeerError: the text has every failed check.
    """
    report = judge(pair)
    require_compatible(report)
    reasons = [check.reason for check in report.checks if check.scope == "draft" and check.verdict is Verdict.FALLBACK]
    if side is Side.CONTEXT and report.draft_kv is DraftKV.OFF and reasons:
        _log.warning("draft KV does not travel: %s", "; ".join(dict.fromkeys(filter(None, reasons))))


def make_runner(pair: PairConfig, side: Side, rank: int = 0) -> Runner:
    """Return the runner the pair file names, on the rank's device; loading a model takes seconds."""
    if isinstance(pair.runner, HFRunnerConfig):
        from workers.model_worker import ModelRunner, load_runner  # noqa: PLC0415 - transformers is an extra

        _log.info("loading %s", pair.runner.model)
        model = load_runner(pair.runner, pair.side(side), device=rank_device(pair.side(side), rank))
        return ModelRunner(model, chunk_tokens=pair.runner.chunk_tokens)
    return PatternRunner(pad_rows=pair.runner.pad_rows)
