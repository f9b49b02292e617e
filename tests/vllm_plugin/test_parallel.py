"""Tensor and expert parallelism over two processes on the CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.adapters.peft_models import PROMPTS
from helpers.servers.vllm_engines import LIVE, PARALLEL
from helpers.servers.vllm_experts import merged_tokens, save_expert_adapter, save_mixture


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory):
    """Return a folder of mixtures by their number of experts, each with an adapter."""
    parent = tmp_path_factory.mktemp("mixtures")
    for experts in (4, 5):
        folder = save_mixture(parent / str(experts), experts)
        save_expert_adapter(folder / "adapter", experts, experts)
    return parent


@pytest.fixture(scope="module")
def output(tiny, adapters, mixtures):
    # in a process of its own, which forks vLLM's workers before it has run anything
    env = {
        **os.environ,
        "LORA_BACKENDS_VLLM": "auto",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_WORKER_MULTIPROC_METHOD": "fork",
    }
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), env.get("PYTHONPATH", "")])
    command = [sys.executable, str(Path(__file__).with_name("parallel_engine.py"))]
    command += [str(tiny), str(next(iter(adapters.values())).parent), str(mixtures)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-2000:]
    return done.stdout + done.stderr


@pytest.mark.parametrize("kind", ["plain", "sharded"])
def test_two_processes_answer_as_peft_does(output, peft_tokens, kind):
    found = [line for line in output.splitlines() if line.startswith(kind)]
    rows = zip(PROMPTS, PARALLEL[kind], strict=True)
    assert found == [f"{kind} {peft_tokens(prompt, name, 6)}" for prompt, name in rows]


@pytest.mark.parametrize("kind", LIVE)
def test_two_processes_take_versions_from_memory_and_cut_their_parts(output, peft_tokens, kind):
    found = [line for line in output.splitlines() if line.startswith(f"live {kind}")]
    wanted = [peft_tokens(PROMPTS[0], name, 6) for name in LIVE[kind]]
    assert found == [f"live {kind} {tokens} {{'alice': [0, 1]}}" for tokens in wanted]


def test_two_processes_refuse_a_version_together(output):
    refused = [line for line in output.splitlines() if line.startswith("live refused")]
    assert len(refused) == 2
    assert all("does not fit the base model" in line for line in refused)


def test_experts_of_two_processes_answer_as_one_model_does(output, mixtures):
    base, rows = mixtures / "4", zip(PROMPTS, ["adapter", None, "adapter"], strict=False)
    wanted = [merged_tokens(base, name and base / name, prompt) for prompt, name in rows]
    assert f"4 experts {wanted}" in output.splitlines()
    assert wanted[0] != merged_tokens(base, None, PROMPTS[0])


def test_experts_that_vllm_cuts_in_other_places_are_refused(output):
    (found,) = [line for line in output.splitlines() if line.startswith("5 experts")]
    assert "expert parallelism of 5 experts over 2 processes" in found


def test_every_process_says_that_it_keeps_its_matrices_whole(output):
    assert output.count("fully_sharded_loras is not followed") == 2


def test_every_process_runs_on_the_backend(output):
    assert output.count("runs on backend 'numba_cpu'") == 8
