"""Plots draw what was measured, and only where there is something to compare."""

import pytest

pytest.importorskip("matplotlib")

from lora_backends.bench import Cell, plots


def result(cells, names=("fast", "slow"), missing=()):
    """Return a result in which the time of a cell is its tokens times the contender's place."""
    rows = []
    for cell in cells:
        times = {name: cell.tokens * (place + 1.0) for place, name in enumerate(names)}
        found = {
            name: {"us": us, "us_q1": us * 0.9, "us_q3": us * 1.2, "efficiency": 0.5}
            for name, us in times.items()
            if name not in missing
        }
        found |= {name: {"error": "wrong result"} for name in missing}
        row = {"bytes": cell.bytes_moved(4), "flop": cell.flop, "limit_us": 0.5, "results": found}
        rows.append(cell.describe() | row)
    return {
        "device": "a CPU",
        "date": "2026-01-01",
        "dtype": "float32",
        "limits": {"copy_gb_per_s": 10.0, "gemm_gflop_per_s": 100.0},
        "contenders": {name: {} for name in names},
        "rows": rows,
    }


def cells(tokens=(1, 16, 64), adapters=(1, 4), projections=("qkv", "o")):
    return [
        Cell(name, 8, (6, 3), tokens=t, adapters=a, rank=2)
        for name in projections
        for t in tokens
        for a in adapters
    ]


def lines(axes):
    return {
        c.get_label(): (list(c[0].get_xdata()), list(c[0].get_ydata())) for c in axes.containers
    }


def test_files_are_written_in_both_formats(tmp_path):
    written = plots.save_plots(result(cells()), tmp_path / "new" / "folder")
    assert {file.name for file in written} == {
        f"{name}.{ending}" for name in plots.PLOTS for ending in ("png", "svg")
    }
    assert all(file.stat().st_size > 1000 for file in written)


def test_time_is_drawn_against_tokens_of_one_number_of_adapters():
    figure = plots.time_against_tokens(result(cells()))
    assert len(figure.axes) == 2
    assert lines(figure.axes[0]) == {
        "fast": ([1, 16, 64], [1, 16, 64]),
        "slow": ([1, 16, 64], [2, 32, 128]),
    }
    assert "qkv" in figure.axes[0].get_title() and "rank 2" in figure.axes[0].get_title()


def test_time_is_drawn_against_active_adapters():
    figure = plots.time_against_adapters(result(cells(tokens=(16,), adapters=(1, 4, 8))))
    assert lines(figure.axes[0])["slow"] == ([1, 4, 8], [32, 32, 32])


def test_skewed_batches_are_no_part_of_a_line_of_even_ones():
    skewed = [Cell("o", 8, (6, 3), tokens=256, adapters=4, rank=2, mix="skewed")]
    figure = plots.time_against_tokens(result([*cells(projections=["o"]), *skewed]))
    assert lines(figure.axes[0])["fast"][0] == [1, 16, 64]


def test_nothing_is_drawn_where_there_is_nothing_to_compare():
    one = result(cells(tokens=(1,), adapters=(1,)))
    assert plots.time_against_tokens(one) is None
    assert plots.time_against_adapters(one) is None
    failed = result(cells(), names=("bad",), missing=("bad",))
    assert plots.efficiency(failed) is None and plots.roofline(failed) is None


def test_a_contender_with_errors_has_no_points_and_no_numbers():
    some = result(cells(), missing=("slow",))
    assert lines(plots.time_against_tokens(some).axes[0])["slow"] == ([], [])
    heat = plots.efficiency(some)
    assert [axes.get_title() for axes in heat.axes if axes.images] == ["fast"]


def test_every_cell_of_the_heat_map_is_named_and_numbered():
    axes = plots.efficiency(result(cells())).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()][0] == "1 token, 1 adapter, rank 2"
    assert [label.get_text() for label in axes.get_xticklabels()] == ["qkv", "o"]
    assert {text.get_text() for text in axes.texts} == {"0.50"}


def test_the_roof_bends_where_the_copy_feeds_the_matrix_product():
    axes = plots.roofline(result(cells())).axes[0]
    roof = axes.lines[0]
    assert (10.0, 100.0) in zip(roof.get_xdata(), roof.get_ydata(), strict=True)
    assert axes.get_xlabel() and axes.get_ylabel()


def test_many_ticks_are_thinned_so_that_their_names_do_not_touch():
    figure = plots.time_against_tokens(result(cells(tokens=[2**p for p in range(15)])))
    shown = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert len(shown) <= 8 and shown[0] == "1"


def test_equal_results_give_equal_files(tmp_path):
    for folder in ("one", "two"):
        plots.save_plots(result(cells()), tmp_path / folder, formats=["svg"])
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes()
