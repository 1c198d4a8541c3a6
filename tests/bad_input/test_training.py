"""Invalid training settings: sizes beyond the memory, layouts that cannot run."""

from bad_input import Case, each, small


def changed(name, change, *words, command="check"):
    return Case(name, f"{command} small.yaml", words, files={"small.yaml": small(*change)})


CASES = [
    changed("layers", ["model.layers: 1e9"], "small.yaml:", "model.layers", "10000"),
    changed("width", ["model.width: 1e12"], "small.yaml:", "model.width", "1000000"),
    changed("heads", ["model.heads: 1e18"], "small.yaml:", "model.heads", "1000000"),
    changed("context", ["model.sequence_length: 1e15"], "small.yaml:", "model.sequence_length", "100000000"),
    changed("pipeline", ["train.layout: {pipeline: 1e9}"], "small.yaml:", "train.layout.pipeline", "1000000"),
    changed("tokens", ["train.tokens: 1e30"], "small.yaml:", "train.tokens"),
    changed(
        "timeout", ["train.monitoring: {timeout_seconds: .inf}"], "small.yaml:", "train.monitoring.timeout_seconds"
    ),
    changed(
        "no device holds it",
        ["model.layers: 10000", "model.width: 1000000"],
        "parameters: its weights, gradients and optimizer take at least",
        "lower model.layers or model.width",
    ),
    changed(
        "operators in a split backward",
        ["train.layout: {pipeline: 2, pipeline_schedule: dualpipev, recompute: operators}"],
        "dualpipev splits the backward pass",
        "set recompute: full",
    ),
    changed(
        "weights given up between the halves of a backward pass",
        ["train.layout: {pipeline: 2, pipeline_schedule: zbv, fsdp_reshard_after_forward: always}"],
        "zbv splits the backward pass",
        "set pipeline_schedule: 1f1b or interleaved",
    ),
    changed(
        "graphs of weights that are gathered anew",
        ["train.layout: {data: 2}", "train.cuda_graphs: true"],
        "cuda_graphs is not built for 2 processes",
        "set cuda_graphs: false",
    ),
    changed(
        "nothing to overlap",
        ["train.layout: {data: 2, async_tensor_parallel: true}"],
        "async_tensor_parallel overlaps the gathers and scatters of sequence parallelism",
        "set tensor: 2 or more",
    ),
    changed(
        "a share of tokens without its policy",
        ["train.layout: {recompute: swap, offloaded_token_fraction: 0.5}"],
        "offloaded_token_fraction is of recompute: tokens",
    ),
    changed(
        "a strategy without its setting",
        ["train.layout: {offload: {optimizer: interleaved}}"],
        "interleaved needs stride",
    ),
    changed(
        "weights on disk that the device updates",
        ["train.layout: {offload: {parameters: disk, optimizer: interleaved, stride: 2}}"],
        "keeps none of the layers'",
        "set optimizer: auto, or parameters: none",
    ),
    changed(
        "a folder for weights that are not on disk",
        ["train.layout: {offload: {parameters: host, folder: weights}}"],
        "folder is of parameters: disk",
    ),
    changed(
        "weights on disk in a pipeline",
        ["train.layout: {pipeline: 2, offload: {parameters: disk}}"],
        "runs several at a time",
        "use data, tensor or context ranks",
    ),
    changed(
        "a 16-bit copy of all streamed weights",
        ["train.precision: bf16", "train.layout: {offload: {parameters: host}}"],
        "would keep the bf16 copy of its weights",
        "set recompute: full, or precision: fp32",
    ),
    changed(
        "weights on disk and an asynchronous checkpoint",
        ["train.checkpoint: {asynchronous: true}", "train.layout: {offload: {parameters: disk}}"],
        "copies all state into memory",
        "set checkpoint.asynchronous: false",
    ),
    changed(
        "a setting of another strategy",
        ["train.layout: {offload: {optimizer: cpu, device_share: 0.5}}"],
        "device_share is of optimizer: static, not cpu",
    ),
]


@each(CASES)
def test_training(case, expect_error):
    expect_error(case)
