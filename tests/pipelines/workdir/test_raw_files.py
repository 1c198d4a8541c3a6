import pytest
from bad_input import Case

from gristmill.foundation.errors import InputError
from gristmill.foundation.progress import Reporter
from gristmill.foundation.runtime.tasks.local import LocalEngine
from gristmill.pipelines.recipes.config import Recipe
from gristmill.pipelines.recipes.recipe_file import load_recipe
from gristmill.pipelines.workdir.raw_files import lock_raw_files
from gristmill.pipelines.workdir.remote import lease


@pytest.fixture
def recipe(tmp_path):
    folder = tmp_path / "raw"
    folder.mkdir()
    (folder / "a.txt").write_text("alpha")
    (folder / "b.txt").write_text("beta")
    return Recipe.model_validate(
        {
            "name": "r",
            "sources": [{"name": "s", "format": "text", "paths": [str(folder / "*.txt")]}],
            "model": {"layers": 1, "width": 8, "heads": 2, "sequence_length": 8},
            "train": {"tokens": 64, "batch_tokens": 16},
        }
    )


def test_the_same_files_are_held_to_the_lock(recipe, tmp_path):
    first = lock_raw_files(recipe, tmp_path / "work", LocalEngine(1, Reporter.silent()))
    assert sorted(file.name for file in first.sources[0].files) == ["a.txt", "b.txt"]
    assert lock_raw_files(recipe, tmp_path / "work", LocalEngine(1, Reporter.silent())) == first


def test_a_changed_file_is_named_and_can_be_accepted(recipe, tmp_path):
    first = lock_raw_files(recipe, tmp_path / "work", LocalEngine(1, Reporter.silent()))
    (tmp_path / "raw/b.txt").write_text("bets")
    with pytest.raises(InputError, match=r"(?s)1 raw files.*b\.txt: sha256 was.*--update-lock"):
        lock_raw_files(recipe, tmp_path / "work", LocalEngine(1, Reporter.silent()))
    assert lock_raw_files(recipe, tmp_path / "work", LocalEngine(1, Reporter.silent()), update=True) != first


def test_a_changed_request_is_pinned_anew(recipe, tmp_path):
    lock_raw_files(recipe, tmp_path / "work", LocalEngine(1, Reporter.silent()))
    (tmp_path / "raw/c.md").write_text("gamma")
    fields = recipe.model_dump(mode="json")
    fields["sources"][0]["paths"] = [str(tmp_path / "raw/*.md")]
    lock = lock_raw_files(Recipe.model_validate(fields), tmp_path / "work", LocalEngine(1, Reporter.silent()))
    assert [file.name for file in lock.sources[0].files] == ["c.md"]


def test_moved_files_keep_their_identity(recipe, tmp_path):
    first = lock_raw_files(recipe, tmp_path / "work", LocalEngine(1, Reporter.silent()))
    (tmp_path / "raw").rename(tmp_path / "elsewhere")
    fields = recipe.model_dump(mode="json")
    fields["sources"][0]["paths"] = [str(tmp_path / "elsewhere/*.txt")]
    moved = lock_raw_files(Recipe.model_validate(fields), tmp_path / "work", LocalEngine(1, Reporter.silent()))
    assert moved.identity() == first.identity()


def test_planning_writes_no_lock(recipe, tmp_path):
    lock_raw_files(recipe, tmp_path / "work", LocalEngine(1, Reporter.silent()), write=False)
    assert not (tmp_path / "work").exists()


def test_a_glob_that_matches_nothing(recipe, tmp_path):
    fields = recipe.model_dump(mode="json")
    fields["sources"][0]["paths"] = [str(tmp_path / "*.nothing")]
    with pytest.raises(InputError, match="no file matches"):
        lock_raw_files(Recipe.model_validate(fields), tmp_path / "work", LocalEngine(1, Reporter.silent()))


def test_a_list_is_held_to_the_lock_as_raw_files_are(recipe, tmp_path):
    words = tmp_path / "words.txt"
    words.write_text("darn\n")
    listed = recipe.model_dump(mode="json") | {"curate": {"lists": {"badwords": [str(words)]}}}
    recipe = Recipe.model_validate(listed)
    first = lock_raw_files(recipe, tmp_path / "work", LocalEngine(1, Reporter.silent()))
    assert [(source.name, [file.name for file in source.files]) for source in first.sources][1:] == [
        ("lists.badwords", ["words.txt"])
    ]
    words.write_text("darn\nheck\n")
    with pytest.raises(InputError, match=r"(?s)lists\.badwords: 1 raw files.*words\.txt: sha256 was.*--update-lock"):
        lock_raw_files(recipe, tmp_path / "work", LocalEngine(1, Reporter.silent()))
    assert lock_raw_files(recipe, tmp_path / "work", LocalEngine(1, Reporter.silent()), update=True) != first


def test_a_second_command_changes_no_lock_while_the_first_runs(call, tmp_path):
    """`--update-lock` wrote the lock before the lease was taken, under the run that had pinned other bytes."""
    Case("", "", ()).write(tmp_path)
    lock_raw_files(load_recipe(str(tmp_path / "small.yaml")), tmp_path / "work", LocalEngine(1, Reporter.silent()))
    before = (tmp_path / "work/lock.json").read_bytes()
    (tmp_path / "raw/notes.txt").write_text("Other notes.")
    with lease(tmp_path / "work"):
        code, said = call("curate", "small.yaml", "--workdir", "work", "--update-lock")
    assert code == 1 and "another gristmill" in said
    assert (tmp_path / "work/lock.json").read_bytes() == before
