"""Committing may put another request's page in the place of one that is being sent: the sent one stays where it is."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from unikv.budget import PoolBudget
from unikv.cache_manager import UnifiedKVCacheManager
from unikv.errors import CapacityError
from unikv.ids import GroupId, LayerId, RequestId
from unikv.layer_spec import KVCacheLayerSpec, KVDtype, LayerOwner
from unikv.request import KVCacheRequest

GROUP = GroupId(0)
PROMPT = np.arange(100, 112)


@pytest.fixture
def manager() -> Iterator[UnifiedKVCacheManager]:
    spec = KVCacheLayerSpec(
        layer_id=LayerId(0), owner=LayerOwner.TARGET, num_kv_heads=1, head_dim=4, dtype=KVDtype.FLOAT16
    )
    made = UnifiedKVCacheManager([spec], tokens_per_block=4, max_seq_len=64, pool=PoolBudget(pages=9))
    yield made
    made.check_integrity()
    made.close()


def compute(manager: UnifiedKVCacheManager, number: int) -> KVCacheRequest:
    """Return a request that computed the prompt itself, although others have its KV in the cache."""
    request = manager.create_request(RequestId(number), PROMPT, claim_limit=0)
    request.resume()
    request.resize(len(PROMPT), len(PROMPT))
    return request


def test_pages_being_sent_are_nobody_elses_after_a_commit_exchanged_them(manager: UnifiedKVCacheManager) -> None:
    first, second = compute(manager, 1), compute(manager, 2)
    first.commit(PROMPT)
    sent = second.page_tables()
    pin = second.pin(sent)
    second.commit(PROMPT)
    assert second.page_table(GROUP).tolist() == first.page_table(GROUP).tolist() != sent[GROUP].tolist()
    rival = manager.create_request(RequestId(3))
    with pytest.raises(CapacityError):
        rival.resize(12)  # 8 pages, 3 of them in the cache and 3 being sent
    rival.resize(8)
    assert not set(rival.page_table(GROUP).tolist()) & set(sent[GROUP].tolist())
    second.close()
    with pytest.raises(CapacityError):
        rival.resize(12)
    pin.release()
    rival.resize(20)
    assert set(sent[GROUP].tolist()) <= set(rival.page_table(GROUP).tolist())
    first.close()
    rival.close()
