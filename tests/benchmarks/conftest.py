"""Makes benchmarks/published importable.

Appended, not prepended: installed packages that share a name with a benchmark (evaluate) must be found first."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent.parent / "benchmarks"))
