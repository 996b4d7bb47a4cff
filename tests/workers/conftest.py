"""Small pairs, and ranks of them with memory but without processes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import yaml

from transfer.hello import RankCard, Side
from unikv.cache_manager import UnifiedKVCacheManager
from unikv.ids import RequestId
from unikv.request import KVCacheRequest
from workers.config import PairConfig
from workers.config_load import load_pair
from workers.rendezvous import Rendezvous
from workers.runner import PromptPages
from workers.topology import pool_budget, positions, rank_card, rank_specs, speculation_shape

TINY: dict[str, Any] = {
    "model": {
        "max_seq_len": 256,
        "tokens_per_block": 16,
        "layers": [
            {"count": 2, "owner": "target", "kv_heads": 4, "head_dim": 16, "dtype": "bfloat16"},
            {
                **{"count": 1, "owner": "draft", "kv_heads": 2, "head_dim": 8, "dtype": "float16"},
                **{"window": 40, "reuse": "optional"},
            },
        ],
    },
    "speculative": {"method": "draft_model", "max_draft_tokens": 3, "block_width": 3, "num_extra_kv_tokens": 2},
    "context": {"parallel": {"tp": 1}, "pool": {"pages": 24}},
    "generation": {"parallel": {"tp": 1}, "pool": {"pages": 24}},
    "transfer": {"path": "direct", "draft_kv": "per_view", "timeout_s": 20},
    "runner": {"kind": "pattern"},
    "workload": {"requests": 4, "prompt_tokens": [20, 100], "output_tokens": 1, "concurrency": 4},
}
"""Rows of 32 bytes (target) and 16 bytes (draft); a block has 16 tokens."""


@dataclass(frozen=True, slots=True)
class Memory:
    """One rank's cache and card."""

    manager: UnifiedKVCacheManager
    card: RankCard

    @property
    def arrays(self) -> list[np.ndarray[Any, np.dtype[np.uint8]]]:
        return [self.manager.pools.numpy(storage) for storage in range(len(self.card.storages))]

    def request(self, number: int, prompt_tokens: int) -> KVCacheRequest:
        """A request with pages for a prompt, as the generation side reserves them."""
        request = self.manager.create_request(RequestId(number))
        request.resize(self.manager.generation_capacity(prompt_tokens, 3), prompt_tokens)
        return request

    def pages(self, request: KVCacheRequest, prompt_tokens: int, *, unit_tokens: int = 0) -> PromptPages:
        return PromptPages(
            request_id=request.request_id,
            tables=request.page_tables(),
            prompt_tokens=prompt_tokens,
            unit_tokens=unit_tokens or self.card.tokens_per_block,
        )


@pytest.fixture(scope="session")
def write_pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Write the tiny pair with changes (``model__kv_layout="NHD"``; ``...`` drops a key) and return its path."""

    def write(name: str = "tiny", **changes: Any) -> str:
        content = copy.deepcopy(TINY)
        for key, value in changes.items():
            *parents, last = key.split("__")
            section = content
            for parent in parents:
                section = section.setdefault(parent, {})
            if value is ...:
                del section[last]
            else:
                section[last] = value
        path = tmp_path_factory.mktemp("pair") / f"{name}.yaml"
        path.write_text(yaml.safe_dump(content))
        return str(path)

    return write


@pytest.fixture(scope="session")
def tiny_pair(write_pair: Callable[..., str]) -> Callable[..., PairConfig]:
    """Return the tiny pair with changes, loaded."""
    return lambda **changes: load_pair(write_pair(**changes), environ={})


@pytest.fixture
def memory_of() -> Iterator[Callable[..., Memory]]:
    """Return the memory of one rank of a pair; requests that are still open are closed at the end."""
    with ExitStack() as stack:

        def build(pair: PairConfig, side: Side = Side.GENERATION, rank: int = 0) -> Memory:
            config = pair.side(side)
            position = positions(config)[rank]
            manager = UnifiedKVCacheManager(
                rank_specs(config, position),
                tokens_per_block=config.tokens_per_block,
                max_seq_len=config.max_seq_len,
                pool=pool_budget(config),
                kv_layout=config.kv_layout,
                speculation=speculation_shape(config),
                cp_size=position.cp,
                cp_rank=position.cp_rank,
            )
            stack.callback(_close, manager)
            return Memory(manager, rank_card(pair, side, position, layout=manager.layout))

        yield build


def _close(manager: UnifiedKVCacheManager) -> None:
    for request in list(manager._requests.values()):
        request.close()
    manager.check_integrity()
    manager.close()


@pytest.fixture(scope="session")
def store_library() -> None:
    """Start what the first store of a process starts and keeps to the end: the signal pipe of libuv."""
    Rendezvous.serve().close()
