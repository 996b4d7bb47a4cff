"""How a page moves: gate, copy program, sessions, links, copiers and the two endpoints an engine uses."""

from transfer.context_endpoint import ContextEndpoint
from transfer.gate import GateReport, check, check_instances
from transfer.generation_endpoint import ContextInstance, GenerationEndpoint
from transfer.hello import DraftKVMode, ParallelPosition, PathKind, RankCard, Side
from transfer.messages import AuxData
from transfer.options import TransferOptions
from transfer.outcome import Outcome, TransferHandle
from transfer.plan import CopyProgram, compile_program

__all__ = [
    "AuxData",
    "ContextEndpoint",
    "ContextInstance",
    "CopyProgram",
    "DraftKVMode",
    "GateReport",
    "GenerationEndpoint",
    "Outcome",
    "ParallelPosition",
    "PathKind",
    "RankCard",
    "Side",
    "TransferHandle",
    "TransferOptions",
    "check",
    "check_instances",
    "compile_program",
]
