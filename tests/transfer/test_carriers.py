"""Carriers against their common contract, and NIXL's own rules; NIXL's tests run where its package is installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count

import pytest

from transfer.carrier_nixl import Landing, NixlSink, NixlSource
from transfer.carrier_zmq import LinkSink, LinkSource
from transfer.messages import Berth
from transfer.nixl_agent import NixlSession, require_nixl, why_no_nixl
from transfer.staging import HostChunkPool
from transfer.testing.carrier import CHUNK_BYTES, CarrierConformance, CarrierEnds
from unikv.errors import ConfigError, LocalProtocolError, RemoteProtocolError

needs_nixl = pytest.mark.skipif(bool(why_no_nixl()), reason=why_no_nixl())


class TestLinkCarrier(CarrierConformance):
    def make_ends(self, num_chunks: int, chunk_bytes: int) -> CarrierEnds:
        pool = HostChunkPool(chunks=num_chunks, chunk_bytes=chunk_bytes)
        return CarrierEnds(source=LinkSource(pool), sink=LinkSink(), pool=pool, poll=lambda: False)


@needs_nixl
class TestNixlCarrier(CarrierConformance):
    def make_ends(self, num_chunks: int, chunk_bytes: int) -> CarrierEnds:
        ours, theirs = NixlSession("source"), NixlSession("sink")
        self.stack = ExitStack()
        self.stack.callback(theirs.close)
        self.stack.callback(ours.close)
        pool = HostChunkPool(chunks=num_chunks, chunk_bytes=chunk_bytes, make=ours.memory, forget=ours.forget)
        sink = NixlSink(theirs, chunk_bytes)
        source = NixlSource(ours, pool, sink.landing, count(1))
        self.stack.callback(source.part)

        def poll() -> bool:
            theirs.progress()
            return source.poll()

        return CarrierEnds(source=source, sink=sink, pool=pool, poll=poll, vacate=source.vacate, lose=source.leave)

    def teardown_method(self) -> None:
        self.stack.close()

    def test_a_source_without_room_refuses(self) -> None:
        while self.ends.source.room():
            _, parcel = self.send(10)
            self.until(parcel.announced)
        with pytest.raises(LocalProtocolError, match="with 0 berths free"):
            self.send(10)
        assert self.ends.pool.in_use == 0

    def test_a_chunk_that_is_larger_than_a_berth_is_refused(self) -> None:
        with pytest.raises(LocalProtocolError, match="use one chunk_bytes on both sides"):
            self.send(CHUNK_BYTES + 1)
        assert self.ends.pool.in_use == 0 and self.ends.source.room()

    @pytest.mark.parametrize("times", [0, 1])
    def test_berths_are_vacated_once(self, times: int) -> None:
        _, parcel = self.send(10)
        self.until(parcel.announced)
        serial = self.link.announced[0][1]
        assert isinstance(serial, Berth) and self.ends.vacate is not None
        if times:
            self.ends.vacate((serial.serial,))
        with pytest.raises(RemoteProtocolError, match="vacate each once"):
            self.ends.vacate((serial.serial,) if times else (serial.serial + 1,))


@pytest.fixture
def landing() -> Iterator[bytes]:
    yield Landing(address=1 << 40, num_berths=4, berth_bytes=4096, agent=b"agent").pack()


def test_a_landing_survives_the_trip(landing: bytes) -> None:
    assert Landing.unpack(landing) == Landing(address=1 << 40, num_berths=4, berth_bytes=4096, agent=b"agent")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_berths": 0}, "0 berths of 4096 bytes"),
        ({"num_berths": 1025}, "1025 berths of 4096 bytes"),
        ({"berth_bytes": 0}, "4 berths of 0 bytes"),
        ({"address": (1 << 64) - 4096}, "fit into memory"),
        ({"agent": b""}, "20 bytes"),
    ],
)
def test_a_landing_that_cannot_be_is_refused(changes: dict[str, object], says: str) -> None:
    fields: dict[str, object] = {"address": 1 << 40, "num_berths": 4, "berth_bytes": 4096, "agent": b"agent"}
    with pytest.raises(RemoteProtocolError, match=says):
        Landing.unpack(Landing(**(fields | changes)).pack())  # type: ignore[arg-type]


@needs_nixl
def test_metadata_of_no_agent_is_refused(landing: bytes) -> None:
    session = NixlSession("source")
    with pytest.raises(RemoteProtocolError, match="the metadata of a NIXL agent"):
        NixlSource(session, HostChunkPool(chunks=1, chunk_bytes=16), landing, count(1))
    session.close()


def test_a_missing_package_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transfer.nixl_agent._MODULES", ("no_such_nixl",))
    assert "no_such_nixl" in why_no_nixl()
    with pytest.raises(ConfigError, match=r"path is 'nixl', .* pip install 'unikv\[nixl\]'"):
        require_nixl()
