"""The roofline: bytes and operations counted from the model's sizes, and a machine that has been measured."""

from pathlib import Path

import pytest
import torch
from tiny_engine import tiny_lm
from typed import not_none

from specdec_cli.lm.traffic import Traffic
from specdec_cli.measure.machine.roofline import MeasuredStep, Roofline, measure_speed, roofline


def test_a_forward_reads_every_weight_once_and_every_key(tmp_path: Path) -> None:
    lm = tiny_lm(tmp_path)
    traffic = lm.traffic
    embedding = lm.model.get_input_embeddings().weight
    assert traffic.dense_bytes == lm.weight_bytes - embedding.numel() * 4
    assert traffic.bytes_moved(5, 0) == traffic.dense_bytes
    assert traffic.bytes_moved(1, 10) - traffic.dense_bytes == 10 * 2 * 2 * 2 * 8 * 4  # layers, K and V, heads, size
    products = 2 * (4 * 32 * 32 - 2 * 16 * 32 + 3 * 48 * 32) + 97 * 32
    assert traffic.flops(3, 0) == 3 * 2 * products
    assert traffic.flops(1, 7) - traffic.flops(1, 0) == 4 * 7 * 2 * 32


def test_tied_embeddings_are_read(tmp_path: Path) -> None:
    lm = tiny_lm(tmp_path, tie_word_embeddings=True)
    assert lm.traffic.dense_bytes == lm.weight_bytes


def test_tokens_of_a_mixture_touch_some_experts(tmp_path: Path) -> None:
    lm = tiny_lm(tmp_path, "mixtral")
    traffic = lm.traffic
    assert traffic.expert_bytes == 2 * 4 * 3 * 48 * 32 * 4
    assert traffic.expert_share == 0.5
    one, two = (traffic.bytes_moved(m, 0) - traffic.dense_bytes for m in (1, 2))
    assert (one, two) == (traffic.expert_bytes * 0.5, traffic.expert_bytes * 0.75)


def test_a_step_is_bound_by_what_takes_longer() -> None:
    traffic = Traffic(1000, 250, 0, 0, 1.0, 10, 0)
    machine = Roofline(1e6, 1000, 1e6, 1.0)
    found = roofline(traffic, machine, MeasuredStep(1, 1, 20, 0.004), MeasuredStep(1, 5, 20, 0.005))
    plain, verify = not_none(found.plain), not_none(found.verify)
    assert (plain.bytes_per_step, plain.flops_per_step, plain.bound) == (1200, 500, "memory")
    assert plain.fraction == pytest.approx(0.0012 / 0.004)
    assert (verify.flops_per_step, verify.bound) == (2500, "compute")
    assert verify.fraction == pytest.approx(0.0025 / 0.005)
    assert roofline(traffic, machine, None, None).plain is None


def test_the_machine_is_measured() -> None:
    machine = measure_speed(torch.device("cpu"), torch.float32, 5e6)
    assert machine.bandwidth_measured_over_bytes == 5_000_000
    assert 1e8 < machine.bandwidth_bytes_per_second < 1e13
    assert 1e8 < machine.flops_per_second < 1e15
    assert machine.ridge_flops_per_byte == machine.flops_per_second / machine.bandwidth_bytes_per_second
