"""Backends of torch.compile for tests: the passes over the graph, as inductor runs them, then another backend."""

from torch._dynamo.backends.registry import lookup_backend

from halfstep.torch.fusion import fuse_all


def fused(backend="aot_eager"):
    """Returns a backend that fuses, and hands the graph to another."""

    def compile(graph, inputs):
        fuse_all(graph)
        graph.graph.lint()
        return (lookup_backend(backend) if isinstance(backend, str) else backend)(graph, inputs)

    return compile
