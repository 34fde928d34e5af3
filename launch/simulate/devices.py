"""Devices by name: the numbers of their data sheets, and the shares of these that programs achieve. Pure.

A peak is never reached. A device has peaks, from data sheets, and one set of shares, the same for every model, mode and
run: nothing is fitted to a result. Shares are rounded, typical of publications about vLLM and FSDP; the docs have a
table of predictions beside published measurements (``launch/docs/simulate.md``).
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Final

from pydantic import Field

from ...actors.config_base import Config, NonNegative, Positive, Unit

Part = Annotated[float, Field(gt=0, le=1)]


class DeviceConfig(Config):
    """A device by its numbers. Bandwidths are of one direction and decimal, as in data sheets; sizes of memory
    are binary there, although they are called GB."""

    tflops: Annotated[Positive, Unit("TFLOP/s")]
    """Peak of dense products in bfloat16."""
    memory_gib: Annotated[Positive, Unit("GiB")]
    """Memory of the device."""
    memory_gb_s: Annotated[Positive, Unit("GB/s")]
    """Peak bandwidth of that memory."""
    link_gb_s: Annotated[Positive, Unit("GB/s")]
    """Bandwidth from a device to the others of its host."""
    host_gb_s: Annotated[Positive, Unit("GB/s")]
    """Bandwidth from a device to its host's memory."""
    product_share: Part = 0.65
    """Part of the peak that large products of an engine achieve."""
    training_share: Part = 0.4
    """Part of the peak that forward and backward achieve in training, with enough tokens."""
    memory_share: Part = 0.8
    """Part of the memory's bandwidth that reading weights, keys and values achieves."""
    update_share: Part = 0.8
    """Part of the memory's bandwidth that an optimizer step achieves."""
    link_share: Part = 0.75
    """Part of the links' bandwidth that transfers achieve."""
    step_s: Annotated[NonNegative, Unit("s")] = 1.5e-3
    """Time of an engine's step beside the device's computations: scheduling, sampling, launches."""
    prompts_s: Annotated[NonNegative, Unit("s")] = 0.0
    """Time of a chunk of prompts beside its products, for engines that compute prompts in forwards of their own."""
    forward_s: Annotated[NonNegative, Unit("s")] = 0.0
    """Time of a forward and backward in training beside its products: launches, and what does not grow with a model."""
    element_s: Annotated[NonNegative, Unit("s")] = 0.0
    """Time of training for a token and an element of a layer's hidden state, beside the products: element-wise
    operations. Of the named devices `training_share` has it."""
    update_s: Annotated[NonNegative, Unit("s")] = 0.0
    """Time of an optimizer step beside its reads and writes."""
    exchange_s: Annotated[NonNegative, Unit("s")] = 10e-6
    """Latency of one sum over the devices of an engine; each layer has two."""
    tables: str | None = None
    """Name of its measured tables in `aiconfigurator-core`; `null`: it has none."""


PRESETS: Final[Mapping[str, DeviceConfig]] = MappingProxyType({
    # NVIDIA A100 80GB SXM data sheet: 312 TFLOP/s bfloat16, 80 GB, 2,039 GB/s; NVLink 600 GB/s and PCIe 4.0 x16
    # 64 GB/s, both directions together. 40 to 60 % of the peak are published for training (MPT, Llama 2).
    "A100": DeviceConfig(
        tflops=312, memory_gib=80, memory_gb_s=2039, link_gb_s=300, host_gb_s=32,
        product_share=0.75, training_share=0.5, tables="a100_sxm",
    ),
    # NVIDIA H100 SXM data sheet: 989.4 TFLOP/s bfloat16 without sparsity, 80 GB, 3.35 TB/s; NVLink 900 GB/s and
    # PCIe 5.0 x16 128 GB/s, both directions together. It throttles in long products: 35 to 45 % in training.
    "H100": DeviceConfig(
        tflops=989, memory_gib=80, memory_gb_s=3350, link_gb_s=450, host_gb_s=64, tables="h100_sxm",
    ),
    # NVIDIA H200 data sheet: the same chip with 141 GB and 4.8 TB/s.
    "H200": DeviceConfig(
        tflops=989, memory_gib=141, memory_gb_s=4800, link_gb_s=450, host_gb_s=64, tables="h200_sxm",
    ),
    # NVIDIA H20 data sheet (as reported by resellers; NVIDIA has no public one): 148 TFLOP/s bfloat16, 96 GB, 4.0 TB/s,
    # NVLink 900 GB/s both directions together. With little to compute beside its bandwidth it is near its peak.
    "H20": DeviceConfig(
        tflops=148, memory_gib=96, memory_gb_s=4000, link_gb_s=450, host_gb_s=64,
        product_share=0.85, training_share=0.6,
    ),
    # The 64-GB NPU of the paper's cluster, 16 in a host: one die of a Huawei Ascend 910C, of which a CloudMatrix384 has
    # 48 hosts with 16 (arXiv 2506.12708): 376 TFLOP/s bfloat16, 64 GB, 1.6 TB/s, 196 GB/s to others of one direction.
    # The copies to the host's memory have no public figure: PCIe 4.0 x16 is assumed. Engine and trainer of Ascend are
    # younger than CUDA's: a step's overhead and a sum's latency are assumed to be twice as long.
    "NPU-64GB": DeviceConfig(
        tflops=376, memory_gib=64, memory_gb_s=1600, link_gb_s=196, host_gb_s=32,
        training_share=0.35, step_s=3e-3, exchange_s=20e-6,
    ),
})  # fmt: skip
