"""What looks at the machine. Everything else in auto-config is told."""
