from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_overlap.checkpoint.rectangles import Rectangle, count_cover, describe


def test_parts_in_common_are_found_in_both_frames():
    stored, wanted = Rectangle((2, 0), (4, 8)), Rectangle((4, 3), (5, 2))
    common = stored.common(wanted)
    assert common == Rectangle((4, 3), (2, 2))
    assert common.slices_within(stored) == (slice(2, 4), slice(3, 5))
    assert common.slices_within(wanted) == (slice(0, 2), slice(0, 2))
    assert stored.common(Rectangle((6, 0), (1, 8))) is None


def test_a_scalar_is_one_element():
    scalar = Rectangle((), ())
    assert scalar.numel == 1
    assert scalar.common(scalar) == scalar
    assert count_cover(scalar, []) == (0, 0)
    assert count_cover(scalar, [scalar, scalar]) == (2, 2)


def test_text():
    assert describe(Rectangle((0, 8), (4, 8))) == "[0:4, 8:16]"
    assert describe(Rectangle((), ())) == "[]"


@st.composite
def rectangles(draw, shape):
    spans = [sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in shape]
    return Rectangle(tuple(start for start, _ in spans), tuple(end - start for start, end in spans))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_cover_counts_each_element(data):
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple))
    target = data.draw(rectangles(shape))
    parts = data.draw(st.lists(rectangles(shape), max_size=6))
    counts = np.zeros(shape, dtype=int)
    for part in parts:
        counts[tuple(map(slice, part.offset, part.end))] += 1
    inside = counts[tuple(map(slice, target.offset, target.end))]
    expected = (inside.min(), inside.max()) if inside.size else (1, 1)
    assert count_cover(target, parts) == expected
