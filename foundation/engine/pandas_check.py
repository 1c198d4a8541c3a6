"""Keeps pandas out of processes that use pyarrow alone."""

import sys

from gristmill.foundation.hidden_modules import hidden_modules


def do_without_pandas() -> None:
    """After the call pyarrow does not import pandas by itself, which takes 0.3 s and 50 MB a process.

    pyarrow (26) looks once, when it builds its first array, whether pandas is installed; it looks while pandas is
    hidden. A later call of to_pandas, or an import of pandas, works as before. Does nothing where pyarrow is not
    imported."""
    pyarrow = sys.modules.get("pyarrow")
    if pyarrow is not None and "pandas" not in sys.modules:
        with hidden_modules("pandas"):
            pyarrow.array([0])
