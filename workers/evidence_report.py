"""Evidence on its way from a worker to the caller."""

from __future__ import annotations

from workers.control import DigestReport, EvidenceReport
from workers.evidence import DIGEST_BYTES
from workers.runner import Digest, DigestKey, Evidence


def evidence_report(evidence: Evidence) -> EvidenceReport:
    """Return `evidence` in its wire form: digests of one (layer, role, head) joined."""
    rows: dict[tuple[int, str, int], list[tuple[int, Digest]]] = {}
    for (layer, role, head, unit), digest in evidence.digests.items():
        rows.setdefault((layer, role, head), []).append((unit, digest))
    return EvidenceReport(
        checked_bytes=evidence.checked_bytes,
        mismatched_bytes=evidence.mismatched_bytes,
        first_mismatch=evidence.first_mismatch,
        digests=tuple(
            DigestReport(
                layer=layer,
                role=role,
                head=head,
                units=tuple(unit for unit, _ in row),
                sizes_bytes=tuple(digest.size_bytes for _, digest in row),
                digests=b"".join(digest.value for _, digest in row),
            )
            for (layer, role, head), row in rows.items()
        ),
    )


def read_evidence(report: EvidenceReport) -> Evidence:
    """Return what `evidence_report` made a report of. Digests a report announces and does not bring are left out."""
    digests: dict[DigestKey, Digest] = {}
    for row in report.digests:
        values = [row.digests[at : at + DIGEST_BYTES] for at in range(0, len(row.digests), DIGEST_BYTES)]
        for unit, size_bytes, value in zip(row.units, row.sizes_bytes, values, strict=False):
            digests[row.layer, row.role, row.head, unit] = Digest(value, size_bytes)
    return Evidence(
        checked_bytes=report.checked_bytes,
        mismatched_bytes=report.mismatched_bytes,
        first_mismatch=report.first_mismatch,
        digests=digests,
    )
