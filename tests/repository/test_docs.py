"""The pages are true: their code runs, and prints the text under it."""

import importlib.util
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys

import pytest
from helpers.page_code import BLOCK, README, ROOT, run

PAGES = sorted([README, *(ROOT / "docs").rglob("*.md")])
PAGES_WITH_CODE = [page for page in PAGES if BLOCK.search(page.read_text())]
TRANSFORMERS = ROOT / "docs" / "how-to" / "use-with-transformers.md"
TUTORIAL = ROOT / "docs" / "tutorial" / "train-serve-curl.md"
EMBED = ROOT / "docs" / "how-to" / "embed-and-rerank.md"
OF_A_MODEL = {
    TRANSFORMERS,
    TUTORIAL,
    ROOT / "docs" / "index.md",
    ROOT / "docs" / "how-to" / "serve-requests.md",
    ROOT / "docs" / "how-to" / "keep-many-adapters.md",
    ROOT / "docs" / "how-to" / "train-many-adapters.md",
    EMBED,
}
DIFFUSION = ROOT / "docs" / "how-to" / "diffusion-pipelines.md"
NEEDS = {
    DIFFUSION: ("diffusers", "peft"),
    **dict.fromkeys(OF_A_MODEL, ("transformers", "peft")),
    ROOT / "docs" / "how-to" / "mixtures-of-experts.md": ("transformers", "peft"),
    EMBED: ("transformers", "peft", "sentence_transformers"),
    ROOT / "docs" / "how-to" / "cuda-graphs-and-compile.md": ("transformers",),
}


def name_of(page):
    return page.relative_to(ROOT).as_posix()


@pytest.fixture
def model_and_adapters(tmp_path, make_base, save_adapter):
    """Return a folder with a tiny model, its tokenizer and PEFT adapters, as a reader has."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<unk>", "<eos>", *"Why is the sky blue Name a fruit ? .".split()]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "unk_token": "<unk>", "eos_token": "<eos>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(
        tmp_path / "my-model"
    )
    make_base("llama").save_pretrained(tmp_path / "my-model")
    attention = {"r": 4, "target_modules": ["q_proj", "v_proj"]}
    everything = {"r": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    save_adapter(name="adapters/pirate", **attention)
    save_adapter(name="adapters/json", **everything)
    save_adapter(name="adapters/careful", use_dora=True, **attention)
    return tmp_path


def _save_classifiers(folder, config):
    """Save a model of 3 labels, and adapters that bring heads of 5 and 2."""
    import peft
    from transformers import LlamaForSequenceClassification

    for name, labels in (("adapters/topic", 5), ("adapters/mood", 2), (None, 3)):
        config.num_labels, config.pad_token_id = labels, 0
        base = LlamaForSequenceClassification(config)
        if name is None:
            base.save_pretrained(folder / "my-classifier")
        else:
            lora = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="SEQ_CLS")
            peft.get_peft_model(base, lora).save_pretrained(folder / name)


def _save_embedder(folder, base):
    """Save a model without a head, its tokenizer, and two adapters for it."""
    import peft

    shutil.copytree(folder / "my-model", folder / "my-embedder")
    base.save_pretrained(folder / "my-embedder")
    for name in ("law", "news"):
        lora = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="FEATURE_EXTRACTION")
        tuned = peft.get_peft_model(base, lora)
        tuned.save_pretrained(folder / "adapters" / name)
        base = tuned.unload()


def _save_pipeline(folder, monkeypatch):
    """Save a tiny pipeline and files of adapters; let it run on the backend that starts at once."""
    from helpers.diffusion.diffusion_loras import tensors_of
    from helpers.diffusion.tiny_pipelines import PIPELINES
    from safetensors.torch import save_file

    from lora_backends import get_backend
    from lora_backends.hf import backend

    pipe = PIPELINES["SDXL"]()
    pipe.save_pretrained(folder / "my-pipeline")
    for name, parts in (("anime", ["unet", "text_encoder", "text_encoder_2"]), ("ink", ["unet"])):
        save_file(tensors_of(pipe, parts, seed=1), folder / f"{name}.safetensors")
    monkeypatch.setattr(backend, "get_backend", lambda *_, **__: get_backend("torch_ref"))


# tests/hf/models/test_smollm2.py runs README's program, which loads a real model
@pytest.mark.parametrize("page", [p for p in PAGES_WITH_CODE if p != README], ids=name_of)
def test_code_on_a_page_prints_the_text_under_it(page, monkeypatch, request):
    missing = [name for name in NEEDS.get(page, ()) if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    folder = request.getfixturevalue("model_and_adapters") if page in OF_A_MODEL else ROOT
    monkeypatch.chdir(folder)
    if page == DIFFUSION:
        folder = request.getfixturevalue("tmp_path")
        _save_pipeline(folder, monkeypatch)
        monkeypatch.chdir(folder)
    if page == TRANSFORMERS:
        _save_classifiers(folder, request.getfixturevalue("make_base")("llama").config)
    if page == EMBED:
        _save_embedder(folder, request.getfixturevalue("make_base")("llama").model)
    _, printed, expected = run(page)
    assert printed == expected


@pytest.mark.slow
def test_the_commands_of_the_tutorial_serve_what_it_trained(model_and_adapters, monkeypatch):
    for name in ("transformers", "peft", "starlette", "uvicorn"):
        pytest.importorskip(name)
    if shutil.which("curl") is None:
        pytest.skip("no curl")
    monkeypatch.chdir(model_and_adapters)
    run(TUTORIAL)
    consoles = re.findall(r"```console\n\$ (.*?)```", TUTORIAL.read_text(), re.DOTALL)
    serve, ask = (text.replace("\\\n", " ") for text in consoles)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    script, *arguments = shlex.split(serve)[1:]
    server = [sys.executable, str(ROOT / script), *arguments, "--port", port]
    curl = [*shlex.split(ask.replace("8000", port)), "--silent", "--show-error"]
    curl += ["--retry", "100", "--retry-delay", "1", "--retry-connrefused", "--max-time", "150"]
    with subprocess.Popen(server, env=os.environ | {"PYTHONPATH": str(ROOT)}) as process:
        try:
            answer = subprocess.run(curl, stdout=subprocess.PIPE, text=True, check=True).stdout
        finally:
            process.terminate()
    assert json.loads(answer)["choices"][0]["text"].strip() == "sky blue"


def test_no_python_on_a_page_is_left_unrun():
    fences = [
        f"{name_of(page)}: {line}"
        for page in PAGES
        for line in page.read_text().splitlines()
        if re.match(r"\s*(```|~~~)\s*\{?\.?(py|pycon)", line)
    ]
    assert [fence for fence in fences if not fence.endswith(": ```python")] == []


@pytest.mark.parametrize("page", [README, TRANSFORMERS], ids=name_of)
def test_the_pages_that_users_read_first_have_code_that_runs(page):
    assert page in PAGES_WITH_CODE


def test_links_between_pages_lead_somewhere():
    broken = []
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            aim = (page.parent / target).resolve()
            on_site = not page.is_relative_to(ROOT / "docs") or aim.is_relative_to(ROOT / "docs")
            if not (aim.exists() and on_site):
                broken.append(f"{name_of(page)}: {target}")
    assert not broken
