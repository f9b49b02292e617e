"""Vector operations against numpy and torch: exact widening, one rounding, one order of sums."""

import numpy as np
import pytest
import torch
from numba import config, njit

from lora_backends.numba_cpu.machine import lowering, plain
from lora_backends.numba_cpu.machine import vectors as v
from lora_backends.numba_cpu.machine.cpu import has_bfloat16

FLOAT32 = pytest.param(v.FLOAT32, torch.float32, id="float32")
SMALL = [
    pytest.param(v.BFLOAT16, torch.bfloat16, id="bfloat16"),
    pytest.param(v.FLOAT16, torch.float16, id="float16"),
]
KINDS = pytest.mark.parametrize(("kind", "dtype"), [FLOAT32, *SMALL])
SMALL_KINDS = pytest.mark.parametrize(("kind", "dtype"), SMALL)


@njit
def copy(kind, kind_to, source, size, target, count):
    for i in range(count // 16):
        vector = v.load(kind, source + 16 * i * size)
        half = (np.float32(0.5),)
        v.update_rows(kind_to, (target,), 16 * i, (vector, vector), half, (vector,), ())


@njit
def scale(kind, y, source, scales, factors):
    vector = v.load(v.FLOAT32, source)
    own = v.read_scaled((factors, factors + 4), np.float32(2))
    sums = (vector, vector, vector, vector)
    v.update_rows(
        kind, (y, y + 16 * v.size(kind)), 0, sums, own, (vector,), (v.load(v.FLOAT32, scales),)
    )


@njit
def widen(kind, source, size, target, count):
    for i in range(count // 16):
        v.store_all(target + 64 * i, 64, (v.load(kind, source + 16 * i * size),))


@njit
def columns_of(kind, source, stride, target):
    v.store_all(target, 64, v.load_columns(kind, source, stride))


@njit
def square_of(kind, source, target):
    v.store_all(target, 64, v.load_square(kind, source))


@njit
def dots(kind, a_row, x_row, target):
    rows = (a_row, a_row)
    sums = v.zeros(rows, (x_row,))
    sums = v.add_products(sums, v.load_rows(kind, rows, 0), v.load_rows(kind, (x_row,), 0))
    tail_a, tail_x = v.load_some(kind, rows, 32, 5), v.load_some(kind, (x_row,), 32, 5)
    v.write_totals((target,), 1, v.add_products(sums, tail_a, tail_x))


def sixteen_bit_patterns(dtype):
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


@SMALL_KINDS
def test_every_16_bit_pattern_widens_exactly(kind, dtype):
    values = sixteen_bit_patterns(dtype)
    wide = torch.empty(values.numel())
    widen(kind, values.data_ptr(), 2, wide.data_ptr(), values.numel())
    assert torch.equal(wide.isnan(), values.isnan())
    assert torch.equal(wide.nan_to_num(7), values.float().nan_to_num(7))
    assert torch.equal(wide.signbit(), values.signbit())


@pytest.mark.parametrize("with_instruction", [False, True])
@SMALL_KINDS
def test_sums_round_once_to_the_nearest_even(kind, dtype, with_instruction, monkeypatch):
    rounds = with_instruction and has_bfloat16()
    monkeypatch.setattr(lowering, "has_bfloat16", lambda: rounds)
    around = sixteen_bit_patterns(dtype).float()
    bits = around.view(torch.int32)
    step = 1 << (15 if dtype is torch.bfloat16 else 12)  # half a unit in the last place
    values = torch.cat(
        [(bits + d).view(torch.float32) for d in (-1, 0, 1, step - 1, step, step + 1)]
    )
    values = values[values.isfinite()]
    values = values[: values.numel() // 16 * 16] / 4
    y = torch.zeros(values.numel(), dtype=dtype)
    compiled = njit(getattr(copy, "py_func", copy))
    compiled(v.FLOAT32, kind, values.data_ptr(), 4, y.data_ptr(), values.numel())
    expected = (values + values).to(dtype)
    if rounds:  # the instruction knows no subnormal numbers
        expected[(values + values).abs() < torch.finfo(torch.float32).tiny] = 0
    assert torch.equal(y, expected)


@KINDS
def test_scales_multiply_what_was_there_and_the_sum_but_not_what_is_added(kind, dtype):
    """Small integers: every operation is exact."""
    y, source = torch.arange(32.0).view(2, 16), torch.arange(16.0) - 3
    scales, factors = torch.arange(16.0) % 3, torch.tensor([0.5, 3.0])
    expected = scales * (y + 2 * source * (2 * factors[:, None])) + source
    result = y.to(dtype)
    pointers = [tensor.data_ptr() for tensor in (result, source, scales, factors)]
    scale(kind, *pointers)
    assert torch.equal(result, expected.to(dtype))


@KINDS
def test_nan_and_infinity_stay_what_they_are(kind, dtype):
    values = torch.tensor([float("nan"), float("inf"), -float("inf"), 3.0e38] * 4)
    y = torch.zeros(16, dtype=dtype)
    copy(v.FLOAT32, kind, values.data_ptr(), 4, y.data_ptr(), 16)
    assert y[0].isnan()
    assert y[1:3].tolist() == [float("inf"), -float("inf")]


@KINDS
def test_columns_are_the_transpose_of_rows(kind, dtype):
    count = 16 // dtype.itemsize
    rows = torch.randn(16, count + 3).to(dtype)
    columns = torch.empty(count, 16)
    stride = rows.stride(0) * dtype.itemsize
    columns_of(kind, rows.data_ptr(), stride, columns.data_ptr())
    assert torch.equal(columns, rows[:, :count].T.float())
    twins = plain.load_columns(kind, rows.data_ptr(), stride)
    assert torch.equal(torch.from_numpy(np.stack(twins)), columns)


@KINDS
def test_a_square_is_the_transpose_of_rows_without_gaps(kind, dtype):
    rows, columns = torch.randn(16, 16).to(dtype), torch.empty(16, 16)
    square_of(kind, rows.data_ptr(), columns.data_ptr())
    assert torch.equal(columns, rows.T.float())
    twins = plain.load_square(kind, rows.data_ptr())
    assert torch.equal(torch.from_numpy(np.stack(twins)), columns)


@KINDS
def test_a_dot_product_reads_its_elements_and_no_others(kind, dtype):
    a = torch.randint(-4, 5, (40,)).to(dtype)
    x = torch.randint(-4, 5, (40,)).to(dtype)
    expected = (a[:37].float() * x[:37].float()).sum()
    a[37:], x[37:] = float("nan"), float("nan")
    total = torch.full((2,), -1.0)
    dots(kind, a.data_ptr(), x.data_ptr(), total.data_ptr())
    assert total.tolist() == [float(expected), -1.0]


@pytest.mark.skipif(config.DISABLE_JIT, reason="there is no machine code where numba is off")
def test_dot_products_use_fused_vector_instructions():
    a, total = torch.zeros(40), torch.zeros(2)
    dots(v.FLOAT32, a.data_ptr(), a.data_ptr(), total.data_ptr())
    code = "\n".join(dots.inspect_asm().values())
    if "ymm" not in code and "zmm" not in code:
        pytest.skip("this CPU has no AVX")
    assert "vfmadd" in code
