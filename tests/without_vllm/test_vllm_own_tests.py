"""The tool that runs vLLM's own tests, as far as it goes without vLLM."""

from types import SimpleNamespace

import pytest
import vllm_own_tests as tool


def test_counts_are_by_file_and_a_failure_is_never_lost():
    bad = "test_fused_moe_lora_kernel_rejects_bad_block_size_m[cuda:0]"
    found = {
        "tests/lora/test_a.py::test_x[1]": ("passed", ""),
        "tests/lora/test_a.py::test_x[2]": ("skipped", "needs 2 GPUs"),
        "tests/lora/test_a.py::test_y": ("failed", "1 != 2"),
        "tests/lora/test_a.py": ("failed", "no module named x"),
        f"tests/lora/test_b.py::{bad}": ("failed", "ValueError"),
    }
    files = tool.summarized(found)
    assert files["test_a.py"]["passed"] == 1
    assert files["test_a.py"]["skipped"] == {"needs 2 GPUs": 1}
    assert list(files["test_a.py"]["failed"].values()) == ["no module named x", "1 != 2"]
    assert list(files["test_b.py"]["contradicts"]) == [bad] and not files["test_b.py"]["failed"]


@pytest.mark.parametrize("shards", [1, 3])
def test_shares_are_each_nth_case_of_a_function_once(shards):
    names = [f"test_x[{n}]" for n in range(10)] + ["test_y"]
    kept = []
    for shard in range(shards):
        items = [
            SimpleNamespace(
                nodeid=name, name=name, module=None, path="test_a.py", add_marker=lambda mark: None
            )
            for name in names
        ]
        tool.Recorder(4, shard, shards, 60.0).pytest_collection_modifyitems(items)
        kept += [item.name for item in items]
    assert sorted(kept) == ["test_x[0]", "test_x[4]", "test_x[8]", "test_y"]


def test_time_is_shared_out_over_files_and_a_sample_has_no_pattern():
    items = [
        SimpleNamespace(
            nodeid=name, name=name, module=None, path=path, add_marker=lambda mark: None
        )
        for path, count in (("a.py", 3), ("b.py", 40))
        for name in (f"test_{path}_{n}" for n in range(count))
    ]
    recorder = tool.Recorder(1, 0, 1, 60.0)
    recorder.pytest_collection_modifyitems(items)
    assert [item.path for item in items] == ["a.py"] * 3 + ["b.py"] * 40
    assert recorder.ends["a.py"] - recorder.start == pytest.approx(30)
    assert recorder.ends["b.py"] - recorder.start == pytest.approx(60)
    numbers = [int(item.name.rpartition("_")[2]) for item in items[3:]]
    assert sorted(numbers) == list(range(40)) and numbers != sorted(numbers)
    recorder.start, recorder.ends = 0.0, {"a.py": -1.0, "b.py": 1e18}
    with pytest.raises(pytest.skip.Exception, match=tool.NOT_RUN):
        recorder.pytest_runtest_setup(items[0])
    recorder.pytest_runtest_setup(items[-1])
