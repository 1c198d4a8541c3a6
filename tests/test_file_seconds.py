"""The order in which the files of the tests are given to the workers."""

from file_seconds import longest_first, seconds_of_files

LOG = """
============================= slowest durations ==============================
2.60s call     tests/training/test_a.py::test_x[one]
1.00s setup    tests/training/test_a.py::test_x[one]
0.30s call     tests/test_b.py::test_y
3 passed in 4.00s
"""


def test_seconds_of_a_file_are_those_of_its_tests():
    assert seconds_of_files(LOG) == {"tests/training/test_a.py": 4}


def test_long_files_come_first_and_those_of_many_processes_alternate_with_others():
    tests = ["short 1", "gloo 1", "long 1", "gloo 2", "new 1", "other_gloo 1", "long 2"]
    seconds = {"short": 1, "gloo": 8, "long": 5, "other_gloo": 9}
    ordered = longest_first(tests, lambda test: test.split()[0], lambda test: "gloo" in test, seconds)
    assert ordered == ["other_gloo 1", "long 1", "long 2", "gloo 1", "gloo 2", "short 1", "new 1"]
