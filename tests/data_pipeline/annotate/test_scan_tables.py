import unicodedata

import numpy as np
from scan_tables_file import write_tables

from gristmill.data_pipeline.annotate import normalize
from gristmill.data_pipeline.annotate.scan_tables import INSIDE, START, UNCOMPOSED


def test_the_shipped_tables_are_those_of_the_installed_ftfy_and_unicode(tmp_path):
    write_tables(tmp_path / "made.npz")
    with np.load(normalize.TABLES_PATH) as shipped, np.load(tmp_path / "made.npz") as made:
        assert sorted(shipped) == sorted(made)
        for name in made:
            assert np.array_equal(shipped[name], made[name]), f"{name}: run python tests/support/scan_tables_file.py"
    tables = normalize.scan_tables()
    for code in [*range(0x3100), *range(0xAC00, 0xAC80), 0x1D15E, 0x1F600, 0x10FFFF]:
        kind = tables.pages[tables.page_of[code >> 8], code & 255]
        assert tables.combining[kind] == unicodedata.combining(chr(code))
        if not unicodedata.is_normalized("NFC", chr(code)):
            assert tables.flags[kind] & UNCOMPOSED


def test_tables_of_other_versions_are_built_anew(monkeypatch):
    shipped = normalize.scan_tables()
    normalize.scan_tables.cache_clear()
    monkeypatch.setattr(normalize, "version", lambda _: "0.0")
    built: list[bool] = []
    monkeypatch.setattr(normalize, "build_tables", lambda: built.append(True) or shipped)
    assert normalize.scan_tables() is shipped
    assert built == [True]
    normalize.scan_tables.cache_clear()


def test_ascii_is_never_bad_and_forgotten():
    """The kernel skips over long runs of ASCII: the automaton must not match in one, and its state behind one must be
    that of the last characters alone."""
    tables = normalize.scan_tables()
    matched = len(tables.next_state) - 1
    ascii_classes = np.unique(tables.classes[tables.pages[tables.page_of[0], :128]])
    reached, waiting = set(), [START, INSIDE]
    while waiting:
        state = waiting.pop()
        for after in tables.next_state[state, ascii_classes].tolist():
            assert after != matched  # ASCII alone is never bad
            if after not in reached:
                reached.add(after)
                waiting.append(after)
    # from any state but the final one, `memory` characters of ASCII lead where they lead from INSIDE, or to the end
    states = {(first, INSIDE) for first in range(matched)}
    for _ in range(tables.memory):
        states = {
            (int(tables.next_state[first, one]), int(tables.next_state[second, one]))
            for first, second in states
            for one in ascii_classes
        }
    assert all(first in (second, matched) for first, second in states)
