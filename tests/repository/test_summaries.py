"""Tables of the pages, from results of any rows."""

import pytest

pytest.importorskip("griffe")  # which writes the pages

import summaries


def test_two_rows_of_one_cell_are_refused(monkeypatch):
    row = {"step": "decode", "rows": 8, "adapters": 8, "ms": 2.0}
    rows = [{**row, "contender": "off"}, {**row, "contender": "own", "ratio": 1.5}]
    monkeypatch.setattr(summaries.figures, "result", lambda name: {"rows": rows})
    assert "| 8 rows, 8 adapters | 2.00 | 1.50 |" in summaries.vllm_steps()
    rows.append({**rows[-1], "ratio": 1.6})
    with pytest.raises(ValueError, match="two rows of 'own' for '8 rows, 8 adapters' in vllm_step"):
        summaries.vllm_steps()
