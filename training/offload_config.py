"""Configuration of what lies in host memory instead of the device's. Without torch."""

from typing import Literal, Self

from pydantic import Field, model_validator

from gristmill.foundation.config import Config

OptimizerPlacement = Literal["none", "cpu", "static", "interleaved", "auto"]
ParameterPlacement = Literal["none", "host", "disk"]


class OffloadConfig(Config):
    """optimizer: where the optimizer's state lies and is updated. none: on the device. All others keep it in host
    memory, in subgroups. cpu: the host updates all of them (ZeRO-Offload, arXiv 2101.06840). static: the device updates
    the first device_share of them (Twin-Flow). interleaved: the device updates every stride-th one while the host
    updates those between (Deep Optimizer States, arXiv 2410.21316). auto: interleaved or cpu, whichever the profile
    `hardware` of the layout forecasts as faster.

    parameters: where the weights of the layers lie, with their gradients and optimizer state. none: on the device.
    host, disk: they are on the device only while their layer computes, and the host updates all (ZeRO-Infinity,
    arXiv 2104.07857); optimizer is then none, cpu or auto, which mean the same."""

    optimizer: OptimizerPlacement = "none"
    parameters: ParameterPlacement = "none"
    folder: str | None = Field(
        None,
        min_length=1,
        description="parameters: disk: the folder on whose disk the weights lie, in a file without a name; null: the "
        "run's own",
    )
    subgroup_parameters: int = Field(
        100_000_000, ge=1, description="parameters that are updated and copied together, of one process's shard"
    )
    device_share: float | None = Field(
        None, ge=0, le=1, description="static: the share of the subgroups that the device updates"
    )
    stride: int | None = Field(
        None, ge=1, description="interleaved: the device updates every stride-th subgroup; 1 is all of them"
    )

    @model_validator(mode="after")
    def settings_belong_to_the_strategy(self) -> Self:
        for field, strategy in (("device_share", "static"), ("stride", "interleaved")):
            value = getattr(self, field)
            if value is None and self.optimizer == strategy:
                raise ValueError(f"optimizer: {strategy} needs {field}; set it, or optimizer: auto")
            if value is not None and self.optimizer != strategy:
                raise ValueError(
                    f"{field} is of optimizer: {strategy}, not {self.optimizer}; leave it out, or set "
                    f"optimizer: {strategy}"
                )
        return self

    @model_validator(mode="after")
    def the_host_updates_streamed_weights(self) -> Self:
        if self.parameters != "none" and self.optimizer in ("static", "interleaved"):
            raise ValueError(
                f"optimizer: {self.optimizer} updates weights on the device, where parameters: {self.parameters} keeps "
                "none of the layers'; set optimizer: auto, or parameters: none"
            )
        if self.folder is not None and self.parameters != "disk":
            raise ValueError("folder is of parameters: disk; set that, or leave folder out")
        return self

    @property
    def streams_weights(self) -> bool:
        return self.parameters != "none"

    @property
    def active(self) -> bool:
        return self.optimizer != "none"


ON_DEVICE = OffloadConfig()
