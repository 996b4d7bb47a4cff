"""How control grows, in what can be counted: messages, meetings, turns. `scripts/bench_scale.py` has the times."""

from collections.abc import Iterator

import pytest

from transfer.testing.scale import FleetDriver

TP = 2
TOKENS = 256


@pytest.fixture
def fleet() -> Iterator[FleetDriver]:
    made = FleetDriver(6, 3, tp=TP)
    yield made
    made.close()


def test_ranks_meet_when_they_have_something_to_do_and_never_again(fleet: FleetDriver) -> None:
    assert fleet.tally.total == 0
    for _ in range(5):
        fleet.start(0, 0, TOKENS)
        fleet.run()
    assert fleet.tally.messages["Hello"] == fleet.tally.messages["HelloAck"] == TP * TP
    fleet.start(3, 1, TOKENS)
    fleet.run()
    assert fleet.tally.messages["Hello"] == 2 * TP * TP
    assert fleet.settle() == 0


@pytest.mark.parametrize("requests", [1, 10, 60])
def test_messages_are_so_many_a_request_however_many_are_open(fleet: FleetDriver, requests: int) -> None:
    for number in range(requests):
        fleet.start(number % 6, number % 3, TOKENS)
    fleet.run()
    assert fleet.settle() == 0
    said = {name: count / requests for name, count in fleet.tally.messages.items() if not name.startswith("Hello")}
    # One ask and one last word for each pair of ranks with bytes, and one for the pair of the first rank without any.
    assert said == {"Ask": TP + 1, "Done": TP + 1, "Chunk": TP, "Credit": TP}


def test_open_requests_cost_no_turns_of_their_own(fleet: FleetDriver) -> None:
    fleet.connect(0, 0)
    for _ in range(200):
        fleet.start(0, 0, TOKENS, publish=False)
    fleet.run()
    turns, messages = fleet.tally.turns, fleet.tally.total
    fleet.start(0, 0, TOKENS)
    fleet.run()
    assert fleet.tally.total - messages == 4 * TP + 2
    assert fleet.tally.turns - turns < 60
    assert fleet.settle() == 200 * TP
