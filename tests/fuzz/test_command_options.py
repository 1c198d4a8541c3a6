"""Commands of a complete work folder with random options and values. The law: a command succeeds or ends with a
message and an exit code of main; never with a traceback, by a signal, or without an end."""

import random
import shutil
from collections.abc import Iterator

import pytest
import typer
from kills import Launcher, write_corpus

from gristmill.foundation.manifest import MANIFEST_NAME
from gristmill.pipelines.cli import commands

SEED, COMMANDS = 20_261_129, 600
RUN = "tiny.yaml --workdir w"
# What each command needs; those that serve, ask, or measure for minutes are not here.
BASE = {
    "check": "tiny.yaml",
    "plan": RUN,
    "run": f"{RUN} --to index",
    "curate": RUN,
    "tokenizer stage": RUN,
    "tokenizer inspect": "w/tokenizer",
    "index": RUN,
    "train": RUN,
    "evaluate": RUN,
    "report": RUN,
    "launch": "tiny.yaml --torchrun --processes 1",
    "runs": "",
    "explain": "w",
    "generate": "--checkpoint w/train --prompt a --tokens 4",
    "export": "--checkpoint w/train --output out",
    "import": "w/train --output out",
    "compare": "w/evaluate w/evaluate",
    "verify": "w/curate",
    "reproduce": f"w/curate/{MANIFEST_NAME}",
    "why": "0 --corpus w/curate",
    "decide": RUN,
    "trace": f"{RUN} --step 3",
    "summary": "w",
    "forget": "w",
    "explore": "w/curate",
    "similar": "--corpus w/curate --text a",
    "data inspect": "w/index/train/plain",
    "data slice": "w/index/train/plain --output out",
    "data merge": "w/index/train/plain --output out",
    "data packing": "w/index --sequence-length 16",
    "profiles fit": "--output out",
    "quality fit": "raw raw --output out.safetensors",
    "quality language-model": "raw --output out.safetensors",
    "signatures merge": "w/curate --output out",
    "layout": "tiny.yaml",
    "schema": "",
}
BLOCKING = ("--web", "--open", "--submit")
NUMBERS = ["0", "-1", "1", "0.5", "nan", "inf", "-inf", "1e999", "100000", "99999999999999999999", "1/0"]
WORDS = ["", "x", "é", "=", "a=b", "a,b,,", ",", "1:2:3", "*", "[", "%s", "\u202e", '{"a":1}', "--help"]
PLACES = ["..", ".", "/dev/null", "w", "tiny.yaml", "no/where", "hf://a/b", "plain", "plain=2"]
FIELDS = ["train.tokens=0", "model.width=3", "sources=[]", "curate.near_dedup=x"]
VALUES = NUMBERS + WORDS + PLACES + FIELDS


def leaves(command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, object]]:
    for name, inner in getattr(command, "commands", {}).items():
        yield from leaves(inner, (*path, name))
    yield " ".join(path), command


def arguments(rng: random.Random, name: str, command) -> list[str]:
    words = [*name.removesuffix(" stage").split(), *BASE[name].split()]
    options = [option for option in command.params if option.param_type_name == "option"]
    for option in rng.sample(options, min(len(options), rng.choice([1, 1, 2, 3]))):
        if not set(option.opts) & {*BLOCKING, "--workdir", "--help"}:
            words += [option.opts[0]] if option.is_flag else [option.opts[0], rng.choice(VALUES)]
    if rng.random() < 0.15 and len(words) > 2:
        words[rng.randrange(len(name.split()), len(words))] = rng.choice(VALUES)
    return words


@pytest.mark.slow
def test_no_option_ends_in_a_traceback(tmp_path):
    """600 commands, five minutes."""
    whole = tmp_path / "whole"
    write_corpus(whole / "raw").rename(whole / "tiny.yaml")
    known = dict(leaves(typer.main.get_command(commands.app)))
    launcher, rng, faults = Launcher(tmp_path / "launcher"), random.Random(SEED), []
    try:
        launcher.run("run", "tiny.yaml", "--workdir", "w", cwd=whole)
        for number in range(COMMANDS):
            name = rng.choice(list(BASE))
            words = arguments(rng, name, known[name])
            folder = tmp_path / str(number)
            shutil.copytree(whole, folder)
            run = launcher.start(*words, cwd=folder)
            code = run.finish()
            if code not in (0, 1, 2) or "Traceback" in run.output():
                faults.append((words, code, run.output()[-1500:]))
            shutil.rmtree(folder)
    finally:
        launcher.close()
    assert not faults, f"{len(faults)} of {COMMANDS} commands, such as {faults[:3]}"
