"""Messages between engines and a kvtier server, as bytes and rules. No socket is opened here."""
