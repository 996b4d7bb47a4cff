"""Who may talk to whom over CURVE links, and what a listener on the wire sees."""

import contextlib
import logging
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from zmq.utils import z85

from transfer.link_curve import CurveKeys, load_keys, make_keys, split_key, with_key
from transfer.link_zmq import ZmqLink
from transfer.testing.mailbox import MailboxManager, contents
from unikv.errors import ConfigError, LocalProtocolError

Pair = tuple[bytes, bytes]
MakeLink = Callable[..., ZmqLink]
ME, PEER, STRANGER = (zmq.curve_keypair() for _ in range(3))


def keys(own: Pair, *authorized: Pair) -> CurveKeys:
    return CurveKeys(public=own[0], secret=own[1], authorized=frozenset(key for key, _ in authorized))


@pytest.fixture
def mail() -> MailboxManager:
    return MailboxManager()


@pytest.fixture
def make(mail: MailboxManager) -> Iterator[MakeLink]:
    links = []

    def one(curve: CurveKeys | None = None, bind: str = "tcp://127.0.0.1:*") -> ZmqLink:
        links.append(ZmqLink(bind, connect_timeout_s=0.5, curve=curve))
        mail.add(links[-1])
        return links[-1]

    yield one
    for link in links:
        link.abort()


# --- connections ------------------------------------------------------------------------------------------------------


def test_two_that_list_each_other_talk_both_ways(mail: MailboxManager, make: MakeLink) -> None:
    one, two = make(keys(ME, PEER)), make(keys(PEER, ME))
    one.connect(two.address)
    two.connect(one.address)
    one.send(two.address, [b"there", bytes(1_000_000)])
    two.send(one.address, [b"and back"])
    assert contents(mail.receive(two, 1)[0]) == [b"there", bytes(1_000_000)]
    assert contents(mail.receive(one, 1)[0]) == [b"and back"]


def test_a_key_that_is_not_listed_gets_no_message_in_and_hears_why(
    mail: MailboxManager, make: MakeLink, caplog: pytest.LogCaptureFixture
) -> None:
    target, stranger = make(keys(ME, PEER)), make(keys(STRANGER, ME))
    for _ in range(2):
        stranger.connect(target.address)
        stranger.send(target.address, [b"let me in"])
        assert "our CURVE key is not authorized there" in mail.wait_gone(stranger, target.address)
    mail.assert_quiet(target)
    told = [record.getMessage() for record in caplog.records if STRANGER[0].decode() in record.getMessage()]
    assert len(told) == 1  # once, however often it knocks


def test_a_listener_that_is_not_listed_is_not_spoken_to(mail: MailboxManager, make: MakeLink) -> None:
    impostor, one = make(keys(STRANGER, ME)), make(keys(ME, PEER))
    one.connect(impostor.address)
    one.send(impostor.address, [b"secret plan"])
    reason = mail.wait_gone(one, impostor.address)
    assert f"its CURVE key {STRANGER[0].decode()} is not authorized here" in reason
    mail.assert_quiet(impostor)


def test_a_listener_that_borrows_a_listed_key_cannot_prove_it(mail: MailboxManager, make: MakeLink) -> None:
    impostor, one = make(keys(STRANGER, ME)), make(keys(ME, PEER))
    where, _ = split_key(impostor.address)
    claimed = with_key(where, PEER[0])
    one.connect(claimed)
    one.send(claimed, [b"secret plan"])
    assert mail.wait_gone(one, claimed)
    mail.assert_quiet(impostor)


def test_no_keys_here_and_keys_there_is_refused_at_once(mail: MailboxManager, make: MakeLink) -> None:
    target, plain = make(keys(ME, PEER)), make()
    plain.connect(target.address)
    assert "it wants CURVE and we have no keys" in mail.wait_gone(plain, target.address)


def test_keys_here_and_none_there_is_refused_at_once(mail: MailboxManager, make: MakeLink) -> None:
    plain, one = make(), make(keys(ME, PEER))
    one.connect(plain.address)
    assert "its address has no CURVE key" in mail.wait_gone(one, plain.address)
    mail.assert_quiet(plain)


def test_a_plain_link_that_leaves_the_key_out_gets_nothing_in(mail: MailboxManager, make: MakeLink) -> None:
    target, plain = make(keys(ME, PEER)), make()
    where, _ = split_key(target.address)
    plain.connect(where)
    plain.send(where, [b"hello?"])
    assert mail.wait_gone(plain, where)
    mail.assert_quiet(target)


def test_being_on_ones_own_list_is_not_implied(mail: MailboxManager, make: MakeLink) -> None:
    link = make(keys(ME, PEER))
    link.connect(link.address)
    assert "not authorized here" in mail.wait_gone(link, link.address)


def test_a_link_with_keys_shares_no_context() -> None:
    with zmq.Context() as context, pytest.raises(LocalProtocolError, match="context is 'shared', expected None"):
        ZmqLink(context=context, curve=keys(ME, PEER))


def test_an_address_in_use_leaves_no_thread_behind(make: MakeLink) -> None:
    first = make(keys(ME, PEER))
    with pytest.raises(ConfigError, match="bind address"):
        ZmqLink(first.address, curve=keys(ME, PEER))


class Wiretap:
    """Forwards one TCP connection and keeps what went through from the connecting side."""

    def __init__(self, port: int) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.seen = bytearray()
        self._port = port
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        here, _ = self.listener.accept()
        with here, socket.create_connection(("127.0.0.1", self._port)) as ahead:
            back = threading.Thread(target=self._pump, args=(ahead, here, bytearray()))
            back.start()
            self._pump(here, ahead, self.seen)
            back.join()

    @staticmethod
    def _pump(source: socket.socket, sink: socket.socket, kept: bytearray) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                kept += data
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._thread.join()
        self.listener.close()


@pytest.mark.parametrize("encrypted", [True, False])
def test_what_travels_cannot_be_read_on_the_way(mail: MailboxManager, make: MakeLink, encrypted: bool) -> None:
    one, two = (make(keys(ME, PEER)), make(keys(PEER, ME))) if encrypted else (make(), make())
    where, key = split_key(two.address)
    tap = Wiretap(int(where.rpartition(":")[2]))
    try:
        tapped = f"tcp://127.0.0.1:{tap.listener.getsockname()[1]}"
        tapped = tapped if key is None else with_key(tapped, key)
        one.connect(tapped)
        one.send(tapped, [b"the tokens of a prompt" * 100])
        assert contents(mail.receive(two, 1)[0]) == [b"the tokens of a prompt" * 100]
        assert (b"tokens of a prompt" in tap.seen) is not encrypted
        one.disconnect(tapped)
    finally:
        tap.close()


# --- addresses --------------------------------------------------------------------------------------------------------


@given(st.text(max_size=40), st.binary(min_size=32, max_size=32))
def test_an_address_gives_back_its_key(where: str, key: bytes) -> None:
    assert split_key(with_key(where, z85.encode(key))) == (where, z85.encode(key))


@pytest.mark.parametrize("address", ["", "tcp://h:1", "tcp://h:1#curve=", "tcp://h:1#curve=" + "g" * 64, "#curve=00"])
def test_an_address_without_a_whole_key_has_none(address: str) -> None:
    assert split_key(address) == (address, None)


# --- keys -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_keys(tmp_path, "me")
    make_keys(tmp_path / "peers", "peer")
    return tmp_path


def load(folder: Path) -> CurveKeys:
    return load_keys(folder / "me.key", folder / "me.key_secret", folder / "peers")


def test_keys_that_were_made_are_read(folder: Path, mail: MailboxManager, make: MakeLink) -> None:
    made = load(folder)
    (peer,) = made.authorized
    assert zmq.curve_public(made.secret) == made.public != peer


def test_a_secret_is_its_owners_alone_and_in_no_text(folder: Path) -> None:
    made = load(folder)
    assert stat.S_IMODE((folder / "me.key_secret").stat().st_mode) == 0o600
    assert made.secret.decode() not in repr(made) and repr(made.secret) not in repr(made)
    assert made.secret.decode() not in (folder / "me.key").read_text()


def test_a_secret_others_may_read_is_refused(folder: Path) -> None:
    (folder / "me.key_secret").chmod(0o640)
    with pytest.raises(ConfigError, match=r"mode of the secret file is '?0o640.*chmod 600"):
        load(folder)


def test_a_pair_is_never_overwritten(folder: Path) -> None:
    before = (folder / "me.key_secret").read_bytes()
    with pytest.raises(ConfigError, match=r"expected a new file"):
        make_keys(folder, "me")
    assert (folder / "me.key_secret").read_bytes() == before


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "x" * 101, "sp ace"])
def test_a_name_that_is_no_file_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="name is"):
        make_keys(tmp_path, name)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"expected one that can be written to|expected a new file"):
        make_keys(tmp_path / "file" / "keys", "me")


def spoil_nothing_listed(folder: Path) -> None:
    (folder / "peers" / "peer.key").unlink()


def spoil_no_directory(folder: Path) -> None:
    for path in (folder / "peers").iterdir():
        path.unlink()
    (folder / "peers").rmdir()


def spoil_missing_secret(folder: Path) -> None:
    (folder / "me.key_secret").unlink()


def spoil_public_as_secret(folder: Path) -> None:
    (folder / "me.key_secret").write_bytes((folder / "me.key").read_bytes())


def spoil_other_secret(folder: Path) -> None:
    (folder / "me.key_secret").write_bytes((folder / "peers" / "peer.key_secret").read_bytes())


def spoil_listed_garbage(folder: Path) -> None:
    (folder / "peers" / "bad.key").write_text('public-key = "short"')


def spoil_listed_text(folder: Path) -> None:
    (folder / "peers" / "bad.key").write_bytes(b"\xff\x00 nothing")


def spoil_huge(folder: Path) -> None:
    (folder / "me.key").write_bytes(b"#" * 70_000)


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (spoil_nothing_listed, "authorized is 'empty'|authorized is empty"),
        (spoil_no_directory, "expected a directory"),
        (spoil_missing_secret, r"no file.*unikv keygen"),
        (spoil_public_as_secret, "expected a file with a secret-key"),
        (spoil_other_secret, "expected the other half of the public key"),
        (spoil_listed_garbage, "expected a key of 40 Z85 characters"),
        (spoil_listed_text, r"bad.key \(no public-key in it\)"),
        (spoil_huge, "too long"),
    ],
)
def test_files_that_are_no_keys_are_refused_by_name(folder: Path, spoil: Callable[[Path], None], text: str) -> None:
    secret = load(folder).secret.decode()
    spoil(folder)
    with pytest.raises(ConfigError, match=text) as caught:
        load(folder)
    assert secret not in str(caught.value)


def test_what_libzmq_says_of_refusals_stays_out_of_the_log(
    mail: MailboxManager, make: MakeLink, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        one, two = make(keys(ME, PEER)), make(keys(PEER, ME))
        one.connect(two.address)
        one.send(two.address, [b"x"])
        mail.receive(two, 1)
    assert not [record for record in caplog.records if ME[1].decode() in record.getMessage()]
