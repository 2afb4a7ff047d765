"""What a worker is told of its model, where a test has none."""

from __future__ import annotations

from kvtier.connectors.vllm.worker_side.loaded import LoadedModel


class StillModel(LoadedModel):
    """Its weights are replaced when a test sets ``other``."""

    other = False

    def __init__(self) -> None:
        pass

    def backends(self) -> list[str]:
        return ["test"]

    def resolved(self) -> dict[str, str] | None:
        return {}

    def others(self) -> tuple[tuple[str, str, str], ...]:
        return ()

    def weights(self) -> str | None:
        return None

    def replaced(self, *, looks: bool) -> bool:
        other, self.other = self.other and looks, False
        return other
