"""Keyed digests against OpenSSL, and tombstones: which rows they match, and the chain of requests."""

import numpy as np
import pytest

from gristmill.data_pipeline.annotate.tombstones import (
    Tombstones,
    bytes_of,
    keyed_digests,
    read_tombstones,
    write_tombstones,
)
from gristmill.foundation.errors import InputError

IDS = [bytes([number] * 16) for number in range(1, 6)]
KEYS = [bytes([100 + number] * 16) for number in range(1, 6)]


def test_a_digest_is_that_of_openssl():
    """`openssl mac -macopt hexkey:000102..0f -macopt size:16 -in FILE SIPHASH`, FILE the bytes 0 to 15."""
    values = np.stack([np.arange(16, dtype=np.uint8), np.full(16, 7, np.uint8)])
    digests = keyed_digests(values, bytes(range(16)))
    assert digests[0].tobytes().hex() == "6ee2a4ca67b054bbfd3315bf85230577"
    assert keyed_digests(values[1:], bytes(range(16))).tobytes() == digests[1].tobytes()


def test_rows_match_by_id_and_by_text():
    tombstones = Tombstones.empty().with_request("ids", [IDS[0].hex()], [KEYS[3]])
    rows, digests = tombstones.matches(bytes_of(IDS), bytes_of(KEYS))
    assert rows.tolist() == [0, 3]
    assert sorted(digests) == sorted([*tombstones.requests[0].ids, *tombstones.requests[0].texts])
    assert tombstones.matches(bytes_of(IDS))[0].tolist() == [0]
    assert not len(tombstones.matches(bytes_of(KEYS), bytes_of(IDS))[0])  # an id is no text key


def test_no_text_matches_nothing():
    tombstones = Tombstones.empty().with_request("ids", [], [bytes(16)])
    assert not len(tombstones.matches(bytes_of(IDS[:1]), bytes_of([bytes(16)]))[0])


def test_a_request_names_what_is_new_and_the_one_before():
    first = Tombstones.empty().with_request("ids", [IDS[0].hex()], [])
    second = first.with_request("host", [IDS[0].hex(), IDS[1].hex()], [])
    assert [len(request.ids) for request in second.requests] == [1, 1]
    assert second.requests[1].previous == first.requests[0].digest == first.head
    assert second.with_request("ids", [IDS[1].hex()], []) == second


@pytest.mark.parametrize("change", ["reordered", "one is gone"])
def test_a_broken_chain_is_refused(tmp_path, change):
    tombstones = Tombstones.empty()
    for doc_id in IDS:
        tombstones = tombstones.with_request("ids", [doc_id.hex()], [])
    requests = tombstones.requests[::-1] if change == "reordered" else tombstones.requests[1:]
    write_tombstones(tmp_path, Tombstones(key=tombstones.key, requests=requests))
    with pytest.raises(InputError, match="was changed after it was written, or one before it is gone"):
        read_tombstones(tmp_path)
