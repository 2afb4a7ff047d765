"""What loads in parts are worth on a real engine."""
