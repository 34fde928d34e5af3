"""Rooflines of devices, worked by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.launch.simulate.cluster_config import ClusterConfig
from flexmarl.launch.simulate.devices import PRESETS
from flexmarl.launch.simulate.roofline import (
    EngineLoad,
    TrainerLoad,
    engine_times,
    trainer_times,
)

from .shapes import LLAMA_8B, QWEN_7B, QWEN_14B, QWEN_32B

H100 = PRESETS["H100"]
IDEAL = H100.model_copy(
    update={
        "product_share": 1.0,
        "training_share": 1.0,
        "memory_share": 1.0,
        "link_share": 1.0,
        "step_s": 0.0,
    }
)


def cluster(hosts: int = 2, devices: int = 8, **changes: float) -> ClusterConfig:
    return ClusterConfig(hosts=hosts, devices=devices, device=IDEAL).model_copy(update=changes)


@pytest.mark.parametrize(
    ("shape", "parameters"), [(QWEN_7B, 7.62), (QWEN_14B, 14.77), (QWEN_32B, 32.76), (LLAMA_8B, 8.03)]
)
def test_the_shapes_have_the_parameters_of_their_papers(shape: object, parameters: float) -> None:
    assert round(shape.parameters / 1e9, 2) == parameters  # type: ignore[attr-defined]


def test_one_sequence_is_bound_by_reading_the_weights() -> None:
    """16.06 GB at 3.35 TB/s are 4.79 ms."""
    times = engine_times(LLAMA_8B, IDEAL, EngineLoad(1, 2, 40 << 30))
    assert (
        times.decode_s(1, 0)
        == pytest.approx(LLAMA_8B.parameters * 2 / 3.35e12)
        == pytest.approx(4.79e-3, rel=1e-3)
    )


def test_many_sequences_are_bound_by_products() -> None:
    """1024 tokens by 16.06 GFLOP at 989 TFLOP/s are 16.6 ms."""
    times = engine_times(LLAMA_8B, IDEAL, EngineLoad(1, 2, 40 << 30))
    assert times.decode_s(1024, 0) == pytest.approx(16.63e-3, rel=1e-3)


def test_keys_and_values_are_read_and_fill_the_memory() -> None:
    """A token of Llama 3.1 8B has 128 KiB of keys and values: 32 layers of 2 times 8 heads of 128, 2 bytes each."""
    times = engine_times(LLAMA_8B, IDEAL, EngineLoad(1, 2, 40 << 30))
    assert times.kv_tokens == (40 << 30) // (128 << 10)
    reading = times.decode_s(1, 100_000) - times.decode_s(1, 0)
    assert reading == pytest.approx(100_000 * 131072 / 3.35e12)


def test_devices_of_an_engine_share_the_work_and_sum_up() -> None:
    alone, four = (engine_times(QWEN_32B, IDEAL, EngineLoad(n, 2, 20 << 30)) for n in (1, 4))
    assert four.weights_s == pytest.approx(alone.weights_s / 4) and four.kv_tokens == 4 * alone.kv_tokens
    assert four.step_s == pytest.approx(2 * 64 * IDEAL.exchange_s) and alone.step_s == 0.0
    assert four.exchange_token_s == pytest.approx(128 * 2 * 0.75 * 5120 * 2 / 450e9)


def test_training_takes_six_operations_a_parameter_and_eight_with_checkpoints() -> None:
    plain, checkpointed = (
        trainer_times(QWEN_14B, cluster(), TrainerLoad(16, 2, 16384, checkpoints))
        for checkpoints in (False, True)
    )
    assert plain.token_s == pytest.approx(6 * QWEN_14B.parameters / 989e12)
    assert checkpointed.token_s == pytest.approx(8 * QWEN_14B.parameters / 989e12)


def test_all_hosts_of_a_gang_write_a_checkpoint() -> None:
    times = trainer_times(QWEN_14B, cluster(), TrainerLoad(16, 2, 16384, False))
    assert times.save_s == pytest.approx(12 * QWEN_14B.parameters / 2 / 2e9), "two hosts write"


def test_devices_of_a_host_share_its_copies() -> None:
    """16 bytes of each of 32.76e9 parameters by 16 ranks of one host at 95 GB/s are 5.5 s: out and in again, the 11 s
    of the paper's largest swap."""
    limited = cluster(devices=16, copies_gb_s=95.0)
    part = 16 * QWEN_32B.parameters / 16
    assert 2 * part / limited.copy_bytes_s(16) == pytest.approx(11.0, rel=0.01)
    assert limited.copy_bytes_s(1) == pytest.approx(64e9), "one rank has the whole link"
    assert limited.copy_bytes_s(2) == pytest.approx(95e9 / 2)


def test_the_network_slows_gangs_that_are_on_several_hosts() -> None:
    inside, across = (trainer_times(QWEN_14B, cluster(), TrainerLoad(n, 2, 16384, False)) for n in (8, 16))
    assert inside.exchange_s == pytest.approx(8 * QWEN_14B.parameters * 7 / 8 / 450e9)
    assert across.exchange_s == pytest.approx(8 * QWEN_14B.parameters * 15 / 16 / 50e9)


def test_replicas_gather_within_their_hosts_and_sum_gradients_over_the_network() -> None:
    plain = trainer_times(QWEN_14B, cluster(), TrainerLoad(16, 2, 16384, False))
    inside = trainer_times(QWEN_14B, cluster(), TrainerLoad(8, 2, 16384, False))
    hybrid = trainer_times(QWEN_14B, cluster(), TrainerLoad(16, 2, 16384, False, replicas=2))
    # A ring over two replicas: half of each part goes round twice, and all parts share the network of a host.
    summed = 2 * 4 * QWEN_14B.parameters / 2 / 50e9
    assert hybrid.exchange_s == pytest.approx(inside.exchange_s) and inside.exchange_s < plain.exchange_s
    assert hybrid.replica_sum_s == pytest.approx(summed) and plain.replica_sum_s == 0.0
    assert hybrid.optimizer_s == inside.optimizer_s and hybrid.token_s == plain.token_s
    on_one_host = trainer_times(QWEN_14B, cluster(), TrainerLoad(8, 2, 16384, False, replicas=2))
    assert on_one_host.exchange_s == pytest.approx(8 * 3 / 4 * QWEN_14B.parameters / 450e9)
    assert on_one_host.replica_sum_s == pytest.approx(QWEN_14B.parameters / 450e9)


@given(factor=st.floats(1.1, 10.0), key=st.sampled_from(["tflops", "memory_gb_s", "link_gb_s", "host_gb_s"]))
def test_a_better_device_is_never_slower(factor: float, key: str) -> None:
    better = H100.model_copy(update={key: getattr(H100, key) * factor})
    before, after = (engine_times(QWEN_14B, device, EngineLoad(4, 2, 1 << 30)) for device in (H100, better))
    for batch, context in ((1, 100), (64, 100_000), (1024, 100)):
        assert after.decode_s(batch, context) <= before.decode_s(batch, context)
    trained, faster = (
        trainer_times(
            QWEN_14B, ClusterConfig(hosts=2, devices=8, device=device), TrainerLoad(8, 2, 16384, False)
        )
        for device in (H100, better)
    )
    assert all(faster.model_dump()[name] <= value for name, value in trained.model_dump().items())
