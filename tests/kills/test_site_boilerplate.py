"""Random SIGKILLs in curation with the second pass by site: repeating the command gives the bytes of a clean run."""

import random
import shutil

import pytest
from kills import Launcher, files_of, kill_group_at, number_of_kills, seed_of

from benchmarks.support.warc_file import write_warc

KILLS = 60
ABOUT = "The River News is written by three people who live at the river, and it is printed in the mill every week."


def page(number: int) -> bytes:
    story = "".join(
        f"<p>Part {k} of story {number} tells of the mill, of the river, and of the people." for k in range(5)
    )
    return f"<html><body><article><h1>Story {number}</h1>{story}<p>{ABOUT}</p></article></body></html>".encode()


@pytest.mark.slow
def test_killed_groups_leave_the_bytes_of_a_clean_run(tmp_path):
    for k in range(4):
        write_warc(tmp_path / f"{k}.warc.gz", ((f"https://a.org/{n}", page(n)) for n in range(200 * k, 200 * k + 200)))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"name: r\nsources: [{{name: s, format: warc, paths: [{tmp_path}/*.warc.gz], "
        "blocks: {site_boilerplate: {}}}]\n"
        "curate: {filters: [], near_dedup: null}\n"
    )
    launcher = Launcher(tmp_path / "logs")
    launcher.run("curate", recipe, "--workdir", tmp_path / "first", "--workers", 2, cwd=tmp_path)
    _, seconds = launcher.run("curate", recipe, "--workdir", tmp_path / "clean", "--workers", 2, cwd=tmp_path)
    expected = files_of(tmp_path / "clean")
    rng, killed, work = random.Random(seed_of(3)), 0, tmp_path / "work"
    while killed < number_of_kills(KILLS):
        command = ("curate", recipe, "--workdir", work, "--workers", rng.choice([1, 2]))
        while kill_group_at(launcher.start(*command, cwd=tmp_path), rng.uniform(0.0, seconds)):
            killed += 1
        launcher.run(*command, cwd=tmp_path)
        assert files_of(work) == expected
        shutil.rmtree(work)
    launcher.close()
