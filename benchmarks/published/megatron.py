"""Published runs of Megatron-LM on A100s, each with its source, to compare the planner's forecasts with.

The layouts of table 1, its micro-batches and stages included, are those of Megatron-LM's examples/sc21/run_table_1.sh;
those of table 2 follow run_figure_12.sh (175 billion) and the 530 billion of table 1.
"""

from published.run import PublishedRun

from gristmill.training.planner.costs.model_shape import ModelShape, gpt
from gristmill.training.planner.layout import Layout

TABLE_1 = "arXiv 2104.04473, table 1; layouts from Megatron-LM examples/sc21/run_table_1.sh"


def _table_1(
    name: str,
    size: tuple[int, int, int],
    tensor: int,
    pipeline: int,
    gpus: int,
    samples: int,
    micro_batch: int,
    virtual: int,
    tflops: float,
) -> PublishedRun:
    layout = Layout(
        tensor=tensor,
        pipeline=pipeline,
        replicate=gpus // (tensor * pipeline),
        virtual=virtual,
        micro_batch=micro_batch,
        pipeline_schedule="interleaved" if virtual > 1 else "1f1b",
        recompute="full",
    )
    return PublishedRun(name, gpt(*size), layout, samples, tflops, TABLE_1)


# The three constants are fitted to these five runs and to no others.
CALIBRATION = (
    _table_1("1.7B", (24, 2304, 24), 1, 1, 32, 512, 16, 1, 137.0),
    _table_1("7.5B", (36, 4096, 32), 4, 1, 128, 512, 16, 1, 142.0),
    _table_1("39.1B", (48, 8192, 64), 8, 2, 512, 1536, 4, 1, 138.0),
    _table_1("145.6B", (80, 12288, 96), 8, 8, 1536, 2304, 2, 2, 148.0),
    _table_1("529.6B", (105, 20480, 128), 8, 35, 2520, 2520, 1, 3, 163.0),
)


# Not fitted to: these measure the error on runs that the fit has not seen.
REST_OF_TABLE_1 = (
    _table_1("3.6B", (30, 3072, 32), 2, 1, 64, 512, 16, 1, 138.0),
    _table_1("18.4B", (40, 6144, 48), 8, 1, 256, 1024, 8, 1, 135.0),
    _table_1("76.1B", (60, 10240, 80), 8, 4, 1024, 1792, 2, 3, 140.0),
    _table_1("310.1B", (96, 16384, 128), 8, 16, 1920, 2160, 1, 2, 155.0),
    _table_1("1008B", (128, 25600, 160), 8, 64, 3072, 3072, 1, 1, 163.0),
)


def _selective(
    name: str, size: tuple[int, int, int], pipeline: int, virtual: int, samples: int, micro: int, mfu: float
) -> PublishedRun:
    layout = Layout(
        tensor=8,
        pipeline=pipeline,
        virtual=virtual,
        micro_batch=micro,
        pipeline_schedule="interleaved" if virtual > 1 else "1f1b",
        recompute="attention",
        sequence_parallel=True,
    )
    source = "arXiv 2205.05198, tables 3 and 5: MFU of sequence parallelism with selective recomputation, A100 80 GB"
    return PublishedRun(name, gpt(*size), layout, samples, mfu * 312, source, "a100-80g", "megatron-2022", False)


SELECTIVE_2022 = (
    _selective("22B", (48, 6144, 64), 1, 1, 4, 4, 0.415),
    _selective("175B", (96, 12288, 96), 8, 3, 64, 1, 0.514),
    _selective("530B", (105, 20480, 128), 35, 3, 280, 1, 0.560),
    _selective("1T", (128, 25600, 160), 64, 1, 512, 1, 0.563),
)


def _table_2(shape: ModelShape, pipeline: int, virtual: int, gpus: int, samples: int, tflops: float) -> PublishedRun:
    layout = Layout(
        tensor=8,
        pipeline=pipeline,
        replicate=gpus // (8 * pipeline),
        virtual=virtual,
        pipeline_schedule="interleaved",
        recompute="full",
    )
    return PublishedRun(f"{gpus} GPUs, {pipeline} stages", shape, layout, samples, tflops, TABLE_2)


TABLE_2 = "arXiv 2104.04473, table 2, PTD parallelism: the same batch on ever more GPUs"
_175B, _530B = gpt(96, 12288, 96), gpt(105, 20480, 128)
STRONG_SCALING = (
    _table_2(_175B, 12, 4, 384, 1536, 153.0),
    _table_2(_175B, 12, 4, 768, 1536, 149.0),
    _table_2(_175B, 12, 4, 1536, 1536, 141.0),
    _table_2(_530B, 35, 3, 560, 2240, 171.0),
    _table_2(_530B, 35, 3, 1120, 2240, 167.0),
    _table_2(_530B, 35, 3, 2240, 2240, 159.0),
)


def _mt_nlg(gpus: int, tflops: float) -> PublishedRun:
    """MT-NLG. Recomputation is not counted: 60.1 s for 1920 x 2048 tokens on 2240 GPUs are then 126 TFLOP/s."""
    layout = Layout(tensor=8, pipeline=35, replicate=gpus // 280, recompute="full")
    source = "arXiv 2201.11990, section 2.4 (DeepSpeed with Megatron-LM, plain 1F1B)"
    return PublishedRun(f"530B, {gpus} GPUs", _530B, layout, 1920, tflops, source, recompute_counted=False)


MT_NLG = (_mt_nlg(2240, 126.0), _mt_nlg(2800, 121.0), _mt_nlg(3360, 113.0))

# The tables of the 2020 README, added after the constants were fitted. Each data rank runs its 16 samples as one
# micro-batch. The tables' times and TFLOP/s agree at 8 N FLOPs per token, recomputation counted.
DGX_A100_2020 = "NVIDIA/Megatron-LM, images/tables.tex, DGX-A100: 16 samples, and 2048 over 128 data ranks"


def _dgx_a100_2020(size: tuple[int, int, int], tensor: int, data: int, tflops: float) -> PublishedRun:
    layout = Layout(tensor=tensor, replicate=data, micro_batch=16, recompute="full")
    name = f"{size[1]} x {size[0]}, {layout.gpus} GPUs"
    return PublishedRun(name, gpt(*size, sequence_length=1024), layout, 16 * data, tflops, DGX_A100_2020, "a100-40g")


WEAK_SCALING_2020 = (
    _dgx_a100_2020((24, 1920, 15), 1, 1, 149.8),
    _dgx_a100_2020((30, 2304, 18), 2, 1, 136.8),
    _dgx_a100_2020((36, 3072, 24), 4, 1, 124.7),
    _dgx_a100_2020((42, 4096, 32), 8, 1, 109.3),
    _dgx_a100_2020((24, 1920, 15), 1, 128, 139.8),
    _dgx_a100_2020((30, 2304, 18), 2, 128, 127.5),
    _dgx_a100_2020((36, 3072, 24), 4, 128, 116.7),
    _dgx_a100_2020((42, 4096, 32), 8, 128, 106.5),
)

MEGATRON = {
    "Megatron-LM's tables of 2020, 1 to 1,024 A100 of 40 GB": WEAK_SCALING_2020,
    "table 1 of 2021, the other rows": REST_OF_TABLE_1,
    "table 2 of 2021, strong scaling": STRONG_SCALING,
    "sequence parallelism and selective recomputation, 2022": SELECTIVE_2022,
    "MT-NLG, 2022": MT_NLG,
}
