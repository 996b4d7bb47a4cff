"""Looking a prompt up: which of its tokens count, and what the tree has of them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from unikv.errors import SpecError, explain
from unikv.ids import GroupId
from unikv.layout import CacheLayout
from unikv.prefix_match import PrefixMatch, match_prefix, reuse_status
from unikv.prefix_tree import TOKEN_BYTES, PrefixTreeManager, ReuseScope
from unikv.reuse_options import PrefixProbe, ReuseOptions


@dataclass(frozen=True, slots=True)
class PrefixLookup:
    """Looks prompts up in one tree, the same way whether they will be claimed or not."""

    layout: CacheLayout
    tree: PrefixTreeManager
    options: ReuseOptions

    def match(
        self,
        keys: bytes,
        scope: ReuseScope,
        claim_limit: int | None,
        *,
        whole_prompt: bool,
        also_required: Collection[GroupId] = (),
    ) -> PrefixMatch:
        """Return what the tree has of a prompt.

        Its last token is left to compute, for its logits; tokens that a drafter reads ahead serve as evidence.

        Args:
            keys: the whole prompt, see `unikv.prefix_tree.token_bytes`.
            scope: whose prefixes may match.
            claim_limit: most tokens that may be taken over, None for no limit.
            whole_prompt: the last token may be taken over too.
            also_required: OPTIONAL groups that limit the match this time.

        Raises:
            SpecError: a negative limit.
        """
        backoff, total = self.options.backoff_tokens, len(keys) // TOKEN_BYTES
        lookup = total if whole_prompt else min(total, max(0, total - 1 + backoff))
        if claim_limit is not None:
            if claim_limit < 0:
                raise SpecError(explain("prefix", "claim_limit", claim_limit, ">= 0 tokens", "pass None for no limit"))
            lookup = min(lookup, claim_limit + backoff) if claim_limit else 0
        return match_prefix(
            self.tree,
            scope,
            keys[: lookup * TOKEN_BYTES],
            self.layout.groups,
            tokens_per_block=self.layout.tokens_per_block,
            partial=self.options.partial_blocks,
            backoff_tokens=backoff,
            also_required=also_required,
        )

    def described(self, match: PrefixMatch) -> PrefixProbe:
        """Return a match as a caller sees it."""
        return PrefixProbe(
            num_tokens=match.num_tokens,
            divergence_tokens=match.divergence_tokens,
            lookup_tokens=match.lookup_tokens,
            status=tuple(reuse_status(match, group, self.layout.tokens_per_block) for group in self.layout.groups),
        )
