"""A timer of layers, for tests of what `measured` chooses: it can be any device."""


class Device:
    """Bf16 takes 1 ms, fp8 as given by (inputs, outputs); it remembers the questions."""

    def __init__(self, seconds=None, otherwise=2e-3):
        self.seconds, self.otherwise, self.asked = seconds or {}, otherwise, []

    def __call__(self, work, precisions):
        self.asked.append((work, precisions))
        size = work.matrix if hasattr(work, "matrix") else (work.inputs, work.outputs)
        found = self.seconds.get(size, self.otherwise)
        if isinstance(found, Exception):
            raise found
        return [1e-3, found]
