"""Writes the generated parts of README and docs: tables of class data and of measurements.

A generated part lies between two comments; the tests compare it with the output of this script:

    <!-- generated: support -->
    <!-- /generated -->

    python tools/pages.py

Long references are only on the site, where a page has

    <!-- on the site: command-line -->
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import figures
import reference_blocks
import suite_blocks
import summaries
import sweep_blocks

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"(<!-- generated: (\S+) -->\n).*?(<!-- /generated -->)", re.DOTALL)
ON_THE_SITE = re.compile(r"<!-- on the site: (\S+) -->")

BLOCKS: dict[str, Callable[[], str]] = {
    "backend-list": reference_blocks.backend_list,
    "support": reference_blocks.support,
    "backends": reference_blocks.backends,
    "configuration": reference_blocks.configuration,
    "generate-configuration": reference_blocks.generate_configuration,
    "commands": reference_blocks.commands,
    "property-groups": suite_blocks.property_groups,
    "profiles": suite_blocks.profiles,
    "h200-summary": summaries.h200,
    "h200-phases": figures.phases,
    "arithmetic-example": figures.worked_example,
    "csgmv-over-triton": summaries.csgmv_over_triton,
    "decode-step-cpu": summaries.decode_step_on_a_cpu,
    "decode-step-h200": summaries.decode_step_on_the_h200,
    "host-time": summaries.host_time,
    "vllm-steps": summaries.vllm_steps,
    "vllm-models": summaries.vllm_models,
    "sglang-steps": summaries.sglang_steps,
    "sglang-experts": summaries.sglang_experts,
    "h200-factors": summaries.factors,
    "h200-experts": summaries.experts,
    "numba-cpu": summaries.numba_cpu,
    "eight-bit-quality": summaries.eight_bit_quality,
    "prefetch": summaries.prefetch,
    "training": summaries.training,
    "peft-architectures": sweep_blocks.architectures,
    "peft-variants": sweep_blocks.variants,
    "peft-bases": sweep_blocks.bases,
    "pipelines": sweep_blocks.pipelines,
    "encoders": sweep_blocks.encoders,
}


SITE_BLOCKS: dict[str, Callable[[], str]] = {
    "command-line": reference_blocks.command_line,
    "properties": suite_blocks.properties,
}


def pages() -> list[Path]:
    """Return every page that has a generated part."""
    candidates = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in candidates if BLOCK.search(page.read_text(encoding="utf-8"))]


def updated(text: str) -> str:
    """Return a page with its generated parts rewritten."""
    return BLOCK.sub(lambda found: f"{found[1]}\n{BLOCKS[found[2]]().strip()}\n\n{found[3]}", text)


def for_the_site(text: str) -> str:
    """Return a page with the references that only the site has."""
    return ON_THE_SITE.sub(lambda found: SITE_BLOCKS[found[1]](), text)


def main() -> None:
    """Rewrite the pages that have changed, and name them."""
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if updated(text) != text:
            page.write_text(updated(text), encoding="utf-8")
            print(f"written: {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
