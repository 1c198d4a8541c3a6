"""Runs the command line and kills it with SIGKILL at random moments until a run succeeds.

The seed is printed by each test that draws moments; GRISTMILL_KILL_SEED sets it, GRISTMILL_KILLS their number."""

import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from gristmill.foundation.files import file_digest
from gristmill.foundation.manifest import CACHE_FOLDER
from gristmill.pipelines.workdir.remote import LEASE_NAME

LAUNCHER = Path(__file__).parent / "warm_launcher.py"
STUCK_SECONDS = 300  # a run that says nothing for so long hangs, which is a failure; a tiny one takes a tenth of it
STUCK_TIMES = 4  # the most that any run may take, in STUCK_SECONDS


def seed_of(default: int) -> int:
    """The seed of a test's moments, printed so that a failure can be repeated."""
    seed = int(os.environ.get("GRISTMILL_KILL_SEED", default))
    print(f"GRISTMILL_KILL_SEED={seed}")
    return seed


def number_of_kills(default: int) -> int:
    return int(os.environ.get("GRISTMILL_KILLS", default))


@dataclass
class Run:
    """One run under way. `pid` leads a process group of its own."""

    launcher: "Launcher"
    pid: int
    log: Path

    def finish(self) -> int:
        """The exit code, or minus the signal, once it has ended. Raises TimeoutError if it hangs."""
        return self.launcher.wait(self)

    def running(self) -> bool:
        return not self.launcher.answered()

    def workers(self) -> list[int]:
        """Process ids of its worker processes."""
        try:
            children = psutil.Process(self.pid).children()
            return [child.pid for child in children if "resource_tracker" not in " ".join(child.cmdline())]
        except psutil.Error:
            return []

    def kill_group(self) -> None:
        with suppress(ProcessLookupError):  # it ended at this moment
            os.killpg(self.pid, signal.SIGKILL)

    def send(self, number: int) -> None:
        """The signal to every process of the group, as a terminal sends Ctrl-C."""
        os.killpg(self.pid, number)

    def check_message(self) -> None:
        """Fails the test unless the run succeeded, or printed one error message about a killed worker with the fix."""
        code, said = self.finish(), self.output()
        assert code in (0, 1), f"exit code {code}; its log:\n{said}"
        assert "Traceback" not in said, said
        assert code == 0 or "--workers" in said, said

    def output(self) -> str:
        return self.log.read_text("utf-8", "replace")


class Launcher:
    """Starts runs, one at a time, as forks of a process that has all modules loaded (see warm_launcher.py)."""

    def __init__(self, folder: Path, preload: Path | None = None, modules: Sequence[str] = ()):
        """preload: a library for LD_PRELOAD. modules: imported before the first fork; those of all stages for none."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.count = folder, 0
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        environment |= {} if preload is None else {"LD_PRELOAD": str(preload)}
        self.process = subprocess.Popen(
            [sys.executable, str(LAUNCHER), *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            bufsize=0,
        )
        os.set_blocking(self.process.stdout.fileno(), True)

    def start(
        self,
        *arguments: object,
        cwd: Path,
        arm: Sequence[object] = (),
        memory: int | None = None,
        **calls: Sequence[object],
    ) -> Run:
        self.count += 1
        log = self.folder / f"{self.count:05d}.log"
        order = {"arguments": [str(argument) for argument in arguments], "cwd": str(cwd), "log": str(log)}
        order |= {"arm": list(arm)} if arm else {}
        order |= {name: list(map(str, values)) for name, values in calls.items() if values}
        order |= {} if memory is None else {"memory": memory}
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        return Run(self, json.loads(self.process.stdout.readline())["pid"], log)

    def answered(self, seconds: float = 0.0) -> bool:
        poll = select.poll()  # select refuses descriptors above 1023
        poll.register(self.process.stdout, select.POLLIN | select.POLLHUP)
        return bool(poll.poll(seconds * 1000))

    def wait(self, run: Run) -> int:
        said = ""
        for _ in range(STUCK_TIMES):
            if self.answered(STUCK_SECONDS) or said == run.output():
                break
            said = run.output()
        if not self.answered():
            run.kill_group()
            raise TimeoutError(f"hangs; its log:\n{run.output()}")
        return os.waitstatus_to_exitcode(json.loads(self.process.stdout.readline())["status"])

    def run(self, *arguments: object, cwd: Path) -> tuple[str, float]:
        """(output, seconds) of an undisturbed run. Fails the test if it does not exit with 0."""
        started = time.monotonic()
        run = self.start(*arguments, cwd=cwd)
        code = run.finish()
        assert code == 0, f"exit code {code}; its log:\n{run.output()}"
        return run.output(), time.monotonic() - started

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def kill_group_at(run: Run, moment: float) -> bool:
    """SIGKILL to all processes of the run; False if it had ended by then."""
    if run.launcher.answered(moment):
        run.check_message()
        return False
    run.kill_group()
    return run.finish() == -signal.SIGKILL


def kill_worker_at(run: Run, moment: float, rng: random.Random) -> bool:
    """SIGKILL to one worker, `moment` seconds after the first of them started.

    The run must end with a sentence, or go on to its end. False if it ended before a worker was killed."""
    while run.running() and not run.workers():
        time.sleep(0.005)
    run.launcher.answered(moment)
    while run.running():
        if workers := run.workers():
            try:
                os.kill(rng.choice(workers), signal.SIGKILL)
            except ProcessLookupError:
                continue
            run.check_message()
            return True
        time.sleep(0.002)
    run.check_message()
    return False


def files_of(folder: Path, left_out: Sequence[str] = ("logs",)) -> dict[str, str]:
    """Relative name -> digest of every file, hidden ones too, that is under no folder called as in left_out. Left out
    are the lease, which names the process that wrote last, and checksum files, which remember inodes and times."""
    return {
        path.relative_to(folder).as_posix(): file_digest(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and path.name != LEASE_NAME
        and path.suffix != ".seal"
        and not set(left_out) & set(path.relative_to(folder).parts[:-1])
        and CACHE_FOLDER not in path.relative_to(folder).parts[1:-1]  # of a stage: it remembers inodes and times
    }


def orphans_of(group: int) -> list[int]:
    """Process ids of the run's process group that still exist."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (psutil.Error, ProcessLookupError):
            continue
    return found


RECIPE = """\
name: tiny
seed: 7
sources:
  - {{name: good, format: jsonl, paths: ["{folder}/good*.jsonl"], weight: 0.6, priority: 1}}
  - {{name: plain, format: jsonl, paths: ["{folder}/plain*.jsonl"], weight: 0.4, priority: 2}}
curate:
  splits: {{validation: 0.1, test: 0.15}}
  language_id: null
  filters: [{{gopher_quality: {{min_words: 20, min_stop_words: null}}}}]
  quality: {{positive: [good], negative: [plain], features: 1024, keep: quantile, value: 0.9}}
  near_dedup: {{keep_signatures: true}}
  span_dedup: [{{unit: paragraph}}, {{unit: line}}]
  substring_dedup: {{min_bytes: 60}}
  decontaminate:
    benchmarks: [{{name: held, paths: ["{folder}/held.jsonl"], fields: [text]}}]
    margin: 10
    min_piece_characters: 20
tokenizer: {{vocab_size: 400, sample_bytes: 100k}}
model: {{layers: 2, width: 32, heads: 2, kv_heads: 1, sequence_length: 64, init_std: 0.1}}
train:
  tokens: 8192
  batch_tokens: 512
  precision: fp32
  optimizer: {{learning_rate: 1e-2}}
  validation: {{every: 8, samples: 4}}
  checkpoint: {{every: 4}}
evaluate: {{tasks: [bits_per_byte], text_bytes: 5000, num_continuations: 1, continuation_tokens: 4}}
"""
VOCABULARY = {
    "good": "the miller ground grain between two stones and the flour of the day was sold by weight in sacks",
    "plain": "a wheel of the mill was turned by water that came down to the town from hills in the north",
}


def write_corpus(folder: Path) -> Path:
    """Two sources of 90 documents in two files each, with copies, near copies, repeated paragraphs and lines, and a
    benchmark that is quoted in some of them; beside it the recipe, whose path is returned."""
    rng = random.Random(5)
    folder.mkdir(parents=True, exist_ok=True)
    held = [sentence(rng, "good", 20) for _ in range(5)]
    (folder / "held.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in held))
    shared = [sentence(rng, "plain", 25) for _ in range(4)]
    for source in VOCABULARY:
        texts: list[str] = []
        for number in range(90):
            paragraphs = [sentence(rng, source, 30) for _ in range(3)]
            if number % 7 == 0:
                paragraphs.insert(1, shared[number % 4])
            if number % 11 == 0:
                paragraphs.append("\n".join([shared[0][:80], sentence(rng, source, 12)]))
            if number % 13 == 5:
                paragraphs.append(held[number % 5])
            texts.append("\n\n".join(paragraphs))
            if number % 10 == 3:
                texts[-1] = texts[-2] if number % 20 == 3 else texts[-2] + " again"
        for part in range(2):
            lines = [json.dumps({"text": text}) for text in texts[part::2]]
            (folder / f"{source}{part}.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "tiny.yaml").write_text(RECIPE.format(folder=folder))
    return folder / "tiny.yaml"


SMALL_SOURCES = 20  # which are one batch (data_pipeline/annotate/source_groups.py)


def write_small_sources(folder: Path) -> Path:
    """Twenty sources of four documents, with copies and near copies across sources, a paragraph that all have, and a
    quoted benchmark; beside it the recipe of `write_corpus` with these sources and without the quality model, which
    looks at each source by itself."""
    rng = random.Random(6)
    folder.mkdir(parents=True, exist_ok=True)
    held = [sentence(rng, "good", 20) for _ in range(5)]
    (folder / "held.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in held))
    common, before, entries = sentence(rng, "plain", 25), "", []
    for number in range(SMALL_SOURCES):
        texts = ["\n\n".join(sentence(rng, "good", 30) for _ in range(3)) for _ in range(4)]
        texts[0] += f"\n\n{common}"
        if number % 3 == 1:
            texts[1] = before if number % 2 else f"{before} again"
        if number % 5 == 2:
            texts[2] += f"\n\n{held[number % 5]}"
        before = texts[3]
        path = folder / f"small{number:02d}.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        entries.append(f'  - {{name: {path.stem}, format: jsonl, paths: ["{path}"]}}')
    recipe = RECIPE.format(folder=folder).splitlines()
    first = recipe.index("sources:") + 1
    recipe[first : first + len(VOCABULARY)] = entries
    lines = [line for line in recipe if not line.startswith("  quality:")]
    (folder / "small.yaml").write_text("\n".join(lines) + "\n")
    return folder / "small.yaml"


def sentence(rng: random.Random, source: str, words: int) -> str:
    vocabulary = VOCABULARY[source].split()
    return " ".join(f"{rng.choice(vocabulary)}{rng.choice(['', '', rng.randrange(30)])}" for _ in range(words)) + "."
