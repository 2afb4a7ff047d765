"""The Store: what is where, who holds it, what comes up and what goes down."""
