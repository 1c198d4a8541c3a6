"""Indexing: which tokenizer a process has loaded."""

import shutil

from gristmill.tokenizers.index_corpus import _loaded_once


def test_a_tokenizer_trained_again_under_its_old_path_is_loaded_again(trained, tmp_path):
    """One process may index twice, as from Python: the ids are those of the files that are there."""
    folder, sizes = tmp_path / "tokenizer", []
    for preset in ("default", "characters"):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(trained(preset=preset), folder)
        sizes.append([_loaded_once(folder, "sentencepiece").encode("The mill") for _ in range(2)])
    assert sizes[0][0] == sizes[0][1] != sizes[1][0] == sizes[1][1]
