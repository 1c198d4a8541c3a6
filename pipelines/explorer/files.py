"""Files of a corpus in a folder of this machine, of which only what is needed is read."""

from pathlib import Path

import pyarrow.parquet as pq


class CorpusFiles:
    """Reading by paths relative to the corpus's folder. Missing files raise OSError."""

    def __init__(self, folder: Path):
        self.folder = folder

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        with (self.folder / name).open("rb") as file:
            file.seek(start)
            return file.read() if stop is None else file.read(stop - start)

    def parquet(self, name: str) -> pq.ParquetFile:
        return pq.ParquetFile(self.folder / name)

    def exists(self, name: str) -> bool:
        return (self.folder / name).exists()

    def tables(self, folder: str) -> list[str]:
        """Paths of all Parquet files below a folder, sorted."""
        paths = (self.folder / folder).rglob("*.parquet")
        return sorted(path.relative_to(self.folder).as_posix() for path in paths if not path.name.startswith("."))
