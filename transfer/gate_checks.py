"""The checks on what two ranks say of themselves as a whole. Each compares one fact; none decides anything alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from transfer.gate_facts import HeaderFacts
from transfer.gate_findings import Finding, Rule
from transfer.hello import PathKind, Side, SpeculativeCard

HeaderCheck = Callable[[HeaderFacts, HeaderFacts], Finding]
HeaderText = Callable[[HeaderFacts], str]


def check_headers(context: HeaderFacts, generation: HeaderFacts) -> list[Finding]:
    """Return one finding per check, whatever the others found."""
    return [run(context, generation) for run in _CHECKS]


def why_not_direct(context: HeaderFacts, generation: HeaderFacts) -> str:
    """Return why the context rank cannot map the generation rank's memory, or "" where it can.

    Mapping needs one kernel (boot id), one process namespace (the path to a memory file names a process), one kind
    of device, memory that the generation rank exports, and between GPUs the hardware's peer access.
    """
    ours, theirs = context.host, generation.host
    if ours is None or theirs is None:
        return "a rank did not say where it runs"
    if ours.boot_id != theirs.boot_id:
        return "the ranks run on different hosts"
    if ours.pid_namespace != theirs.pid_namespace:
        return "the ranks run in different process namespaces"
    if context.device != generation.device:
        return "the ranks use different kinds of device"
    if not generation.exported:
        return "the generation rank does not export its memory"
    apart = not set(generation.memory_devices) <= set(context.reach)
    return "the context rank's GPU has no peer access to the generation rank's" if apart else ""


def _equal(name: str, text: HeaderText, cure: str, *, rule: Rule = Rule.TARGET, scope: str = "instance") -> HeaderCheck:
    """Return a check that wants the same text on both sides."""

    def run(context: HeaderFacts, generation: HeaderFacts) -> Finding:
        ours, theirs = text(context), text(generation)
        return Finding(
            name=name, context=ours, generation=theirs, agrees=ours == theirs, rule=rule, cure=cure, scope=scope
        )

    return run


def _sides(context: HeaderFacts, generation: HeaderFacts) -> Finding:
    return Finding(
        name="sides",
        context=context.side.value,
        generation=generation.side.value,
        agrees=(context.side, generation.side) == (Side.CONTEXT, Side.GENERATION),
        rule=Rule.TARGET,
        cure="start one worker with --side context and the other with --side generation",
    )


def _card(context: HeaderFacts, generation: HeaderFacts) -> Finding:
    ours, theirs = ("; ".join(facts.problems[:3]) or "consistent" for facts in (context, generation))
    return Finding(
        name="card",
        context=ours,
        generation=theirs,
        agrees=not context.problems and not generation.problems,
        rule=Rule.TARGET,
        cure="describe the cache of the side whose card contradicts itself anew",
    )


def _cp(context: HeaderFacts, generation: HeaderFacts) -> Finding:
    """Only the generation side may split sequences, and only where blocks meet one to one."""
    whole_blocks = generation.cp == 1 or context.tokens_per_block == generation.tokens_per_block
    why = "only the generation side may split the sequence, set context.parallel.cp: 1"
    if context.cp == 1:
        why = "context parallelism deals whole blocks out, set the same tokens_per_block on both sides"
    return Finding(
        name="cp",
        context=str(context.cp),
        generation=str(generation.cp),
        agrees=context.cp == 1 and whole_blocks,
        rule=Rule.TARGET,
        cure=why,
    )


def _pages_divide(context: HeaderFacts, generation: HeaderFacts) -> bool:
    small, large = sorted((context.tokens_per_block, generation.tokens_per_block))
    return small >= 1 and large % small == 0


def _page_text(own: int, other: int) -> str:
    """Return a page size; the larger one tells how many of the peer's pages it covers."""
    if own > other >= 1 and own % other == 0:
        return f"{own} tokens ({own // other} pages of {other})"
    return f"{own} tokens"


def _tokens_per_block(context: HeaderFacts, generation: HeaderFacts) -> Finding:
    return Finding(
        name="tokens_per_block",
        context=_page_text(context.tokens_per_block, generation.tokens_per_block),
        generation=_page_text(generation.tokens_per_block, context.tokens_per_block),
        agrees=_pages_divide(context, generation),
        rule=Rule.TARGET,
        cure="set tokens_per_block so that one side's divides the other's",
    )


def _path_direct(context: HeaderFacts, generation: HeaderFacts) -> Finding:
    wanted = {context.path, generation.path}
    rule = Rule.TARGET if PathKind.DIRECT in wanted else Rule.SLOWER if PathKind.AUTO in wanted else Rule.NOTE
    dry = context.host is None or generation.host is None
    obstacle = "" if dry else why_not_direct(context, generation)
    effect = "set transfer.path: auto or zmq" if rule is Rule.TARGET else "transfer.path: auto takes a staged path"
    return Finding(
        name="path_direct",
        context=_place(context),
        generation=_place(generation) + ("" if dry or generation.exported else ", memory not exported"),
        agrees=not obstacle,
        rule=rule,
        cure=f"{obstacle}, {effect}",
    )


def _place(facts: HeaderFacts) -> str:
    host = facts.host
    if host is None:
        return "not checked (dry run)"
    return f"{facts.device} on {host.hostname} (boot {host.boot_id[:8]}, pid namespace {host.pid_namespace})"


def _aux_draft_tokens(context: HeaderFacts, generation: HeaderFacts) -> Finding:
    """Draft tokens that travel beside the KV are proposals: those without room are dropped, nothing gets wrong."""
    ours, theirs = (0 if f.speculative is None else f.speculative.max_draft_tokens for f in (context, generation))
    return Finding(
        name="aux_draft_tokens",
        context=f"up to {ours}",
        generation=f"room for {theirs}",
        agrees=ours <= theirs,
        rule=Rule.SLOWER,
        cure="draft tokens without room are dropped, set the same speculative.max_draft_tokens on both sides",
    )


def _draft_tokens_per_block(context: HeaderFacts, generation: HeaderFacts) -> Finding:
    return Finding(
        name="tokens_per_block",
        context=f"{context.tokens_per_block} tokens",
        generation=f"{generation.tokens_per_block} tokens",
        agrees=context.tokens_per_block == generation.tokens_per_block,
        rule=Rule.DRAFT_SPLIT if _pages_divide(context, generation) else Rule.DRAFT,
        cure="set the same tokens_per_block on both sides",
        scope="draft",
    )


def _speculative(context: HeaderFacts, generation: HeaderFacts) -> Finding:
    ours, theirs = ("absent" if facts.speculative is None else "present" for facts in (context, generation))
    return Finding(
        name="speculative",
        context=ours,
        generation=theirs,
        agrees=ours == theirs == "present",
        rule=Rule.DRAFT,
        cure="give both sides the speculative section",
        scope="draft",
    )


def _draft(name: str, text: HeaderText, key: str, rule: Rule = Rule.DRAFT) -> HeaderCheck:
    return _equal(name, text, f"set the same {key} on both sides", rule=rule, scope="draft")


def _speculation(text: Callable[[SpeculativeCard], object]) -> HeaderText:
    return lambda facts: "absent" if facts.speculative is None else str(text(facts.speculative))


_CHECKS: Final[tuple[HeaderCheck, ...]] = (
    _sides,
    _equal("protocol_version", lambda f: str(f.protocol_version), "install the same unikv version on both sides"),
    _card,
    _cp,
    _tokens_per_block,
    _equal("kv_layout", lambda f: f.kv_layout.value, "rows are converted on the way", rule=Rule.NOTE),
    _equal("target_layers", lambda f: str(f.num_target_layers), "list the same target layers on both sides"),
    _equal("checksum", lambda f: f.checksum, "set the same transfer.checksum on both sides"),
    _equal("path", lambda f: f.path.value, "set the same transfer.path on both sides"),
    _path_direct,
    _aux_draft_tokens,
    _draft("draft_layers", lambda f: str(f.num_draft_layers), "count of draft layers"),
    _speculative,
    _draft("speculative_method", _speculation(lambda s: s.method), "speculative.method"),
    _draft("max_draft_tokens", _speculation(lambda s: s.max_draft_tokens), "speculative.max_draft_tokens"),
    _draft("block_width", _speculation(lambda s: s.block_width), "speculative.block_width"),
    _draft("tp", lambda f: str(f.tp), "parallel.tp", Rule.DRAFT_SPLIT),
    _draft("attention_dp", lambda f: str(f.attention_dp).lower(), "parallel.attention_dp", Rule.DRAFT_SPLIT),
    _draft_tokens_per_block,
)
