"""The part that looks at the machine. All other parts of auto-config get its facts. A look that
fails is an unknown :class:`~kvtier.autoconfig.facts.Fact` with the reason, and never an error."""
