"""Bits per byte over several tasks: all sources or languages, and the languages of each script."""

from collections.abc import Mapping, Sequence

from gristmill.evaluation.results.standard_errors import LN2, bits_per_byte
from gristmill.evaluation.results.statistics import ratio_error
from gristmill.evaluation.tasks.corpus_task_configs import BITS_PER_BYTE
from gristmill.evaluation.tasks.harness import Results
from gristmill.evaluation.tasks.language_names import LANGUAGE_AND_SCRIPT


def add_groups(results: Results, unigram: Mapping[str, Sequence[float]], group_by: str) -> None:
    """Adds lm-eval groups: over all sources or languages, and by language one for each script of several languages."""
    names = [name for name in results.samples if name.startswith(f"{BITS_PER_BYTE}_") and name in unigram]
    if group_by == "language":
        scripts: dict[str, list[str]] = {}
        for name in names:
            if found := LANGUAGE_AND_SCRIPT.fullmatch(name):
                scripts.setdefault(found["script"], []).append(name)
        for script, of_script in sorted(scripts.items(), reverse=True):
            _add_group(results, f"{BITS_PER_BYTE}_script_{script}", f"{BITS_PER_BYTE} (script {script})", of_script)
    _add_group(results, BITS_PER_BYTE, f"{BITS_PER_BYTE} (all {group_by}s)", names)


def _add_group(results: Results, group: str, alias: str, names: list[str]) -> None:
    """Summed bits over summed bytes; no group of a single task."""
    if len(names) < 2:
        return
    pairs = [sample[BITS_PER_BYTE] for name in names for sample in results.samples[name]]
    bits, sizes = [-pair[0] / LN2 for pair in pairs], [pair[1] for pair in pairs]
    summary = results.summary
    result = {
        "name": group,
        "alias": alias,
        "sample_len": len(pairs),
        f"{BITS_PER_BYTE},none": bits_per_byte(pairs),
        f"{BITS_PER_BYTE}_stderr,none": ratio_error(bits, sizes),
    }
    summary["results"] = {group: result, **summary["results"]}
    summary.setdefault("groups", {})[group] = result
    summary["group_subtasks"][group] = names
    summary["higher_is_better"][group] = {BITS_PER_BYTE: False}
    summary["n-shot"][group] = 0
