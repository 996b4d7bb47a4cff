"""Progress only grows."""

from hypothesis import given
from hypothesis import strategies as st

from transfer.readiness import ReadinessManager
from unikv.ids import LayerId

marks = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 50)), max_size=20)


@given(marks=marks, asked=st.lists(st.integers(0, 4), max_size=4))
def test_a_group_of_layers_has_what_each_of_them_has(marks, asked):
    readiness, best = ReadinessManager(50, complete=False), dict.fromkeys(range(5), 0)
    for layer, tokens in marks:
        before = readiness.tokens(map(LayerId, asked))
        readiness.mark(LayerId(layer), tokens)
        best[layer] = max(best[layer], tokens)
        assert readiness.tokens(map(LayerId, asked)) == min((best[layer] for layer in asked), default=0) >= before
    assert not readiness.complete
    readiness.finish()
    assert readiness.complete and readiness.tokens([LayerId(4)]) == 50
