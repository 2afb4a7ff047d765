"""Where clients come in: listeners, greetings, and systemd's sockets and messages."""
