"""Every command with wrong arguments: one error message, and no work is started."""

import os

from bad_input import Case, each, small

RECIPE_COMMANDS = ("run", "check", "curate", "tokenizer", "index", "train", "evaluate", "report", "plan", "layout")
WORKDIR_COMMANDS = ("run", "check", "curate", "tokenizer", "index", "train", "evaluate", "report", "plan")


def call(name, command, *words, code=2, **options):
    return Case(name, command, words, code=code, **options)


def with_file(folder):
    (folder / "taken").write_text("x")


def with_link(name):
    def make(folder):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).symlink_to("nowhere")

    return make


def with_pipe(name):
    """A named pipe: whoever opens it waits for a writer."""

    def make(folder):
        (folder / name).parent.mkdir(parents=True)
        os.mkfifo(folder / name)

    return make


CASES = [
    *[call(f"{name} of no recipe", f"{name} nowhere.yaml", "nowhere.yaml: no such recipe file") for name in RECIPE_COMMANDS],
    *[call(f"{name} of a name", f"{name} demoo", "no recipe 'demoo', did you mean 'demo'?") for name in RECIPE_COMMANDS],
    call("a workdir of nobody", "curate small.yaml --workdir ~no-such-user/w", "~no-such-user: no such user; write the whole path"),
    call("a workdir with a NUL", "curate small.yaml --workdir 'a\0b'", "contains a NUL character"),
    call("a workdir that is a link to nowhere", "curate small.yaml --workdir w", "w is a symbolic link that leads nowhere",
         make=lambda folder: (folder / "w").symlink_to("nowhere")),
    call("a workdir that is a loop of links", "curate small.yaml --workdir w", "w is a symbolic link that leads nowhere",
         make=lambda folder: (folder / "w").symlink_to("w")),
    call("a workdir of a long name", f"curate small.yaml --workdir {'x' * 300}", "the name is too long for the disk", code=1),
    call("a stage folder that is a link to nowhere", "curate small.yaml --workdir w", "w/curate: folder exists without a manifest",
         make=with_link("w/curate"), code=1),
    call("a stage folder that is a file", "curate small.yaml --workdir w", "w/curate: folder exists without a manifest",
         files={"w/curate": "x"}, code=1),
    *[
        call(f"{name} with a folder in a later stage's place", f"{name} small.yaml --workdir w", "w/train: folder exists without a manifest",
             files={"w/train/notes.txt": "mine"}, code=1)
        for name in ("run", "check")
    ],
    *[
        call(f"{name} with an --output that is {what}", f"{words} --output {output}", said, files={"taken": "x", "folder/a.txt": "x"})
        for name, words in (
            ("quality language-model", "quality language-model folder"),
            ("quality fit", "quality fit folder folder"),
            ("extractor fit", "extractor fit folder"),
            ("launch", "launch small.yaml --torchrun"),
            ("mix", "mix small.yaml"),
            ("generate", "generate --checkpoint w/train --prompts taken"),
        )
        for what, output, said in (
            ("a folder", "folder", "--output folder: a folder; name a file in it"),
            ("below a file", "taken/x", "--output taken/x: taken is a file; name a folder"),
        )
    ],
    call("a merge of no name", "data merge . --output o", ".: not the prefix of a dataset"),
    call("a prefix without a name", "data inspect ''", ".: not the prefix of a dataset"),
    call("a lock that is a pipe", "curate small.yaml --workdir w", "w/lock.json: not a file", make=with_pipe("w/lock.json"), code=1),
    call("a lock that is a folder", "curate small.yaml --workdir w", "w/lock.json: not a file", files={"w/lock.json/x": ""}, code=1),
    call("a lock of 200,000 brackets", "curate small.yaml --workdir w", "w/lock.json: not a lock (nested too deeply)",
         files={"w/lock.json": "[" * 200_000}, code=1),
    call("a lock of 6,000 digits", "curate small.yaml --workdir w", "w/lock.json: not a lock", files={"w/lock.json": '{"a": ' + "9" * 6000 + "}"}, code=1),
    call("a lease that is a pipe", "curate small.yaml --workdir w", "w/.lease: not a file", make=with_pipe("w/.lease"), code=1),
    call("a lease that is a folder", "curate small.yaml --workdir w", "w/.lease: not a file", files={"w/.lease/x": ""}, code=1),
    call("a cache that is a file", "curate small.yaml --workdir w", "a file exists where a folder is needed", files={"w/cache": "x"}, code=1),
    call("a manifest of 200,000 brackets", "verify w", "not a manifest (nested too deeply)",
         files={"w/curate/manifest.json": "[" * 200_000}, code=1),
    call("a manifest that is a folder", "curate small.yaml --workdir w", "folder exists without a manifest",
         files={"w/curate/manifest.json/x": ""}, code=1),
    *[
        call(f"decide with {name}", f"decide small.yaml --sweep text.min_chars=1:9:3 --workdir {folder}", said, make=with_file)
        for name, folder, said in (
            ("an empty workdir", "''", "--workdir is empty"),
            ("a workdir that is a file", "taken", "taken is a file; name a folder"),
            ("a workdir below a file", "taken/x/y", "taken is a file; name a folder"),
        )
    ],
    call("decide of a name", "decide demoo --sweep a=1:2:3", "did you mean 'demo'?"),
    *[
        call(f"{name} with a workdir that is a file", f"{name} small.yaml --workdir taken", "taken is a file; name a folder",
             make=with_file)
        for name in WORKDIR_COMMANDS if name != "plan"
    ],
    call("workdir below a file", "run small.yaml --workdir taken/x/y", "taken is a file; name a folder", make=with_file),
    *[call(f"{name} with an empty workdir", f"{name} small.yaml --workdir ''", "--workdir is empty") for name in WORKDIR_COMMANDS],
    *[
        call(f"{name} with {option}", f"{name} small.yaml {option}", option.split()[0])
        for name in ("run", "curate", "index")
        for option in ("--workers 0", "--workers -1", "--workers 1e9", "--workers 1000000000", "--workers two")
    ],
    call("no command", "grind", "No such command"),
    call("an option that is not there", "run small.yaml --worker 2", "No such option"),
    call("no recipe", "run", "Missing argument"),
    call("two recipes", "run a.yaml b.yaml", "unexpected extra argument"),
    call("run to no stage", "run small.yaml --to trian", "--to trian: unknown stage; the stages are curate, tokenizer"),
    call("check to no stage", "check small.yaml --to trian", "unknown stage"),
    call("check on no process", "check small.yaml --processes 0", "--processes"),
    call("check on a billion processes", "check small.yaml --processes 1000000000", "--processes"),
    call("a recipe that is a folder", "run raw.yaml", "no such recipe file", make=lambda folder: (folder / "raw.yaml").mkdir()),
    call("markup in an argument", "run ':100:[bold].yaml'", ":100:[bold].yaml: no such recipe file"),
    call("markup in a recipe", "check bad.yaml", ":100:[bold]x", files={"bad.yaml": small("train.tokens: ':100:[bold]x'")}),
    *[
        call(f"{name} needs training", f"{name} short.yaml", "the sections `model` and `train` are missing",
             files={"short.yaml": small("model: -", "train: -")})
        for name in ("train", "evaluate", "layout", "run --to train", "check --to report")
    ],
    *[
        call(f"{name} without {section}", f"{name} short.yaml", f"the section `{section}` is missing",
             files={"short.yaml": small(f"{section}: -")})
        for name in ("run", "check", "plan", "train")
        for section in ("model", "train")
    ],
    call("sweep without a rule", "decide small.yaml --sweep x", "'x' is not a sweep; write rule=low:high:n"),
    call("sweep of nothing", "decide small.yaml --sweep gopher_quality.min_words=1:2:0", "is not a sweep"),
    call("sweep of 10^8", "decide small.yaml --sweep gopher_quality.min_words=1:2:100000000", "the maximum is 1,000"),
    call("sweep of 5,000 digits", f"decide small.yaml --sweep a=1:2:{'9' * 5000}", "the maximum is 1,000"),
    call("sweep to infinity", "decide small.yaml --sweep gopher_quality.min_words=1:inf:3", "is not a sweep"),
    call("sweep of no number", "decide small.yaml --sweep gopher_quality.min_words=a:b:3", "is not a sweep"),
    call("no sweep", "decide small.yaml", "Missing option"),
    call("evaluate without anything", "evaluate", "give a RECIPE, or --checkpoint"),
    call("evaluate with both", "evaluate small.yaml --checkpoint x", "give a RECIPE, or --checkpoint"),
    call("evaluate without tasks", "evaluate --checkpoint x", "--tasks needs names"),
    call("evaluate with no limit", "evaluate --checkpoint x --tasks cloze --limit 0", "--limit"),
    call("evaluate with fewer shots than none", "evaluate --checkpoint x --tasks cloze --num-fewshot -1", "--num-fewshot"),
    call("evaluate in another precision", "evaluate --checkpoint x --tasks cloze --precision fp8", "precision", "'fp32' or 'bf16'"),
    call("weights that lie elsewhere", "evaluate --checkpoint x --tasks cloze --offload-parameters gpu", "offload_parameters", "'none', 'host' or 'disk'"),
    call("quantized weights on disk", "evaluate --checkpoint x --tasks cloze --offload-parameters disk --quantization int8", "streams full-precision weights, not int8"),
    call("evaluate with other weights", "evaluate --checkpoint x --tasks cloze --quantization int3", "quantization", "'none', 'int8', 'int4' or 'smoothquant'"),
    call("evaluate on no rank", "evaluate --checkpoint x --tasks cloze --tensor 0", "--tensor"),
    call("generate without a prompt", "generate --checkpoint x", "give --prompt TEXT, or --prompts FILE"),
    call("generate from both", "generate --checkpoint x --prompt x --prompts raw/notes.txt", "give --prompt TEXT, or --prompts FILE"),
    call("generate to no file", "generate --checkpoint x --prompts raw/notes.txt", "--prompts needs --output FILE"),
    call("generate a prompt to a file", "generate --checkpoint x --prompt x --output y", "--output is for --prompts"),
    call("generate from no file", "generate --checkpoint x --prompts nowhere --output y", "nowhere: no such file", code=1),
    call("generate from an empty file", "generate --checkpoint x --prompts p --output y", "p: has no record", code=1, files={"p": "\n\n"}),
    call("generate to a file that exists", "generate --checkpoint x --prompts raw/notes.txt --output small.yaml", "small.yaml: exists"),
    call("generate with too high min-p", "generate --checkpoint x --prompt x --min-p 2", "--min-p"),
    call("generate from an empty prompt", "generate --checkpoint x --prompt ''", "--prompt is empty"),
    call("generate from no checkpoint", "generate --checkpoint nowhere --prompt x", "no such folder", code=1),
    call("generate with a seed below 0", "generate --checkpoint x --prompt x --seed -5", "seed", "greater than or equal to 0"),
    call("generate with a huge seed", f"generate --checkpoint x --prompt x --seed {2**64}", "seed", "less than"),
    call("generate no tokens", "generate --checkpoint x --prompt x --tokens 0", "--tokens"),
    call("generate at a temperature below 0", "generate --checkpoint x --prompt x --temperature -1", "--temperature"),
    call("generate with too high top-p", "generate --checkpoint x --prompt x --top-p 2", "--top-p"),
    call("generate with no top-p", "generate --checkpoint x --prompt x --top-p 0", "top_p", "greater than 0"),
    call("generate with no penalty", "generate --checkpoint x --prompt x --repetition-penalty 0", "repetition_penalty"),
    call("generate at infinite temperature", "generate --checkpoint x --prompt x --temperature inf", "temperature", "finite"),
    call("serve no checkpoint", "serve --checkpoint nowhere --port 0", "nowhere: no such folder", code=1),
    call("serve to everybody", "serve --checkpoint x --host 0.0.0.0", "set a token in GRISTMILL_API_TOKEN"),
    call("serve on a port beyond", "serve --checkpoint x --port 70000", "--port"),
    call("serve on no host", "serve --checkpoint x --host 'no host' --token-file raw/notes.txt", "spaces"),
    call("serve with no token file", "serve --checkpoint x --token-file nowhere", "nowhere: cannot be read", code=1),
    call("serve in another precision", "serve --checkpoint x --precision fp8", "precision"),
    call("export in another precision", "export --checkpoint x --output y --precision fp8", "--precision fp8: choose one of"),
    call("export without a folder", "export --checkpoint x", "Missing option"),
    call("why of no id", "why xyz --corpus raw", "xyz"),
    call("why of no corpus", f"why {'0' * 32} --corpus raw", "no ledger here", code=1),
    call("verify of nothing", "verify raw", "nothing to verify", code=1),
    call("verify of no folder", "verify nowhere", "nothing to verify", code=1),
    call("reproduce of no manifest", "reproduce raw", "no manifest.json", code=1),
    call("similar to no file", "similar --corpus raw --text nowhere.txt", "nowhere.txt: cannot be read", code=1),
    call("similar to no text", "similar --corpus raw --text bad.txt", "bad.txt: cannot be read", code=1,
         files={"bad.txt": b"\xff\xfe\xfa"}),
    call("layout of nothing", "layout", "takes a RECIPE or --model"),
    call("layout of both", "layout small.yaml --model gpt-1t --gpus 8", "takes a RECIPE or --model"),
    call("layout without gpus", "layout --model gpt-1t", "give --gpus N"),
    call("layout on 1e9 gpus", "layout --model gpt-1t --gpus 1e9", "--gpus"),
    call("layout on a billion gpus", "layout --model gpt-1t --gpus 1000000000", "--gpus"),
    call("layout on no gpus", "layout --model gpt-1t --gpus 0", "at least one GPU"),
    call("layout of no model", "layout --model gpt-2t --gpus 8", "gpt-2t"),
    call("layout on no hardware", "layout --model gpt-1t --gpus 8 --hardware h10", "did you mean h100?"),
    call("layout of another program", "layout --model gpt-1t --gpus 8 --framework megatron", "--framework megatron: no such framework"),
    call("layout of no schedule", "layout --model gpt-1t --gpus 8 --schedule 2f2b", "--schedule 2f2b: it is one of gpipe"),
    call("layout of no recomputation", "layout --model gpt-1t --gpus 8 --recompute all", "--recompute all: it is one of none"),
    call("layout of no batch", "layout --model gpt-1t --gpus 8 --batch-tokens many", "many: not a number; write 4000000, 4M"),
    call("layout of no rank", "layout --model gpt-1t --gpus 8 --tensor 0", "--tensor"),
    call("inspect of nothing", "data inspect nowhere", "nowhere", code=1),
    call("merge of nothing", "data merge nowhere --output x", "nowhere", code=1),
    call("signatures of nothing", "signatures merge nowhere --output x", "nowhere", code=1),
    call("tokenizer without a recipe", "tokenizer", "Missing argument"),
    call("tokenizer compare of nothing", "tokenizer compare nowhere", "nowhere: no such file or folder", code=1),
    call("tokenizer compare without texts", "tokenizer compare", "Missing argument"),
    call("compare of nothing", "compare nowhere elsewhere", "nowhere", code=1),
    call("import of nothing", "import nowhere --output x", "nowhere", code=1),
    call("explore of nothing", "explore nowhere --sql 'select 1'", "nowhere", code=1),
]  # fmt: skip


@each(CASES)
def test_commands(case, expect_error):
    expect_error(case)
