"""`lora-backends bench`: times backends side by side, layer by layer, against a limit.

It needs torch alone; plots need matplotlib.
"""

from lora_backends.bench.cells import Cell
from lora_backends.bench.contenders import Contender, choose
from lora_backends.bench.measure import measure
from lora_backends.bench.results import read_result, summarize
from lora_backends.model_shapes import preset, projections_from, read_config

__all__ = [
    "Cell",
    "Contender",
    "choose",
    "measure",
    "preset",
    "projections_from",
    "read_config",
    "read_result",
    "summarize",
]
