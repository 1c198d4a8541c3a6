"""Pattern search on functions with known minima."""

import pytest

from gristmill.training.pattern_search import pattern_search


def test_pattern_search_finds_a_minimum():
    best = pattern_search(lambda p: (p[0] - 0.7) ** 2 + (p[1] - 0.5) ** 2, [0.9, 0.9], 0.1, 1e-4, 0.4, 1.0)
    assert best == pytest.approx([0.7, 0.5], abs=1e-3)
