"""Tensor parallelism over two processes on the CPU: plain, and with fully sharded adapters."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from vllm_engines import PROMPTS

NAMES = [None, "all", "small", "some", "uneven", "ends"]


@pytest.mark.parametrize("fully_sharded", [False, True])
def test_two_processes_answer_as_peft_does(tiny, adapters, peft_tokens, fully_sharded):
    # in a process of its own, since vLLM's workers start by importing the main program
    env = {**os.environ, "LORA_BACKENDS_VLLM": "auto", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), env.get("PYTHONPATH", "")])
    command = [sys.executable, str(Path(__file__).with_name("parallel_engine.py"))]
    command += [str(tiny), str(next(iter(adapters.values())).parent), str(int(fully_sharded))]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-2000:]
    found = [line for line in done.stdout.splitlines() if line.startswith("tokens ")]
    wanted = [peft_tokens(PROMPTS[row], name, 6) for row, name in enumerate(NAMES)]
    assert found == [f"tokens {tokens}" for tokens in wanted]
    assert "runs on backend 'numba_cpu'" in done.stdout + done.stderr
