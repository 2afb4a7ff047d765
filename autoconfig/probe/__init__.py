"""The part that looks at the machine. All other parts of auto-config get its facts."""
