import re

import pytest

from gristmill.pipelines.report.figures import bin_edges, curves, histogram, sorted_bars


def test_whole_numbers_get_a_bin_each():
    assert bin_edges([0, 3], 2, bins=60) == ([-0.5, 0.5, 1.5, 2.5, 3.5], False)


def test_a_wide_range_is_cut_by_ratios():
    edges, is_log = bin_edges([1.5, 15_000.0], 50, bins=4)
    assert is_log and edges == pytest.approx([1.5, 15, 150, 1500, 15_000])


def test_the_threshold_is_always_in_the_picture():
    assert bin_edges([0.1, 0.2], 0.9, bins=8)[0][-1] == pytest.approx(0.9)
    assert bin_edges([0.5, 0.5], None, bins=2) == ([0.0, 1.0], False)


def test_a_figure_has_the_same_bytes_every_time():
    assert histogram([0.1, 0.4], [0.9], 0.5, "x") == histogram([0.1, 0.4], [0.9], 0.5, "x")
    assert histogram([], [0.9, 0.8], None, "x")


@pytest.mark.parametrize("number", [3, 20, 33])
def test_each_group_of_bars_has_a_color_of_its_own(number):
    drawn = sorted_bars([(f"bar {k}", f"group {k}", 1.0, None) for k in range(number)], "bits per byte").decode()
    fills = set(re.findall(r"fill: (#[0-9a-f]{6})", drawn)) - {"#ffffff"}
    assert len(fills) == number


def test_black_is_the_colour_of_text_of_the_readers_mode():
    """Axes and labels of matplotlib, and the source's colour in its curve."""
    drawn = curves({"web": ([0, 1], [1.0, 0.5])}, "x", "y", {"web": "#4477aa"}).decode()
    assert "#000000" not in drawn and "var(--ink)" in drawn and "prefers-color-scheme: dark" in drawn
    assert "#4477aa" in drawn
    assert "#ffffff" not in drawn  # no white background
