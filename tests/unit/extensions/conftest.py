"""vLLM's own Scheduler, as the connector's tests have it."""

from tests.unit.connectors.conftest import core, scheduled_model

__all__ = ["core", "scheduled_model"]
