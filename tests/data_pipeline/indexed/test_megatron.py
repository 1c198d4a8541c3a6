"""Megatron-LM reads our files and writes the same bytes; its builder's files are read by us."""

import numpy as np
import pytest

from gristmill.data_pipeline.indexed.format import IndexedReader
from tests.support.indexed_files import write_documents

indexed_dataset = pytest.importorskip(
    "megatron.core.datasets.indexed_dataset",
    reason="megatron-core is absent; pip install --no-deps megatron-core==0.16.1",
)
torch = pytest.importorskip("torch")


@pytest.fixture(params=[np.uint8, np.int8, np.int16, np.int32, np.int64, np.uint16], ids=lambda dtype: dtype.__name__)
def both(request, tmp_path, random_documents):
    """The same documents written by Megatron's builder and by ours."""
    documents = [[token % 100 for token in document] for document in random_documents(0, 200, 50)]
    builder = indexed_dataset.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=request.param)
    for document in documents:
        builder.add_item(torch.tensor(document))
        builder.end_document()
    builder.finalize(str(tmp_path / "theirs.idx"))
    write_documents(tmp_path / "ours", documents, request.param)
    return tmp_path, documents


def test_the_files_are_equal_byte_for_byte(both):
    folder, _ = both
    for suffix in (".bin", ".idx"):
        assert (folder / f"ours{suffix}").read_bytes() == (folder / f"theirs{suffix}").read_bytes()


def test_each_reads_the_other(both):
    folder, documents = both
    theirs = indexed_dataset.IndexedDataset(str(folder / "ours"))
    ours = IndexedReader(folder / "theirs")
    assert len(theirs) == len(ours) == len(documents)
    for number, document in enumerate(documents):
        assert theirs[number].tolist() == ours.document(number).tolist() == document


def test_their_documents_of_several_sequences_are_read(tmp_path):
    builder = indexed_dataset.IndexedDatasetBuilder(str(tmp_path / "d.bin"), dtype=np.int32)
    builder.add_document(torch.tensor([1, 2, 3, 4, 5]), [2, 3])
    builder.add_document(torch.tensor([6]), [1])
    builder.finalize(str(tmp_path / "d.idx"))
    reader = IndexedReader(tmp_path / "d")
    assert [document.tolist() for document in reader.documents()] == [[1, 2, 3, 4, 5], [6]]
