"""The model runner as a worker process uses it: prompts in, tokens out, and digests of what lies in the pages."""

from __future__ import annotations

from transformers.utils.logging import disable_progress_bar

from transfer.hello import RankCard
from transfer.messages import AuxData
from unikv.cache_manager import UnifiedKVCacheManager
from unikv.pool_mirror import PoolMirror
from unikv.request import KVCacheRequest
from workers.config import HFRunnerConfig, SideConfig
from workers.evidence import digest_pages
from workers.model_store import resolve_model
from workers.runner import Decoded, Evidence, OnLayer, PromptPages, Tables
from workers.runner_hf import HFRunner
from workers.speculative import SpeculativeDecoder, commit_output


def load_runner(config: HFRunnerConfig, side: SideConfig, *, device: str = "cpu") -> HFRunner:
    """Load target and drafter as the pair file says, on `device`; without speculation there is no drafter.

    Raises:
        ConfigError: the model is not there, or drafter and model do not fit.
    """
    disable_progress_bar()  # type: ignore[no-untyped-call]
    return HFRunner(
        resolve_model(config.model),
        config.draft if side.speculative is not None else None,
        dtype=config.dtype,
        draft_window=config.draft_window,
        device=device,
        torch_threads=config.threads,
    )


class ModelRunner:
    """A language model with its drafter on one rank. Borrows the manager it is bound to."""

    background = False

    def __init__(self, model: HFRunner, *, chunk_tokens: int | None = None) -> None:
        self._model, self._chunk_tokens = model, chunk_tokens
        self._card: RankCard | None = None
        self._mirror: PoolMirror | None = None

    def bind(self, manager: UnifiedKVCacheManager, card: RankCard) -> None:
        """Use the pages of `manager` from now on.

        Raises:
            ConfigError: the pair file's layers are not the model's.
        """
        self._model.bind(manager)
        self._card = card
        self._mirror = PoolMirror(manager.layout, manager.pools)

    def prefill(
        self,
        request: KVCacheRequest,
        prompt: tuple[int, ...],
        prompt_tokens: int,
        publish_at: int | None = None,
        on_layer: OnLayer | None = None,
    ) -> AuxData:
        """Run target and drafter over the prompt."""
        result = self._model.prefill(
            request, prompt, chunk_tokens=self._chunk_tokens, publish_at=publish_at, on_layer=on_layer
        )
        return AuxData(
            first_tokens=(result.first_token,), draft_tokens=result.draft_tokens, prompt_tokens=prompt_tokens
        )

    def discard(self, tables: Tables) -> None:
        """Leave the pages as they are: digests of another request would not match."""

    def examine(self, pages: PromptPages, *, with_draft: bool) -> Evidence:
        """Digest every live byte of the prompt."""
        assert self._card is not None and self._mirror is not None
        self._mirror.pull(pages.tables)
        return digest_pages(self._card, self._mirror.arrays, pages, with_draft=with_draft)

    def decode(
        self, request: KVCacheRequest, prompt: tuple[int, ...], first_token: int, draft_valid_from: int, max_new: int
    ) -> Decoded:
        """Decode speculatively from the request's pages."""
        eos = self._model.eos_token_ids
        decoder = SpeculativeDecoder(self._model, request, prompt, first_token, draft_valid_from, max_new, eos)
        result = decoder.run()
        commit_output(request, prompt, result.tokens, decoder.final_tokens)
        return Decoded(
            tokens=result.tokens,
            steps=result.steps,
            proposed=result.proposed,
            accepted=result.accepted,
            accepted_lengths=result.accepted_per_step,
        )
