"""Which worker a process is, from the command line or a launcher; and where it listens."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from transfer.hello import Side
from unikv.errors import ConfigError
from workers.addresses import choose_address
from workers.config import PairConfig
from workers.launched import WorkerPlace, place_worker

ENVIRON = {
    "RANK": "2",
    "WORLD_SIZE": "3",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
URL = "tcp://10.0.0.1:29500"


def test_a_launcher_of_both_sides_numbers_context_ranks_first(tiny_pair: Callable[..., PairConfig]) -> None:
    pair = tiny_pair(context__parallel={"tp": 2})
    places = [place_worker(pair, None, None, None, environ={**ENVIRON, "RANK": str(rank)}) for rank in range(3)]
    want = [(Side.CONTEXT, 0), (Side.CONTEXT, 1), (Side.GENERATION, 0)]
    assert [(place.side, place.rank) for place in places] == want
    assert all(place.url == URL and place.several_hosts and not place.serve for place in places)


def test_without_a_store_of_the_launcher_rank_0_hosts_it(tiny_pair: Callable[..., PairConfig]) -> None:
    environ = {**ENVIRON, "RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "False"}
    assert place_worker(tiny_pair(), None, None, None, environ=environ).serve


def test_the_command_line_needs_no_launcher(tiny_pair: Callable[..., PairConfig]) -> None:
    place = place_worker(tiny_pair(), Side.GENERATION, 0, URL, environ={})
    assert place == WorkerPlace(side=Side.GENERATION, rank=0, url=URL)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"WORLD_SIZE": ""}, "WORLD_SIZE"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT.*65536"),
        ({"RANK": "3"}, "RANK.*3"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE.*4.*1 context . 1 generation rank"),
    ],
)
def test_what_is_wrong_is_named(tiny_pair: Callable[..., PairConfig], changes: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        place_worker(tiny_pair(), None, None, None, environ={**ENVIRON, **changes})


def test_a_rendezvous_that_is_no_address_is_refused(tiny_pair: Callable[..., PairConfig]) -> None:
    with pytest.raises(ConfigError, match="tcp://HOST:PORT"):
        place_worker(tiny_pair(), Side.CONTEXT, 0, "10.0.0.1:29500", environ={})


def test_workers_listen_on_loopback_unless_told_otherwise() -> None:
    assert choose_address("localhost").bind == "tcp://127.0.0.1:*"
    assert choose_address("127.0.0.1", listen="lo", advertise="decode-3").advertise == "decode-3"


def test_loopback_will_not_do_for_several_hosts() -> None:
    with pytest.raises(ConfigError, match=r"one that other hosts reach.*transfer.listen"):
        choose_address("localhost", several_hosts=True)


def test_a_listen_that_is_nothing_of_this_host_is_refused_with_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1.*interfaces: .*lo"):
        choose_address("127.0.0.1", listen="192.0.2.1")


def test_listening_everywhere_needs_an_address_to_tell() -> None:
    with pytest.raises(ConfigError, match=r"transfer\.advertise"):
        choose_address("127.0.0.1", listen="0.0.0.0")
