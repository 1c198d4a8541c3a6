"""Writes scan_tables.npz, the tables that the scan of texts ships with: python tests/support/scan_tables_file.py"""

from pathlib import Path

import numpy as np

from gristmill.data_pipeline.annotate.normalize import TABLES_PATH, installed_versions
from gristmill.data_pipeline.annotate.scan_tables import build_tables


def write_tables(path: Path = TABLES_PATH) -> None:
    np.savez_compressed(path, **build_tables()._asdict(), versions=np.array(installed_versions()))


if __name__ == "__main__":
    write_tables()
    print(f"{TABLES_PATH.name}: {TABLES_PATH.stat().st_size} bytes, {installed_versions()}")
