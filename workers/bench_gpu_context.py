"""The context process of the GPU benchmarks: holds filled prompts, publishes them as often as it is told to.

It talks JSON over its standard streams, one line each way. ``python -m workers.bench_gpu_context '{"source": ...}'``.
"""

from __future__ import annotations

import gc
import json
import logging
import sys
from contextlib import ExitStack, closing
from typing import Any, Final

import numpy as np

from transfer.copy_device import DeviceCopier
from transfer.hello import Side
from transfer.link_zmq import ZmqLink
from transfer.messages import AuxData
from transfer.outcome import TransferHandle
from unikv.ids import RequestId
from unikv.request import KVCacheRequest
from workers.config import PairConfig
from workers.config_load import load_pair
from workers.process import die_with_parent
from workers.rank_device import make_copier
from workers.rank_runtime import RankRuntime
from workers.runner import PromptPages, Tables
from workers.runner_device_floor import wait_for_device
from workers.runner_device_pattern import DevicePattern
from workers.worker_main import SWITCH_INTERVAL_S

PATIENCE_S: Final = 20.0
STREAM_POLL_S: Final = 0.001


def prompt_pages(request_id: int, tables: Tables, tokens: int, unit_tokens: int) -> PromptPages:
    """Return a prompt's pages as what patterns are written to."""
    return PromptPages(request_id=RequestId(request_id), tables=tables, prompt_tokens=tokens, unit_tokens=unit_tokens)


class BenchContext:
    """Context rank 0 of a pair, without a model. Close it with the stack."""

    def __init__(self, pair: PairConfig, stack: ExitStack) -> None:
        self._runtime = stack.enter_context(RankRuntime(pair, Side.CONTEXT, 0, instance="context-0"))
        self._pattern = DevicePattern(self._runtime.card, self._runtime.manager.pools.storages)
        device = self._runtime.card.device
        self._copier = make_copier(device, timed=True)
        self._endpoint = self._runtime.context_endpoint(lambda: None, self._copier)
        stack.callback(self._endpoint.close)
        self._requests: list[tuple[KVCacheRequest, Tables]] = []
        stack.callback(self._drop)
        self._handles: dict[int, TransferHandle] = {}
        self._tokens = 0

    @property
    def address(self) -> str:
        """Where generation ranks reach us."""
        return self._runtime.card.address

    def reserve(self, count: int, tokens: int) -> None:
        """Fill `count` prompts of `tokens` tokens, prompt ``n`` with pattern ``n``."""
        self._tokens = tokens
        manager = self._runtime.manager
        for number in range(count):
            request = manager.create_request(RequestId(number))
            request.resize(manager.context_capacity(0, tokens), tokens)
            tables = request.page_tables()
            self._requests.append((request, tables))
            pages = prompt_pages(number, tables, tokens, self._runtime.card.tokens_per_block)
            self._pattern.fill(pages, RequestId(number))
        wait_for_device(self._runtime.card.device)

    def publish(self, ids: list[int]) -> None:
        """Offer prompt ``n % count`` under every id ``n``."""
        for request_id in ids:
            _, tables = self._requests[request_id % len(self._requests)]
            aux = AuxData(first_tokens=(1,), prompt_tokens=self._tokens)
            self._handles[request_id] = self._endpoint.publish(RequestId(request_id), tables, self._tokens, aux)

    def end(self, ids: list[int]) -> dict[str, Any]:
        """Close the books of some ids; return the device times of the copies since the last call.

        Where a peer instance has further ranks, which are not part of the benchmark, nobody else will ask.
        """
        for request_id in ids:
            handle = self._handles.pop(request_id)
            if not handle.wait_quiet(0.2 if len(ids) > 1 else 0.002):
                self._endpoint.fail(RequestId(request_id), "the measurement is over")
                assert handle.wait_quiet(PATIENCE_S), f"request {request_id} is not quiet"
        times: list[float] = []
        if isinstance(self._copier, DeviceCopier):
            times, self._copier.batch_times_s = self._copier.batch_times_s, []
        return {"copy_s": times}

    def stream(self, address: str, frame_bytes: int, frames: int) -> None:
        """Send bare frames to `address`: what the staged path is compared with."""
        frame = np.full(frame_bytes, 1, dtype=np.uint8)
        with closing(ZmqLink()) as link:
            link.connect(address)
            tickets = [link.send(address, [frame.data]) for _ in range(frames)]
            while not all(ticket.done() for ticket in tickets):
                link.poll(STREAM_POLL_S)

    def _drop(self) -> None:
        for request, _ in self._requests:
            request.close()


def main() -> None:
    """Serve until the other side closes our input."""
    what = json.loads(sys.argv[1])
    die_with_parent(int(what["parent"]))
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    pair = load_pair(what["source"], overrides=what["overrides"], case=what["case"])
    with ExitStack() as stack:
        context = BenchContext(pair, stack)
        gc.freeze()
        _say({"address": context.address})
        for line in sys.stdin:
            order = json.loads(line)
            reply = getattr(context, order.pop("do"))(**order)
            _say(reply or {})


def _say(facts: dict[str, Any]) -> None:
    sys.stdout.write(f"{json.dumps(facts)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
