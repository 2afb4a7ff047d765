"""What a worker is told of its model, where a test has none."""

from kvtier.connectors.vllm.worker_side.loaded import LoadedModel


class StillModel(LoadedModel):
    """Its weights are replaced when a test sets ``other``."""

    other = False

    def __init__(self):
        pass

    def backends(self):
        return ["test"]

    def resolved(self):
        return {}

    def others(self):
        return ()

    def weights(self):
        return None

    def replaced(self, *, looks):
        other, self.other = self.other and looks, False
        return other
