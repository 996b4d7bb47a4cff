import pytest
import zmq


@pytest.fixture(scope="session", autouse=True)
def zmq_keeper() -> None:
    """Start what pyzmq starts with the first uncopied frame and keeps to the end: one thread and its sockets.

    Otherwise the first test that sends such a frame would seem to leave them behind.
    """
    tracker = zmq.Frame(bytes(1_000_000), copy=False, track=True).tracker
    assert tracker is not None
    tracker.wait(10)
