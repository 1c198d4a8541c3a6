"""The plot of scores over a training run."""

from gristmill.evaluation.results.curve import curve_svg


def test_the_same_points_give_the_same_picture():
    points = [
        {"step": step, "tokens": step * 1000, "task": task, "metric": "acc", "score": 0.3, "error": 0.1, "chance": 0.25}
        for step in (1, 2)
        for task in ("a", "b")
    ]
    first = curve_svg(points)
    assert first == curve_svg(points)
    assert first.count('id="axes_') == 2 and "<script" not in first
    assert curve_svg([{**point, "tokens": None, "chance": None, "error": None} for point in points]) != first
