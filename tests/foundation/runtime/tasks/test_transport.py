import numpy as np
import pyarrow as pa
import pytest

from gristmill.foundation.errors import InputError
from gristmill.foundation.runtime.tasks.transport import MAX_MESSAGE_BYTES, packed, unpacked


def test_a_small_value_travels_as_it_is(tmp_path):
    parcel = packed(("file.parquet", np.arange(10)), tmp_path)
    name, array = unpacked(parcel)
    assert name == "file.parquet" and array.tolist() == list(range(10))
    assert len(parcel.content) < 1024 and list(tmp_path.iterdir()) == []


def test_arrays_and_tables_travel_as_the_address_of_a_file(tmp_path):
    value = {
        "mask": np.arange(100_001) % 3 == 0,
        "ids": np.arange(60_000, dtype=np.uint64).reshape(-1, 2),
        "turned": np.arange(20_000.0).reshape(100, 200).T,
        "table": pa.table({"text": ["ä", None, "x" * 100]}),
    }
    parcel = packed(value, tmp_path)
    assert parcel.content == b"" and [str(path) for path in tmp_path.iterdir()] == [parcel.path]
    found = unpacked(parcel)
    for name in ("mask", "ids", "turned"):
        assert found[name].dtype == value[name].dtype and (found[name] == value[name]).all()
        assert found[name].flags.aligned and found[name].flags.writeable  # as kernels are compiled for
    assert found["table"].equals(value["table"])


def test_the_message_does_not_grow_with_the_documents(tmp_path):
    sizes = [len(packed(("task", np.zeros(rows, bool)), tmp_path).content) for rows in (10**5, 10**6, 10**7)]
    assert sizes == [0, 0, 0]


def test_twins_of_a_task_write_the_same_file(tmp_path):
    value = np.arange(MAX_MESSAGE_BYTES)
    assert packed(value, tmp_path) == packed(value.copy(), tmp_path)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_file_that_is_gone_is_named(tmp_path):
    parcel = packed(np.arange(MAX_MESSAGE_BYTES), tmp_path)
    (path,) = tmp_path.iterdir()
    path.unlink()
    with pytest.raises(InputError, match=path.name):
        unpacked(parcel)
