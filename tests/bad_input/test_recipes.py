"""Recipes with invalid fields: an error with file, line, field and fix before any work."""

from bad_input import Case, each, small

from gristmill.pipelines.recipes.recipe_file import RENAMED_FIELDS


def wrong(change, *words):
    """The recipe small with one field changed; the message names the file and the field. An unknown value's field may
    stand in a section that is read as a whole."""
    return Case(change, "check small.yaml", ("small.yaml:", *words), files={"small.yaml": small(change)})


def field(change, *words):
    return wrong(change, f"{change.partition(': ')[0]}:", *words)


INTEGER, NUMBER, TEXT, LIST = "valid integer", "valid number", "valid string", "a list"
BOOLEAN = "is not a valid value here"
LARGE, SMALL = "less than or equal to", "greater than or equal to"

TYPES = [
    field(f"{name}: {value}", words)
    for name in (
        "seed",
        "model.layers",
        "model.width",
        "model.heads",
        "model.sequence_length",
        "train.tokens",
        "train.batch_tokens",
        "tokenizer.vocab_size",
        "tokenizer.sample_bytes",
        "curate.shard_bytes",
        "sources.0.priority",
    )
    for value, words in (
        ("many", INTEGER),
        ("true", BOOLEAN),
        ("1.5", INTEGER),
        ("[1]", INTEGER),
        ("-1", "greater than"),
    )
    if not (name == "seed" and value != "true" and value != "-1")
]
NUMBERS = [
    field(f"{name}: {value}", words)
    for name in ("sources.0.weight", "model.norm_epsilon", "model.dropout", "train.z_loss", "curate.splits.test")
    for value, words in (
        ("much", NUMBER),
        ("false", BOOLEAN),
        (".inf", "finite"),
        (".nan", "finite"),
        ("-2", "greater"),
    )
]
HUGE = [
    field(f"{name}: 9e{power}", LARGE)
    for name, power in (
        ("model.layers", 9),
        ("model.width", 9),
        ("model.heads", 9),
        ("model.kv_heads", 9),
        ("model.ffn_hidden_size", 9),
        ("model.sequence_length", 12),
        ("train.tokens", 18),
        ("train.batch_tokens", 15),
        ("tokenizer.vocab_size", 12),
    )
] + [
    wrong(f"train.layout: {{{axis}: 1e9}}", f"train.layout.{axis}:", LARGE)
    for axis in ("data", "replicate", "tensor", "pipeline", "context", "virtual_stages")
]
CHOICES = [
    field("sources.0.format: jsnl", "'jsonl'?"),
    field("sources.0.format: 7", "should be"),
    field("sources.0.record: lines", "'line'?"),
    field("sources.0.extractor: trafilature", "'trafilatura'?"),
    field("curate.word_tokenizer: unicod", "'unicode'?"),
    field("tokenizer.algorithm: bpee", "'bpe'?"),
    field("tokenizer.preset: defualt", "'default'?"),
    field("tokenizer.group_by: lang", "'source' or 'language'"),
    wrong("model.mixer: mamba", "model.mixer", "did you mean 'mamba2'?", "attention"),
    wrong("model.mixer: [attention, mamba]", "model.mixer", "did you mean 'mamba2'?"),
    wrong("model.mixers: {mamba3: {}}", "model.mixers", "did you mean 'mamba2'?"),
    wrong("model.mixers: {mamba2: {chunks: 8}}", "model.mixers", "mamba2.chunks: unknown field", "'chunk'?"),
    wrong("model.mixers: [mamba2]", "model.mixers", "mapping of fields"),
    wrong("model.pattern: M-M", "pattern has 3 layers", "set layers: 3"),
    wrong(
        "model.mlp: elu", "model.mlp", "'swiglu', 'geglu', 'gelu', 'relu', 'relu2' or 'none'", "did you mean 'relu'?"
    ),
    wrong("model.norm_order: before", "model.norm_order", "'pre', 'post', 'output' or 'sandwich'"),
    field("model.norm: rms", "'rmsnorm'?"),
    field("model.positions: rotary", "'rope'"),
    field("model.init_method: xavier", "'scaled', 'normal' or 'mup'"),
    field("train.precision: bfloat16", "'bf16'"),
    wrong("train.optimizer: {name: adam}", "train.optimizer.name", "'adamw'?"),
    wrong("train.lr_schedule: {shape: cosin}", "train.lr_schedule.shape", "'cosine'?"),
    wrong("train.layout: {pipeline_schedule: 1f2b}", "train.layout.pipeline_schedule", "'1f1b'?"),
    wrong("train.layout: {recompute: all}", "train.layout.recompute", "'none', 'full'"),
    wrong("train.layout: {offload: {optimizer: gpu}}", "train.layout.offload.optimizer", "'none'"),
    wrong("index: {packing: best}", "index.packing", "'best_fit'?"),
    wrong("evaluate: {precision: fp8}", "evaluate.precision", "'fp32' or 'bf16'"),
    wrong("curate.pii: {email: remove}", "curate.pii.email", "'replace'"),
    wrong("curate.near_dedup: {unit: words}", "curate.near_dedup.unit", "'word'?"),
    wrong("curate.near_dedup: {scope: sources}", "curate.near_dedup.scope", "'source'?"),
    wrong("curate.span_dedup: {unit: page}", "curate.span_dedup.unit", "'paragraph' or 'line'"),
    wrong("curate.decontaminate: {tasks: [x], policy: cut}", "curate.decontaminate.policy", "'split', 'drop'"),
    wrong("curate.quality: {positive: [a], negative: [b], keep: best}", "curate.quality.keep", "'threshold'"),
]
UNKNOWN = (
    [
        field(f"{wrong_name}: 1", "unknown field", f"did you mean '{right}'?")
        for wrong_name, right in (
            ("seeds", "seed"),
            ("sorces", "sources"),
            ("sources.0.path", "paths"),
            ("sources.0.wieght", "weight"),
            ("sources.0.textfield", "text_field"),
            ("curate.filter", "filters"),
            ("curate.neardedup", "near_dedup"),
            ("curate.splits.valid", "validation"),
            ("tokenizer.vocab_sizes", "vocab_size"),
            ("model.layer", "layers"),
            ("model.head", "heads"),
            ("train.token", "tokens"),
            ("train.batch_token", "batch_tokens"),
            ("train.validation.evry", "every"),
        )
    ]
    + [
        field(f"{path}: 1", f"this field is called {new} now")
        for path, new in RENAMED_FIELDS.items()
        if "dedup" not in path
    ]
    + [field("workdir: 1", "no field of a recipe; give the command --workdir instead")]
    + [
        wrong(f"{section}: {{{wrong_name}: 1}}", f"{section}.{wrong_name}: unknown field", f"'{right}'")
        for section, wrong_name, right in (
            ("index", "pack", "packing"),
            ("evaluate", "task", "tasks"),
            ("train.layout", "tensors", "tensor"),
            ("train.optimizer", "lr_rate", "learning_rate"),
            ("train.lr_schedule", "warmup", "warmup_share"),
            ("train.checkpoint", "keep", "keep_last"),
            ("train.guard", "sigma", "sigmas"),
            ("train.monitoring", "timeout", "timeout_seconds"),
            ("curate.language_id", "treshold", "threshold"),
            ("curate.normalize", "nf", "nfc"),
            ("curate.lists", "badword", "badwords"),
        )
    ]
)
SHAPES = [
    field("name: ''", "pattern"),
    field("name: a/b", "pattern"),
    field("name: ../up", "pattern"),
    field("name: 7", TEXT),
    field("name: null", TEXT),
    field("name: [a]", TEXT),
    field("name: -", "missing"),
    field("sources: -", "missing"),
    field("sources: []", "at least 1 item"),
    field("sources: web", LIST),
    field("sources: {name: x}", LIST),
    wrong("sources: [web]", "sources.0", "mapping of fields"),
    field("sources.0.name: -", "missing"),
    field("sources.0.format: -", "missing"),
    field("sources.0.name: Web Text", "pattern"),
    field("sources.0.paths: raw/x.txt", LIST),
    wrong("sources.0.paths: []", "no paths"),
    field("sources.0.paths: ['']", "an empty path"),
    field("sources.0.paths: [raw, ' ']", "an empty path"),
    wrong("sources.0.paths: [7]", "sources.0.paths.0", TEXT),
    field("sources.0.encoding: utf-99", "unknown encoding 'utf-99'", "did you mean 'utf-"),
    field("sources.0.encoding: base64", "unknown encoding 'base64'"),
    field("sources.0.encoding: ''", "unknown encoding"),
    field("sources.0.metadata_fields: 7", "a list, or 'all' or 'none'"),
    wrong("sources.0.metadata_fields: [1]", "sources.0.metadata_fields.0", TEXT),
    wrong("sources.0.filters: [gopher]", "no filter 'gopher'; did you mean 'gopher_quality'?"),
    wrong("sources.0.filters: [gopher_quality, gopher_quality]", "named twice"),
    field("sources.0.filters: 3", LIST),
    wrong("sources.0: {name: s, format: python_docs}", "needs part: prose or part: code"),
    wrong("sources.0: {name: s, format: python_docs, part: code, paths: [x]}", "remove paths"),
    wrong("sources.0: {name: s, format: datasets, paths: [a, b]}", "takes one path"),
    field("curate: []", "mapping of fields"),
    field("curate: 1", "mapping of fields"),
    field("curate.languages: [english]", "no language has the code 'english'"),
    field("curate.languages: [xx]", "no language has the code 'xx'"),
    field("curate.languages: [en, d]", "no language has the code 'd'"),
    field("curate.languages: en", LIST),
    wrong("curate.languages: [no, true]", "languages", BOOLEAN),
    wrong("curate: {languages: [en], language_id: null}", "leave language_id out"),
    wrong("curate.language_id: {threshold: 2}", "curate.language_id.threshold", LARGE),
    wrong("curate.filters: [{gopher_quality: {min_word: 5}}]", "did you mean 'min_words'?"),
    wrong("curate.filters: [{gopher_quality: {min_words: x}}]", "min_words", NUMBER),
    wrong("curate.filters: [{gopher_quality: {min_words: true}}]", BOOLEAN),
    wrong("curate.filters: [{gopher_quality: {min_words: .inf}}]", "finite"),
    wrong("curate.filters: [7]", "curate.filters"),
    wrong("curate.near_dedup: {threshold: 0}", "curate.near_dedup.threshold", "greater than 0"),
    wrong("curate.near_dedup: {bands: 100, rows: 100}", "over 4096 hashes"),
    wrong("curate.near_dedup: {hashes: 100, bands: 7, rows: 3}", "does not divide"),
    wrong("curate.span_dedup: [{unit: line}, {unit: line}]", "twice"),
    wrong("curate.decontaminate: {}", "nothing would be searched"),
    wrong("curate.decontaminate: {tasks: [x, x]}", "named twice"),
    wrong("curate.decontaminate: {tasks: [x], ngram: 5}", "is over ngram=5"),
    wrong("curate.quality: {positive: [], negative: [b]}", "curate.quality.positive", "at least 1 item"),
    wrong("curate.splits: {validation: 0.6, test: 0.5}", "leave no training text"),
    wrong("curate.splits: {test: 1}", "curate.splits.test", "less than 1"),
    wrong("tokenizer: {vocab_size: 100}", "is too small for"),
    wrong("tokenizer: {preset: case, case_marks: false}", "drop one of the two"),
    wrong("tokenizer: {pattern: x}", "read with a .tiktoken file"),
    wrong("tokenizer: {end_of_document: x}", "drop it, or set pretrained"),
    wrong("tokenizer: {user_symbols: ['']}", "is invalid"),
    wrong("tokenizer: {user_symbols: [a, a]}", "twice"),
    wrong("tokenizer: {character_coverage: 0.1}", "tokenizer.character_coverage", "greater than or equal to 0.98"),
    wrong("model.heads: 3", "width=16 is not a multiple of heads=3"),
    wrong("model: {layers: 1, width: 16, heads: 4, kv_heads: 3}", "not a multiple of kv_heads=3"),
    wrong("model: {layers: 1, width: 6, heads: 2}", "rope turns pairs"),
    wrong("model: {layers: 3, width: 16, heads: 2, window: [8, null]}", "do not repeat evenly"),
    wrong("model: {layers: 1, width: 16, heads: 2, window: 0}", "at least 1, or null"),
    wrong("model.window: [a]", "model.window", INTEGER),
    wrong("model: {layers: 1, width: 16}", "model.heads: missing"),
    field("model: 7", "mapping of fields"),
    wrong("train: {tokens: 64}", "train.batch_tokens: missing"),
    wrong("train: {tokens: 64, batch_tokens: 128}", "less than one batch"),
    wrong("train: {tokens: 64, batch_tokens: 32, precision: fp32, float8: true}", "set precision: bf16"),
    wrong("train.tokens: 8MB", "sizes are written 4M"),
    wrong("train.tokens: 8 M", "sizes are written 4M"),
    wrong("train.layout: automatic", "mapping of fields"),
    wrong("train.layout: {data: 6, replicate: 4}", "not a multiple of replicate=4"),
    wrong("train.layout: {expert: 2}", "does not divide the 1 ranks"),
    wrong("train.layout: {pipeline: 2, pipeline_schedule: zbv, virtual_stages: 3}", "leave virtual_stages out"),
    wrong("train.layout: {pipeline: 2, split_points: [1, 1]}", "rising layer numbers"),
    wrong("train.batch_ramp: {start_tokens: 512, increment_tokens: 32, over_tokens: 64}", "a ramp grows"),
    wrong("train.optimizer: {betas: [0.9]}", "train.optimizer.betas"),
    wrong("train.optimizer: {learning_rate: 0}", "train.optimizer.learning_rate", "greater than 0"),
    wrong("train.lr_schedule: {warmup_share: 2}", "train.lr_schedule.warmup_share", LARGE),
    wrong("train.validation: {every: true}", "train.validation.every", BOOLEAN),
    wrong("train.evaluation: {every: 5, tasks: []}", "name a task or set every: 0"),
    wrong("train.checkpoint: {keep_last: 0}", "train.checkpoint.keep_last", SMALL),
    wrong("evaluate: {tasks: [cloze, cloze]}", "twice"),
    wrong("evaluate: {tasks: [], num_continuations: 0}", "nothing would be evaluated"),
    wrong("evaluate: {cloze_choices: 1}", "evaluate.cloze_choices", SMALL),
    wrong("evaluate: {sampling: {top_p: 2}}", "evaluate.sampling.top_p", LARGE),
    wrong("evaluate: {sampling: {seed: -1}}", "evaluate.sampling.seed", SMALL),
    wrong("sources.0.held_out: test", "all of them are held out"),
    wrong("sources.0.held_out: train", "'test'"),
    wrong(
        "sources: [{name: notes, format: text, paths: [.], weight: 1, held_out: test}]",
        "leaves nothing to train on, but weight=1",
    ),
    wrong("index: {max_epochs: 0}", "a cap is a number above 0"),
    wrong("index: {max_epochs: [1]}", "index.max_epochs", "a mapping of fields"),
    wrong("index: {phases: [{from_tokens: 5, weights: {notes: 1}}]}", "the first starts at 0"),
    wrong("index: {phases: [{from_tokens: 0, weights: {}}]}", "no weights"),
    wrong("index: {phases: [{from_tokens: 0, weights: {notes: 0}}]}", "finite number above 0"),
    wrong("index: {fim_rate: 2}", "index.fim_rate", LARGE),
]
CASES = [*TYPES, *NUMBERS, *HUGE, *CHOICES, *UNKNOWN, *SHAPES]


@each(CASES)
def test_recipes(case, expect_error):
    expect_error(case)
