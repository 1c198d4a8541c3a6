"""pyarrow does without pandas until somebody asks for it."""

import subprocess
import sys

PROGRAM = """
import sys
import pyarrow
from gristmill.foundation.engine.pandas_check import do_without_pandas

do_without_pandas()
table = pyarrow.table({"a": pyarrow.array([1, 2])})
print("pandas" in sys.modules, table.to_pandas()["a"].sum(), "pandas" in sys.modules)
"""


def test_pandas_is_imported_only_for_to_pandas():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "3", "True"]
