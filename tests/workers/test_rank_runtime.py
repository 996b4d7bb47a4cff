"""What a rank owns goes in order, and never while its transfer's thread still uses it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from transfer.context_endpoint import ContextEndpoint
from transfer.hello import Side
from unikv.errors import LinkClosedError
from workers.config import PairConfig
from workers.rank_runtime import RankRuntime


def test_what_the_transfers_thread_uses_stays_until_it_has_ended(
    tiny_pair: Callable[..., PairConfig], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = RankRuntime(tiny_pair(), Side.CONTEXT, 0, instance="context-0")
    endpoint = runtime.context_endpoint(lambda: None)
    kept = runtime._stack
    with monkeypatch.context() as patch:
        patch.setattr(ContextEndpoint, "ended", property(lambda _: False))
        kept.callback(lambda: pytest.fail("freed under a running thread"))
        runtime.close()
        assert "the transfer's thread does not end" in caplog.text
    assert runtime.manager.pools.numpy(0).size > 0
    endpoint.poke()  # the link is as it was
    assert endpoint.close()
    for part in (runtime.control, runtime.manager):
        part.close()


def test_what_nobody_uses_is_freed_with_the_link(tiny_pair: Callable[..., PairConfig]) -> None:
    runtime = RankRuntime(tiny_pair(), Side.CONTEXT, 0, instance="context-0")
    assert runtime.context_endpoint(lambda: None).close()
    runtime.close()
    with pytest.raises(LinkClosedError):
        runtime.control.poll(0.0)
