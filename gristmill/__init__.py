"""gristmill in Python: the names of this package are the stable interface (docs/python.md).

Each name is imported at its first use, so `import gristmill` costs nothing and commands stay as fast as before. The
folders beside this one are its subpackages: gristmill.training is training/ (docs/architecture.md says how)."""

import importlib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

# In a checkout the subpackages lie beside this folder; in an installed package they lie in it.
_CHECKOUT = Path(__file__).parent.parent
if (_CHECKOUT / "pyproject.toml").is_file():
    __path__.append(str(_CHECKOUT))

if TYPE_CHECKING:
    from gristmill.pipelines.python_api import Corpus as Corpus
    from gristmill.pipelines.python_api import Model as Model
    from gristmill.pipelines.python_api import compare as compare
    from gristmill.pipelines.python_api import curate as curate
    from gristmill.pipelines.python_api import evaluate as evaluate
    from gristmill.pipelines.python_api import load as load
    from gristmill.pipelines.python_api import open_corpus as open_corpus
    from gristmill.pipelines.python_api import plan_layout as plan_layout
    from gristmill.pipelines.python_api import run as run
    from gristmill.pipelines.python_api import train as train

__all__ = ["Corpus", "Model", "compare", "curate", "evaluate", "load", "open_corpus", "plan_layout", "run", "train"]

try:
    __version__ = version("gristmill")
except PackageNotFoundError:  # a checkout that is not installed
    __version__ = "0"


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"gristmill has no {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module("gristmill.pipelines.python_api"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
