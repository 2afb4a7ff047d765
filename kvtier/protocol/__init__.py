"""Messages between engines and a kvtier server, as bytes and rules. This package opens
no sockets."""
