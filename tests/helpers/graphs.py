"""Captures a call of a model as a CUDA graph."""

import torch


def captured_logits(model, **inputs):
    """Return the graph of a call and the logits that a replay writes.

    PyTorch asks for some calls on another stream before a capture.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            model(**inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = model(**inputs).logits
    return graph, logits
