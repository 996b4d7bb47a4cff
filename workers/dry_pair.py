"""Whether two sides would meet, and what would move between them: plain data for the dry commands.

No memory, process or link is needed: the cards that ranks would exchange are derived from the pair file. Heads are
global half-open ranges ``[lo, hi]``, offsets and sizes are bytes, windows are tokens (null: full attention).
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

from transfer.gate import DraftKV, GateReport, check_instances, require_compatible
from transfer.hello import RankCard, Side
from transfer.pages import live_ordinals
from transfer.plan import compile_program
from transfer.program import DIGEST_BYTES, CopyProgram, Slice
from unikv.errors import ConfigError, explain
from unikv.layer_spec import LayerOwner, ReusePolicy
from unikv.layout import GroupLayout
from workers.config import PairConfig
from workers.dry import Report, all_cards, check_count, span
from workers.topology import rank_layout, whole_model

MAX_LISTED_TOKENS: Final = 2**24
"""Longest prompt whose ordinals are listed one by one."""


def judge(pair: PairConfig) -> GateReport:
    """Return the gate's report on the two instances a pair file describes.

    Raises:
        ConfigError: a side cannot be laid out.
    """
    return check_instances(all_cards(pair, Side.CONTEXT), all_cards(pair, Side.GENERATION))


def check_report(report: GateReport) -> Report:
    """Return a gate report as plain data, every check in order."""
    return {
        "compatible": report.compatible,
        "draft_kv": report.draft_kv.value,
        "checks": [
            {
                "name": check.name,
                "scope": check.scope,
                "context": check.context,
                "generation": check.generation,
                "verdict": check.verdict.value,
                "reason": check.reason,
            }
            for check in report.checks
        ],
    }


def plan_report(pair: PairConfig, *, context_dp: int | None = None, generation_dp: int | None = None) -> Report:
    """Return who sends what to whom in two instances; pairs of ranks that move nothing are absent.

    Of a prompt's pages a pair moves ``ordinal_start``, ``+ ordinal_step``, ...: all of them, unless blocks are dealt to
    context-parallel ranks.

    Args:
        pair: both sides.
        context_dp, generation_dp: the data-parallel ranks that hold a request, None for all of them. Under attention
            data parallelism every tensor-parallel rank is a data-parallel rank of its own; without it there is only 0.

    Raises:
        ConfigError: a side has no such data-parallel rank, or cannot be laid out.
        IncompatiblePeerError: the gate refuses the pair; `mismatches` has one sentence per refused check.
    """
    context, generation = all_cards(pair, Side.CONTEXT), all_cards(pair, Side.GENERATION)
    sources = _data_parallel(context, context_dp, "--context-dp")
    destinations = _data_parallel(generation, generation_dp, "--generation-dp")
    report = check_instances(context, generation)
    require_compatible(report)
    with_draft = report.draft_kv is not DraftKV.OFF
    compiled = (compile_program(source, peer, with_draft=with_draft) for source in sources for peer in destinations)
    programs = [program for program in compiled if program.lanes]
    return {
        "draft_kv": report.draft_kv.value,
        "pairs": [_program(program) for program in programs],
        "digest": _digest(programs),
    }


def pages_report(pair: PairConfig, *, prompt_tokens: int, cached_tokens: int = 0) -> Report:
    """Return which blocks of a prompt a generation instance needs, per layer group of the whole instance.

    Args:
        pair: both sides.
        prompt_tokens: tokens whose KV the context side computed.
        cached_tokens: tokens at the start that the generation side has in its prefix cache. Only whole blocks count,
            and none for private groups, whose pages no other request may use.

    Returns:
        Ordinals count blocks of the generation side. ``travels`` is False for draft groups where draft KV stays home.
        Where blocks are dealt to context-parallel ranks, ``by_cp_rank`` says which ordinals each of them is sent.

    Raises:
        ConfigError: a number is out of range, or a side cannot be laid out.
        IncompatiblePeerError: the gate refuses the pair, so that nothing would travel.
    """
    config = pair.side(Side.GENERATION)
    check_count("prompt", "--prompt-tokens", prompt_tokens, 0, min(config.max_seq_len, MAX_LISTED_TOKENS))
    check_count("prompt", "--cached-tokens", cached_tokens, 0, prompt_tokens)
    report = judge(pair)
    require_compatible(report)
    # Stages number their own groups; those of the instance are numbered as on one rank that holds all of it.
    layout, cp = rank_layout(config, whole_model(config)), config.parallel.cp
    ordinals = {
        group.group_id: _ordinals(group, layout.tokens_per_block, prompt_tokens, cached_tokens)
        for group in layout.groups
    }
    return {
        "prompt_tokens": prompt_tokens,
        "cached_tokens": cached_tokens,
        "tokens_per_block": layout.tokens_per_block,
        "cp": cp,
        "draft_kv": report.draft_kv.value,
        "groups": [
            {
                "id": group.group_id,
                "owner": group.owner.value,
                "window": group.window,
                "sink_blocks": group.sink_blocks,
                "travels": group.owner is LayerOwner.TARGET or report.draft_kv is not DraftKV.OFF,
                "ordinals": ordinals[group.group_id],
                **({"by_cp_rank": _dealt(ordinals[group.group_id], cp)} if cp > 1 else {}),
            }
            for group in layout.groups
        ],
    }


def _ordinals(group: GroupLayout, tokens_per_block: int, prompt_tokens: int, cached_tokens: int) -> list[int]:
    ordinals = live_ordinals(
        prompt_tokens,
        tokens_per_block=tokens_per_block,
        window=group.window,
        sink_blocks=group.sink_blocks,
        cached_tokens=0 if group.reuse_policy is ReusePolicy.PRIVATE else cached_tokens,
    )
    return [int(ordinal) for ordinal in ordinals]


def _dealt(ordinals: Sequence[int], cp: int) -> list[list[int]]:
    """Return the ordinals of each context-parallel rank."""
    return [[ordinal for ordinal in ordinals if ordinal % cp == rank] for rank in range(cp)]


def _data_parallel(cards: Sequence[RankCard], data_rank: int | None, option: str) -> Sequence[RankCard]:
    """Return the ranks that share the attention of data-parallel rank `data_rank`, all of them for None."""
    position = cards[0].position
    if data_rank is None:
        return cards
    count = position.tp if position.attention_dp else 1
    if not 0 <= data_rank < count:
        want = f"in [0, {count}), the data-parallel ranks of the {cards[0].side} side"
        raise ConfigError(explain("plan", option, data_rank, want, "see parallel.attention_dp and tp"))
    return [card for card in cards if not position.attention_dp or card.position.tp_rank == data_rank]


def _program(program: CopyProgram) -> Report:
    return {
        "context_rank": program.context_rank,
        "generation_rank": program.generation_rank,
        "bytes_per_page": program.page_bytes,
        "lanes": len(program.lanes),
        "ordinal_start": program.pairs[0].ordinal_start,
        "ordinal_step": program.pairs[0].ordinal_step,
        "slices": [_slice(piece) for piece in program.slices],
        "digest": program.digest,
    }


def _slice(piece: Slice) -> Report:
    return {
        "layer": piece.layer_id,
        "owner": piece.owner.value,
        "role": piece.role,
        "heads": span(piece.heads),
        "src_offset": piece.src_offset,
        "dst_offset": piece.dst_offset,
        "bytes_per_page": piece.bytes_per_page,
    }


def _digest(programs: Sequence[CopyProgram]) -> str:
    """Return one digest over all programs, in order; each of theirs names its pair of ranks."""
    text = "\n".join(program.digest for program in programs)
    return blake2b(text.encode(), digest_size=DIGEST_BYTES).hexdigest()
