"""Where clients come in: listeners, who is greeted, and what systemd hands over and is told."""
