from hypothesis import given
from hypothesis import strategies as st

from transfer.deadlines import DeadlineManager, Pace
from unikv.ids import RequestId

TIMES = st.integers(0, 20).map(float)


@given(st.lists(TIMES, max_size=12), st.lists(TIMES, max_size=8))
def test_every_deadline_is_due_once_and_in_time(deadlines: list[float], looks: list[float]) -> None:
    manager = DeadlineManager()
    for number, deadline_s in enumerate(deadlines):
        manager.add(RequestId(number), deadline_s)
    open_ones = dict(enumerate(deadlines))
    for now_s in sorted(looks):
        due = manager.due(now_s)
        assert sorted(due) == sorted(number for number, deadline_s in open_ones.items() if deadline_s <= now_s)
        assert [open_ones[number] for number in due] == sorted(open_ones.pop(number) for number in due)
        assert len(manager) == len(open_ones)


@given(st.lists(st.floats(0, 3), max_size=30))
def test_a_pace_is_kept_however_often_one_looks(steps: list[float]) -> None:
    pace, now_s, last_s = Pace(1.0), 5.0, 5.0
    assert not pace.due(5.0)
    for step in steps:
        now_s += step
        assert pace.due(now_s) == (now_s >= last_s + 1.0)
        last_s = now_s if now_s >= last_s + 1.0 else last_s
